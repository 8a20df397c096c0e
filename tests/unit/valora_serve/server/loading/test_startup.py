"""Finding the bundles that the command line names."""

import json

import pytest

from tests.support.http_helpers import bundle
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.server.loading import startup


def test_bundles_are_found_by_folder_and_folder_of_folders(tmp_path):
    for name in ("a", "b", "b@1", ".c.partial", "other"):
        (tmp_path / name).mkdir()
        if name != "other":
            (tmp_path / name / "bundle.json").write_text(json.dumps({"name": name}))
    a = tmp_path / "b" / ".." / "a"
    for named, found in (
        ([tmp_path], [tmp_path / "a", tmp_path / "b"]), ([tmp_path / "b@1"], [tmp_path / "b@1"]),
        ([tmp_path / "a", a], [a]),
    ):  # fmt: skip
        assert startup.find_bundles([str(one) for one in named], tmp_path) == found
    for name in (tmp_path / "none", tmp_path / "other", tmp_path / "a" / "bundle.json"):
        with pytest.raises(SettingsError, match="is no bundle"):
            startup.find_bundles([str(name)], tmp_path)


def test_two_bundles_of_one_name_are_refused(tmp_path):
    for name in ("a1", "a2"):
        bundle(tmp_path / name)
    with pytest.raises(SettingsError, match=r"/a1 and \S+/a2 are both bundle cars: serve one$"):
        startup.find_bundles([str(tmp_path)], tmp_path)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        uri, place = f"runs:/{run.info.run_id}/bundle", tmp_path / "downloads"
        [found] = startup.find_bundles([uri], place)
        assert (found / "bundle.json").read_text() == '{"name": "made"}'
        with pytest.raises(SettingsError, match="MLflow"):
            startup.find_bundles(["models:/nobody/1"], place)


EXACT, BOTH = {}, {"dtypes": ["float32", "bfloat16"]}


@pytest.mark.parametrize(
    ("named", "asked", "served"),
    [("photo", "tiny", "photo"), ("tiny", "photo", "tiny"), ("/a/llava", "tiny", "tiny"),
     ("photo", "/a/llava", "/a/llava"), (None, "tiny", "tiny")],
)  # fmt: skip
def test_the_shipped_base_model_of_the_first_bundle_is_served(
    monkeypatch, tmp_path, named, asked, served
):
    manifest = {"base": {"id": named}}
    monkeypatch.setattr(startup, "read_manifest", lambda _: manifest)
    made = startup.follow_bundles(EngineSettings(base=asked), [tmp_path] if named else [])
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
