"""Finding the bundles that the command line names."""

import pytest

from tests.support.http_helpers import bundle
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.server.loading import startup


def test_bundles_are_found_by_folder_and_folder_of_folders(tmp_path):
    for name in ("a", "b", "b@1", ".c.partial", "other"):
        if name != "other":
            bundle(tmp_path / name, name=name[0])
    (tmp_path / "other").mkdir()
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
    bundle(folder)
    request.addfinalizer(lambda: mlflow.set_tracking_uri(None))  # it holds for the whole process
    mlflow.set_tracking_uri(store)
    experiment = mlflow.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as run:
        mlflow.log_artifacts(str(folder), "bundle")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", store)
        uri, place = f"runs:/{run.info.run_id}/bundle", tmp_path / "downloads"
        [found] = startup.find_bundles([uri], place)
        assert (found / "bundle.json").read_text() == (folder / "bundle.json").read_text()
        with pytest.raises(SettingsError, match="MLflow"):
            startup.find_bundles(["models:/nobody/1"], place)


BOTH = {"id": "x", "dtypes": ["float32", "bfloat16"]}
EXACT = {"id": "x"}


@pytest.mark.parametrize(
    ("bases", "multiplies", "asked", "base", "dtype"),
    [
        # The shipped base model of the first bundle is served.
        ([{"id": "photo"}], False, {"base": "tiny"}, "photo", "auto"),
        ([{"id": "tiny"}], False, {"base": "photo"}, "tiny", "auto"),
        ([{"id": "/a/llava"}], False, {"base": "tiny"}, "tiny", "auto"),
        ([{"id": "photo"}], False, {"base": "/a/llava"}, "/a/llava", "auto"),
        ([], True, {"base": "tiny"}, "tiny", "auto"),
        # A CPU that multiplies bfloat16 serves in it if all bundles were measured so.
        ([EXACT], True, {}, "tiny", "auto"), ([BOTH, BOTH], True, {}, "tiny", "bfloat16"),
        ([BOTH, EXACT], True, {}, "tiny", "auto"), ([BOTH], False, {}, "tiny", "auto"),
        ([BOTH], True, {"dtype": "float32"}, "tiny", "float32"),
    ],
)  # fmt: skip
def test_bundles_choose_the_base_model_and_its_type(
    monkeypatch, bases, multiplies, asked, base, dtype
):
    monkeypatch.setattr(startup, "read_manifest", lambda one: {"base": one})
    monkeypatch.setattr(startup, "cpu_multiplies_bfloat16", lambda: multiplies)
    made = startup.follow_bundles(EngineSettings(**asked), bases)
    assert (made.base, made.dtype, made.quantize) == (base, dtype, "none")
