"""The state of a fusion on disk: read back as it was written, old snapshots discarded."""

import torch

from valora_train.fusion.state import SNAPSHOTS, STATE, FusionState
from valora_train.stage import read_json, write_json


def test_a_state_is_read_back(tmp_path):
    state = FusionState(tmp_path, {"a": {"val": 0.5, "test": 0.4}})
    state.told.append({"a": 0.9})
    state.seconds.append(1.5)
    state.mlflow_run_id = "run"
    state.write_snapshot("adapter-1", 1, {"lora/x": torch.arange(3.0)})
    state.save()
    again = FusionState(tmp_path, {"b": {"val": 0.1, "test": 0.1}})
    assert again.head_only == {"a": {"val": 0.5, "test": 0.4}}
    assert (again.told, again.seconds, again.mlflow_run_id) == ([{"a": 0.9}], [1.5], "run")
    assert torch.equal(again.read_snapshot("adapter-1")["lora/x"], torch.arange(3.0))


def test_the_format_of_earlier_versions_is_read(tmp_path):
    # Before the first MLflow run was started, its key was missing.
    old = {"head_only": {}, "told": [{"a": 0.9}], "seconds": [1.0], "snapshots": {"adapter-1": "f"}}
    write_json(tmp_path / STATE, old)
    state = FusionState(tmp_path, {})
    assert state.told == [{"a": 0.9}]
    assert state.snapshots == {"adapter-1": "f"}
    assert state.mlflow_run_id is None
    state.save()
    assert read_json(tmp_path / STATE) == {**old, "mlflow_run_id": None}


def test_a_replaced_snapshot_stays_until_it_is_discarded(tmp_path):
    state = FusionState(tmp_path, {})
    for number in (1, 2):
        state.write_snapshot("adapter-1", number, {"x": torch.full((1,), float(number))})
    files = tmp_path / SNAPSHOTS
    assert len(list(files.iterdir())) == 2  # a kill before `save` still finds the first
    state.discard_old_snapshots()
    assert [file.name for file in files.iterdir()] == ["adapter-1-02.safetensors"]
    assert state.read_snapshot("adapter-1")["x"] == 2
