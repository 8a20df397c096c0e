"""The state of a fusion on disk: read back as it was written, old snapshots discarded."""

import pytest
import torch

from valora_train.errors import StageError
from valora_train.fusion.state import SNAPSHOTS, STATE, FusionState


def test_a_state_is_read_back(tmp_path):
    state = FusionState(tmp_path, {"a": {"val": 0.5, "test": 0.4}})
    state.accuracies.append({"a": 0.9})
    state.seconds.append(1.5)
    state.mlflow_run_id = "run"
    tensors = {
        "head/sky/b": torch.tensor(2.0), "head/apple/a": torch.ones(2, 3, dtype=torch.bfloat16),
        "lora/z": torch.arange(4), "head/sky/a": torch.zeros(0),
    }  # fmt: skip
    state.write_snapshot("adapter-1", 1, tensors)
    state.save()
    again = FusionState(tmp_path, {"b": {"val": 0.1, "test": 0.1}})
    assert again.head_only == {"a": {"val": 0.5, "test": 0.4}}
    assert (again.accuracies, again.seconds, again.mlflow_run_id) == ([{"a": 0.9}], [1.5], "run")
    found = again.read_snapshot("adapter-1")
    assert list(found) == list(tensors)
    assert all(torch.equal(found[key], value) for key, value in tensors.items())


@pytest.mark.parametrize("file", [STATE, f"{SNAPSHOTS}/adapter-1-01.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "changed"])
def test_damage_names_the_folder_to_delete(tmp_path, file, damage):
    state = FusionState(tmp_path, {})
    state.write_snapshot("adapter-1", 1, {"lora/x": torch.arange(3.0)})
    state.save()
    path = tmp_path / file
    content = path.read_bytes()
    path.write_bytes({
        "missing": content, "empty": b"", "truncated": content[:-3],
        "changed": content[:-3] + b"?" + content[-2:],
    }[damage])  # fmt: skip
    if damage == "missing":
        path.unlink()
        if file == STATE:
            return  # a fusion that has not begun
    with pytest.raises(StageError, match=f"damaged .*: delete {tmp_path} and run"):
        FusionState(tmp_path, {}).read_snapshot("adapter-1")
