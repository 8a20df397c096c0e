"""Jobs that fail under each launcher, in a program whose jobs only write a file."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_sweep import CONFIG

ROOT = Path(__file__).parents[3]
RAY = ["hydra/launcher=ray", "hydra.launcher.num_gpus=0"]
LAUNCHERS = {
    "basic": [],
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local", "hydra.launcher.gpus_per_node=2"],
    "ray": RAY,
}
launchers = pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "ray")) for name in LAUNCHERS],
)


def sweep(folder, *arguments, **environment):
    conf = folder / "settings"
    conf.mkdir(exist_ok=True)
    (conf / "config.yaml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tiny_sweep", str(conf), "-m", *arguments],
        cwd=folder, check=False, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
             **environment},
    )  # fmt: skip
    return done.returncode, done.stderr.strip().splitlines()


def written(folder):
    return {p.stem: ast.literal_eval(p.read_text()) for p in folder.glob("*.txt")}


@pytest.mark.slow
@launchers
def test_the_others_end_when_jobs_fail(launcher, tmp_path):
    """Job 1 refuses, job 2 is a fault of the code, job 0 and 3 are done."""
    given = ["name=a,b,c,d", "+do={b:refuse,c:explode,d:write_late}"]
    status, said = sweep(tmp_path, *LAUNCHERS[launcher], *given, CUDA_VISIBLE_DEVICES="3")
    assert status == 1
    assert said[-1].startswith("error: 2 of 4 jobs failed, 2 are done; correct this and run the ")
    assert "job 1 (name=b): " in said[-1] and "b is refused: choose another" in said[-1]
    assert "job 2 (name=c): " in said[-1] and "explode" in said[-1]
    assert not any("Traceback" in line for line in said)
    found = written(tmp_path)
    assert set(found) == {"a", "d"}
    assert {one["cwd"] for one in found.values()} == {str(tmp_path)}
    assert {len(one["sweep"]) for one in found.values()} == {16}
    assert len({one["sweep"] for one in found.values()}) == 1
    if launcher in ("basic", "joblib"):  # the others give jobs the GPUs that they ask for
        assert {one["gpus"] for one in found.values()} == {"3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "said"),
    [("submitit", "error: a job ended without a result ("),
     ("ray", "error: 1 of 3 jobs failed, 2 are done; correct this and run the same command again "
      "to continue: job 0 (name=a): its process was killed")],
)  # fmt: skip
def test_the_others_end_when_a_job_is_killed(launcher, said, tmp_path):
    given = ["name=a,b,c", "+do={a:die}"]
    status, found = sweep(tmp_path, *LAUNCHERS[launcher], *given)
    assert status == 1
    assert found[-1].startswith(said)
    assert set(written(tmp_path)) == {"b", "c"}
    if launcher == "ray":
        return  # the rest is the same, and Ray takes its time to start
    # The same command again does what is left; here nothing fails any more.
    again = [one.replace("die", "write") for one in given]
    assert sweep(tmp_path, *LAUNCHERS[launcher], *again)[0] == 0
    assert set(written(tmp_path)) == {"a", "b", "c"}


def test_joblib_ends_the_others_when_a_job_is_killed(tmp_path):
    given = ["name=a,b", "+do={a:die,b:write_late}"]
    status, said = sweep(tmp_path, *LAUNCHERS["joblib"], *given)
    assert status == 1
    assert said[-1].startswith("error: the process of a job was killed, as happens when the memory")
    assert "lower hydra.launcher.n_jobs" in said[-1]
    assert not written(tmp_path)


@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit"])
def test_all_is_well(launcher, tmp_path):
    status, said = sweep(tmp_path, *LAUNCHERS[launcher], "name=a,b,c")
    assert (status, said) == (0, [])
    found = written(tmp_path)
    assert set(found) == {"a", "b", "c"}
    if launcher == "submitit":
        assert len({one["pid"] for one in found.values()}) == 3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (["hydra/launcher=ray", "hydra.launcher.address=127.0.0.1:1"], "cannot be joined"),
    ],
)
def test_launchers_that_cannot_start(wrong, sentence, tmp_path):
    status, said = sweep(tmp_path, *wrong, "name=a,b")
    assert status == 1 and said[-1].startswith("error: ") and sentence in said[-1]
    assert not any("Traceback" in line for line in said)
    assert not written(tmp_path)


@pytest.mark.slow
def test_a_job_that_no_machine_has_room_for(tmp_path):
    status, said = sweep(tmp_path, *RAY, "+hydra.launcher.resources.camera=2", "name=a,b")
    assert status == 1
    assert "no machine of the Ray cluster has 1 CPU, 2 camera for a job: lower" in said[-1]


def test_a_missing_library_is_named(tmp_path):
    # A package of that name that cannot be imported comes first.
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('hidden')")
    status, said = sweep(tmp_path, "hydra/launcher=ray", "name=a,b")
    assert status == 1
    assert said[-1] == "error: hydra/launcher=ray needs Ray: pip install 'valora[cluster]'"
