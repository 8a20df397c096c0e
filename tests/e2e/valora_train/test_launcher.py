"""Hydra's launchers: jobs side by side share stages, MLflow's database and nothing else."""

import re
import subprocess
import sys

import pytest
from mlflow import MlflowClient

from tests.e2e.valora_train.test_factory import finish, overrides, valora_train
from valora_data.contract.bundle import read_bundle

pytestmark = pytest.mark.slow

PARALLEL = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]


def test_two_fusions_side_by_side(random_llava, tmp_path):
    (tmp_path / "data").mkdir()
    data = [*overrides(tmp_path / "data", random_llava), "train.steps=4", "fusion.unreachable=keep"]
    sweep = ["task.name=one,two", "task.only=[apple,sky]"]
    said = finish(valora_train(tmp_path, [*PARALLEL, *data, *sweep]))
    for number, name in enumerate(("one", "two")):
        bundle = read_bundle(tmp_path / "bundles" / name)
        assert sorted(bundle.domains) == ["apple", "sky"]
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


def test_a_job_that_cannot_is_one_sentence(random_llava, tmp_path):
    (tmp_path / "data").mkdir()
    data = overrides(tmp_path / "data", random_llava)
    process = subprocess.run(
        [sys.executable, "-m", "valora_train.cli", *PARALLEL, *data, "command=teach",
         "task.only=[apple],[pear]"],
        check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode != 0
    assert "unknown domain 'pear'" in process.stderr
    assert "Traceback" not in process.stderr
