"""What commit cd9fad5 (2026-11-26) made still loads: bundles, contexts, state files, MLflow runs.

The base model is a random LLaVA; the pictures of the bundle were left out.
"""

import gzip
import shutil
from pathlib import Path

import pytest

from tests.support.engine_reference import ask, make_engine, noise, run
from valora_serve.server.loading.state_file import StateFile
from valora_serve.types import Request, SamplingParams
from valora_train.fusion.state import FusionState
from valora_train.reporting import tracking
from valora_train.reporting.ui import latest_fusions
from valora_train.settings import PathSettings
from valora_train.stages import gate

MADE = Path(__file__).parents[1] / "fixtures" / "cd9fad5"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder in which all of it was made, as the working directory."""
    shutil.copytree(MADE, tmp_path, dirs_exist_ok=True)
    (tmp_path / "mlflow.db").write_bytes(gzip.decompress((MADE / "mlflow.db.gz").read_bytes()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_gate_replays_a_bundle(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.main(["own"]) == 0
    assert capsys.readouterr().out == "own: 4 golden examples reproduced\n"


@pytest.mark.usefixtures("one_thread")
def test_the_engine_answers_from_bundle_and_contexts(here: Path) -> None:
    engine = make_engine("base")
    models = [*engine.load("bundle", here / "own"), *engine.load("bundle", here / "documents")]
    names = [model.name for model in models]
    assert set(names) >= {"whole", "ragged", "tokens", "closed"}
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    asked = [
        Request(name, name, messages=ask("What?", images=1), images=[noise(30, 40, 0)],
                sampling=sampling)
        for name in names
    ]  # fmt: skip
    assert {name: got.error for name, got in run(engine, asked).items()} == dict.fromkeys(names)


def test_the_state_file_of_a_server(here: Path) -> None:
    expected = {
        "version": 1,
        "adapters": {"late": "documents/adapters/late"},
        "bundles": {"own": "own"},
        "contexts": {"notes": "contexts/notes"},
        "unloaded": ["detection"],
        "decode_only": ["late"],
    }
    found = StateFile(here / "served.json").read().model_dump()
    assert {name: found[name] for name in expected} == expected  # later versions may know more


def test_a_fusion_continues_from_its_state_and_its_run(here: Path) -> None:
    state = FusionState(here / "fusion", {})
    assert [list(accuracies) for accuracies in state.accuracies] == [
        ["apple"],
        ["apple", "sky"],
        ["sky"],
    ]
    for adapter in ("adapter-1", "adapter-2"):
        assert state.read_snapshot(adapter)
    assert state.mlflow_run_id
    paths = PathSettings(work=str(here), tracking=f"sqlite:///{here}/mlflow.db")
    tracking.connect(paths, "valora/own")
    assert tracking.find_run(state.mlflow_run_id)
    ((experiment, name, _),) = latest_fusions()
    assert (experiment, name) == ("valora/own", "own · first_fit · seed 0")
