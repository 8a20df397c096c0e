"""What leader and followers agree on: page tables, and who encodes which image."""

import random

import pytest

from valora_serve.engine.crew import Crew, _start, device_of
from valora_serve.engine.lockstep import Tables, _deal
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError


def test_page_tables_arrive_whole_and_only_news_is_sent() -> None:
    leader, follower = Tables(), Tables()
    generator = random.Random(3)
    table: list[int] = []
    for step in range(200):
        if step % 17 == 0:  # another request takes the place
            table = [generator.randrange(99) for _ in range(generator.randrange(5))]
        elif generator.random() < 0.3:
            table = [*table, generator.randrange(99)]
        kept, news = leader.shorten(4, table)
        assert follower.extend(4, kept, news) == table
        assert len(news) <= 1 or step % 17 == 0
    table[0:1] = [100]
    kept, news = leader.shorten(4, table)
    assert (kept, news) == (0, table)


def test_images_are_dealt_out_in_order_by_weight() -> None:
    generator = random.Random(4)
    for size in (1, 2, 3, 5):
        for _ in range(50):
            weights = [generator.randrange(1, 50) for _ in range(generator.randrange(size, 20))]
            found = _deal(weights, size)
            assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
            assert found[-1][1] == len(weights)
            assert all(stop > start for start, stop in found)
    assert _deal([1] * 8, 2) == [(0, 4), (4, 8)]
    assert _deal([9, 1, 1, 1], 2) == [(0, 1), (1, 4)]


def test_more_gpus_than_there_are_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    two = EngineSettings(tensor_parallel=2, device="cuda")
    assert [str(device_of(two, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    for device, size, said in (
        ("cuda", 3, "3 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("auto", 4, "4 GPUs are asked for, and this machine has 2: ask for fewer"),
        ("cuda:1", 2, "2 GPUs are asked for, and this machine has 1 from cuda:1 on: ask for"),
    ):
        with pytest.raises(SettingsError, match=said):
            device_of(EngineSettings(tensor_parallel=size, device=device), 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(SettingsError, match="this machine has none"):
        device_of(EngineSettings(tensor_parallel=2), 0)
    assert device_of(EngineSettings(tensor_parallel=2, device="cpu"), 1).type == "cpu"


@pytest.mark.slow
def test_a_follower_ends_with_its_leader() -> None:
    follower = _start(1, Crew.module)
    try:
        assert follower.steps.recv() == ("hello", 0)
        follower.steps.close()
        follower.packs.close()
        assert follower.process.wait(60) == 1
    finally:
        follower.process.kill()
        follower.process.wait()
