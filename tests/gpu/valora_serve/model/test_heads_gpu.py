"""Heads on a real GPU: `launch_heads` does not wait for the device."""

import pytest
import torch

from tests.support.serve_helpers import make_box_head, make_label_head
from valora_data.contract.heads import read_head
from valora_data.contract.results import LabelResult
from valora_serve.model.heads import HeadRequest, launch_heads

pytestmark = pytest.mark.gpu


def test_heads_launch_without_waiting(tmp_path):
    generator = torch.Generator().manual_seed(1)
    files = [
        make_label_head(tmp_path / "a", 64, list("abc"), seed=1),
        make_label_head(tmp_path / "b", 64, [str(n) for n in range(101)], seed=2, kind="action",
                        pooling="visual_mean"),
        make_box_head(tmp_path / "c", 64, ["x"], (2, 3), seed=3),
    ]  # fmt: skip
    heads = [read_head(file, 64) for file in files]
    inputs = []
    for number in range(6):
        head = heads[number % 3]
        states = torch.randn(6 if head.reads_visual else 9 + number, 64, generator=generator)
        inputs.append(HeadRequest(head, states, [(30, 40)]))
    on_gpu = {id(head): head.to("cuda") for head in heads}
    there = [HeadRequest(on_gpu[id(item.head)], item.hidden.cuda(), item.sizes) for item in inputs]
    launch_heads(there)()  # the first call of a library may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = launch_heads(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not torch.cuda.current_stream().query()  # the sleep before the heads goes on
    for mine, expected in zip(read(), launch_heads(inputs)(), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(mine.logits), torch.from_numpy(expected.logits), rtol=1e-4, atol=1e-4
        )
        if isinstance(mine, LabelResult):
            assert mine.label == expected.label
