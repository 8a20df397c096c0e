"""Hydra's launchers: jobs side by side share stages, MLflow's database and nothing else."""

import os
import re

import pytest
from mlflow import MlflowClient

from tests.e2e.valora_train.test_factory import overrides, valora_train
from tests.support.forked import finish
from tests.support.stores import new_store
from tests.unit.valora_teachers.test_registry import EXAMPLE
from valora_data.contract.bundle import read_bundle
from valora_train.stage import read_json

pytestmark = pytest.mark.slow

PARALLEL = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
LAUNCHERS = {
    "submitit": ["-m", "hydra/launcher=submitit_local", "command=distill"],
    "ray": ["-m", "hydra/launcher=ray", "command=fuse"],
}


def test_two_fusions_side_by_side(random_llava, tmp_path):
    (tmp_path / "data").mkdir()
    few = ["train.steps=2", "train.probe_steps=2", "fusion.unreachable=keep"]
    data = [*overrides(tmp_path / "data", random_llava), *few]
    sweep = ["task.name=one,two", "task.only=[apple]"]
    said = finish(valora_train(tmp_path, [*PARALLEL, *data, *sweep]))
    for number, name in enumerate(("one", "two")):
        bundle = read_bundle(tmp_path / "bundles" / name)
        assert list(bundle.domains) == ["apple"]
        # Every line says whose it is.
        assert len(re.findall(rf"(?m)^ +{name} {number} +\w+ ", said)) > 5
    # Both wanted the same samples: one made them, the other waited.
    made = [line for line in said.splitlines() if " data apple " in line]
    assert len(made) == 2 and sum("up to date" in line for line in made) == 1
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    for name in ("one", "two"):
        experiment = client.get_experiment_by_name(f"valora/{name}")
        parents = [
            run for run in client.search_runs([experiment.experiment_id])
            if "mlflow.parentRunId" not in run.data.tags
        ]  # fmt: skip
        assert [run.info.status for run in parents] == ["FINISHED"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_small_models_labels_and_fusions_elsewhere(
    launcher, installed, random_llava, tmp_path, monkeypatch
):
    """Two jobs teach and distill together, and fuse, on Ray, each for themselves."""
    installed("valora.teachers", "mean_box", EXAMPLE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "data").mkdir()
    given = [
        *overrides(tmp_path / "data", random_llava), "teacher=own", "teacher.kind=mean_box",
        "domains.apple.teacher=train", "train.steps=2", "train.probe_steps=2",
        "fusion.unreachable=keep", f"paths.tracking={new_store(tmp_path)}", "task.name=one,two",
        "task.only=[apple]",
    ]  # fmt: skip
    finish(valora_train(tmp_path, [*LAUNCHERS[launcher], *given]))
    fused = launcher == "ray"
    for stage in ("data-apple", "teach-apple", "distill-apple", "fuse-one", "fuse-two"):
        found = list((tmp_path / ".valora").glob(f"{stage}-*[0-9a-f]"))
        assert len(found) == (fused or not stage.startswith("fuse"))
    assert not list((tmp_path / ".valora").glob("*.partial"))
    if fused:
        table = read_json(next((tmp_path / ".valora" / "sweeps").glob("*-one.json")))
        assert set(table) == {"0"} and table["0"]["figures"]["adapters"] == 1


def test_a_job_that_cannot_is_one_sentence(random_llava, tmp_path):
    (tmp_path / "data").mkdir()
    data = overrides(tmp_path / "data", random_llava)
    given = [*PARALLEL, *data, "command=teach", "task.only=[apple],[pear]"]
    process = valora_train(tmp_path, given)
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0
    assert "unknown domain 'pear'" in said
    assert "Traceback" not in said
