"""Finding the bundles that the command line names."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from tests.support.fake_engine import FakeEngine
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.server.loading import startup
from valora_serve.server.settings import ServerSettings


def test_bundles_are_found_by_folder_and_folder_of_folders(tmp_path):
    for name in ("a", "b", "b@1", ".c.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").write_text("{}")
    (tmp_path / "other").mkdir()
    assert startup.find_bundles([str(tmp_path)], tmp_path) == [tmp_path / "a", tmp_path / "b"]
    old = startup.find_bundles([str(tmp_path / "b@1")], tmp_path)
    assert old == [tmp_path / "b@1"]
    twice = [str(tmp_path / "a"), str(tmp_path / "b" / ".." / "a")]
    assert startup.find_bundles(twice, tmp_path) == [tmp_path / "b" / ".." / "a"]
    for name in (tmp_path / "none", tmp_path / "other", tmp_path / "a" / "bundle.json"):
        with pytest.raises(SettingsError, match="is no bundle"):
            startup.find_bundles([str(name)], tmp_path)


def test_two_bundles_of_one_name_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(startup, "read_manifest", lambda folder: {"name": folder.name[0]})
    for name in ("a1", "a2", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "bundle.json").touch()
    assert len(startup.find_bundles([str(tmp_path / "a1"), str(tmp_path / "b")], tmp_path)) == 2
    with pytest.raises(SettingsError, match=r"/a1 and \S+/a2 are both bundle a: serve one$"):
        startup.find_bundles([str(tmp_path)], tmp_path)


def test_names_of_settings_that_no_model_has_are_said(caplog, tmp_path):
    settings = ServerSettings(
        deadlines={"person": 1.0, "persn": 1.0}, sample_folder=str(tmp_path / "s"),
        sample_shares={"scene": 1.0, "base": 0.5}, state_file=str(tmp_path / "state.json"),
    )  # fmt: skip
    engine = FakeEngine()
    engine.warm_up = AsyncMock()
    asyncio.run(startup.make_app(engine, settings, [], EngineSettings()))
    assert [record.message for record in caplog.records] == [
        f"{setting}: there is no model {name}, so this has no effect"
        for setting, name in (("deadlines", "persn"), ("sample_shares", "base"))
    ]


@pytest.mark.slow
def test_a_bundle_from_mlflows_registry(tmp_path, request):
    mlflow = pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "bundle.json").write_text('{"name": "made"}')
    request.addfinalizer(lambda: mlflow.set_tracking_uri(None))  # it holds for the whole process
    mlflow.set_tracking_uri(store)
    experiment = mlflow.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(folder), "bundle")
    found = _with_tracking(store, f"runs:/{run.info.run_id}/bundle", tmp_path / "downloads")
    assert (found / "bundle.json").read_text() == '{"name": "made"}'
    with pytest.raises(SettingsError, match="MLflow"):
        _with_tracking(store, "models:/nobody/1", tmp_path / "downloads")


def _with_tracking(store, uri, place):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        return startup.find_bundles([uri], place)[0]


EXACT, BOTH = {}, {"dtypes": ["float32", "bfloat16"]}


@pytest.mark.parametrize(
    ("bundle", "asked", "served"),
    [("photo", "tiny", "photo"), ("tiny", "photo", "tiny"), ("/a/llava", "tiny", "tiny"),
     ("photo", "/a/llava", "/a/llava"), (None, "tiny", "tiny")],
)  # fmt: skip
def test_the_shipped_base_model_of_the_first_bundle_is_served(
    monkeypatch, tmp_path, bundle, asked, served
):
    manifest = {"base": {"id": bundle}}
    monkeypatch.setattr(startup, "read_manifest", lambda _: manifest)
    made = startup.follow_bundles(EngineSettings(base=asked), [tmp_path] if bundle else [])
    assert (made.base, made.quantize) == (served, "none")


@pytest.mark.parametrize(
    ("dtypes", "multiplies", "asked", "served"),
    [([EXACT], True, "auto", "auto"), ([BOTH, BOTH], True, "auto", "bfloat16"),
     ([BOTH, EXACT], True, "auto", "auto"), ([BOTH], False, "auto", "auto"),
     ([BOTH], True, "float32", "float32"), ([], True, "auto", "auto")],
)  # fmt: skip
def test_a_cpu_serves_in_16_bits_if_all_bundles_were_measured_so(
    monkeypatch, dtypes, multiplies, asked, served
):
    monkeypatch.setattr(startup, "read_manifest", lambda one: {"base": {"id": "x"} | one})
    monkeypatch.setattr(startup, "cpu_multiplies_bfloat16", lambda: multiplies)
    assert startup.follow_bundles(EngineSettings(dtype=asked), dtypes).dtype == served
