"""Checkpoints: read back as written, ignored when damaged, written when due, never in the way."""

import pytest
import torch

from valora_data.checkpoint import Checkpoint


def state():
    return {"weights": torch.arange(5.0), "step": 3, "parts": [{"a": torch.ones(2)}]}


def test_a_state_is_read_back(tmp_path, caplog):
    checkpoint = Checkpoint(tmp_path / "c", every=0)
    assert checkpoint.load("apple") is None
    assert checkpoint.save("apple", state)
    found = Checkpoint(tmp_path / "c").load("apple")
    assert torch.equal(found["weights"], torch.arange(5.0)) and found["step"] == 3
    assert torch.equal(found["parts"][0]["a"], torch.ones(2))
    assert Checkpoint(tmp_path / "c").load("pear") is None
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    checkpoint.discard()
    assert not list(tmp_path.iterdir())
    nowhere = Checkpoint(tmp_path / "missing" / "c", every=0)  # as on a full disk
    assert not nowhere.save("apple", state) and not nowhere.save("apple", state)
    assert caplog.text.count("no checkpoint could be written") == 1


def test_it_is_written_seldom_and_cheaply(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    checkpoint = Checkpoint(tmp_path / "c", every=30)

    def slow():
        now[0] += 2
        return state()

    made = []
    for second in range(100, 460, 10):
        now[0] = max(now[0], second)
        if checkpoint.save("apple", slow):
            made.append(second)
    # After the first it waits until its two seconds were at most a hundredth of the time.
    assert made == [130, 340]
    again = Checkpoint(tmp_path / "c")
    again.load("apple")
    assert again.spent == 242.0


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "folder"])
def test_damage_is_found(tmp_path, damage, caplog):
    path = tmp_path / "c"
    Checkpoint(path, every=0).save("apple", state)
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    else:
        middle = len(content) // 2
        changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        path.write_bytes({"empty": b"", "truncated": content[:-1], "changed": changed}[damage])
    assert Checkpoint(path).load("apple") is None
    assert "the training starts anew" in caplog.text
