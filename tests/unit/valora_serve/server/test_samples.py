"""The sample of requests: what is kept, by whom it may be read, its limit, and what reads it."""

import multiprocessing
from dataclasses import replace

import pytest
from filelock import FileLock
from PIL import Image

from tests.support.fake_engine import CAPTION, PERSON, SCENE, FakeEngine
from tests.support.http_helpers import CHAT, chat, data_url, encoded, picture, serving, until
from valora_serve.errors import SettingsError
from valora_serve.predict.run import read_predictions, take_sample
from valora_serve.server.samples import NOTE, Samples
from valora_serve.server.settings import ServerSettings
from valora_serve.types import Output, Request

PICTURE = picture(40, 20)
GOOD = data_url(encoded(PICTURE))
SHOWN = {"role": "user", "content": [{"type": "input_image", "image_url": GOOD}]}
HEAD = FakeEngine._head(PERSON, [PICTURE], None)
ALL = {"person": 1.0, "scene": 1.0, "caption": 1.0}


def sampling(folder, shares=ALL, **more):
    return Samples(ServerSettings(sample_folder=str(folder), sample_shares=shares, **more))


def offer(samples, model=PERSON, images=(PICTURE,), output=None, **fields):
    """Offer an answer, and wait until it is written."""
    samples.offer(model, Request("r", images=images, **fields), output or Output("r", head=HEAD))
    written(samples)


def written(samples):
    samples._thread.submit(int).result()


def kept(folder):
    return sorted(folder.glob("*/*.png"))


def test_what_requests_ask_is_read_as_what_was_answered(tmp_path):
    folder, out = tmp_path / "kept", tmp_path / "out"
    with serving(sample_folder=str(folder), sample_shares=ALL) as server:
        body = {"images": [GOOD], "domains": ["person", "scene", "caption"]}
        answers = server.client.post("/v1/vision", json=body).json()["domains"]
        server.client.post(CHAT, json=chat(url=GOOD, model="person"))
        until(lambda: len(kept(folder)) == 3)
    assert {file.stat().st_mode & 0o777 for file in [*kept(folder), folder / ".lock"]} == {0o600}
    assert {one.stat().st_mode & 0o777 for one in (folder, *folder.glob("[!.]*"))} == {0o700}
    assert not [*folder.glob("*/.*")]
    assert all(Image.open(file).tobytes() == PICTURE.tobytes() for file in kept(folder))
    out.mkdir()
    models = {model.name: model for model in take_sample(folder, out)}
    assert set(models) == {"person", "scene"} and models["person"].bundle == "d@1"
    assert list(models["scene"].labels) == ["street", "beach"] and models["person"].boxes
    found = read_predictions(out / "predictions.jsonl")
    assert sorted(one.file.split("/")[0] for one in found) == ["person", "person", "scene"]
    for one in found:
        said = answers[one.domain]["results"][0]
        assert (one.width, one.height) == (40, 20)
        assert {name: said[name] for name in one.answer} == one.answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/vision/person", {"images": [GOOD], "store": False}),
        ("/v1/vision/person", {"images": [GOOD], "min_score": 0.1}),
        ("/v1/vision/scene", {"images": [GOOD]}),
        ("/v1/vision", {"images": [GOOD], "domains": ["d"], "store": False}),
        (CHAT, chat(url=GOOD, model="person", store=False)),
        (CHAT, chat(url=GOOD, model="person", store="no")),
        (CHAT, chat(url=GOOD, model="d", store=0)),
        (CHAT, chat(url=GOOD, model="person", valora={"head": False})), (CHAT, chat(model="tiny")),
        ("/v1/responses", {"model": "person", "store": False, "input": [SHOWN]}),
        ("/v1/embeddings", {"model": "person", **chat(url=GOOD)}),
    ],
)  # fmt: skip
def test_what_is_never_kept(tmp_path, path, body):
    with serving(sample_folder=str(tmp_path), sample_shares={"person": 1.0}) as server:
        assert server.client.post(path, json=body).status_code == 200
        written(server.service.samples)
    assert kept(tmp_path) == []


def test_no_request_that_a_small_model_could_not_answer(tmp_path):
    samples = sampling(tmp_path)
    offer(samples, videos=[[PICTURE]])
    for model in (replace(PERSON, prompted=True), CAPTION, replace(SCENE, name="other")):
        offer(samples, model)
    offer(samples, images=[PICTURE] * 2)
    offer(samples, output=Output("r", text="words"))
    assert kept(tmp_path) == []


def test_a_server_without_the_setting_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving() as server:
        found = server.client.post("/v1/vision/person", json={"images": [GOOD]})
        assert found.status_code == 200
    assert [*tmp_path.iterdir()] == []


def test_a_full_folder_or_disk_ends_the_sample_and_no_request(tmp_path, monkeypatch, caplog):
    samples = sampling(tmp_path, sample_bytes=2000)
    (tmp_path / "gone.png").symlink_to("nothing")  # as if somebody deleted it just now
    offer(samples)
    (tmp_path / "gone.png").unlink()
    for _ in range(40):
        offer(samples)
    few = kept(tmp_path)
    assert 0 < len(few) < 40 and sum(file.stat().st_size for file in few) <= 2000
    assert caplog.text.count("keeps nothing more, as it is full: make room") == 1
    samples = sampling(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    offer(samples)
    offer(samples)
    assert kept(tmp_path) == few
    assert caplog.text.count("as No space left on device: make room, and start again") == 1


def test_a_process_that_hangs_ends_the_sample_and_no_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("valora_serve.server.samples._SECONDS", 0.05)
    samples, waits = sampling(tmp_path), []
    lock = lambda *given, **more: waits.append(given) or FileLock(*given, **more)  # noqa: E731
    monkeypatch.setattr("valora_serve.server.samples.FileLock", lock)
    with FileLock(tmp_path / ".lock"):
        for _ in range(3):
            samples.offer(PERSON, Request("r", images=[PICTURE]), Output("r", head=HEAD))
        written(samples)
    assert len(waits) == 1  # the others do not hold up the server's end
    assert kept(tmp_path) == [] and ".lock" in caplog.text and "start again" in caplog.text


def test_pictures_are_passed_over_while_others_wait(tmp_path):
    samples = sampling(tmp_path)
    gate = multiprocessing.Event()
    samples._thread.submit(gate.wait)
    for _ in range(9):
        samples.offer(PERSON, Request("r", images=[PICTURE]), Output("r", head=HEAD))
    gate.set()
    written(samples)
    assert len(kept(tmp_path)) == 4


def _writer(folder, most):
    samples = sampling(folder, sample_bytes=most)
    for _ in range(30):
        offer(samples)


def test_processes_share_the_limit_and_no_file_is_half_there(tmp_path):
    processes = multiprocessing.get_context("fork")
    several = [processes.Process(target=_writer, args=(tmp_path, 15_000)) for _ in range(3)]
    for one in several:
        one.start()
    assert [one.join(60) or one.exitcode for one in several] == [0] * 3
    sizes = [file.stat().st_size for file in kept(tmp_path)]
    assert 15_000 - max(sizes) < sum(sizes) <= 15_000
    assert all(NOTE in Image.open(file).info for file in kept(tmp_path))


@pytest.mark.parametrize(
    "name", ["../../up", "..", ".", "a/b", "/etc", "\n", "ö\u2028", "", "x" * 300, "街道" * 40]
)
def test_names_of_domains_lead_nowhere_else(tmp_path, name):
    folder = tmp_path / "kept" / "here"
    offer(sampling(folder, {name: 1.0}), replace(PERSON, name=name))
    assert len([*folder.rglob("*.png")]) == 1
    assert all(file.is_relative_to(folder) for file in tmp_path.rglob("*.png"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sample_folder": "FILE", "sample_shares": ALL}, "FILE cannot be written .*: name"),
        ({"sample_folder": "/proc/no", "sample_shares": ALL}, "sample_folder /proc/no cannot be"),
        ({"sample_folder": "x"}, "go together"), ({"sample_shares": ALL}, "go together"),
    ],
)  # fmt: skip
def test_mistakes_are_found_at_the_start(tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    with pytest.raises((SettingsError, ValueError), match=said):
        Samples(ServerSettings(**settings))


def test_answers_of_older_bundles_and_other_pictures(tmp_path):
    samples, out = sampling(tmp_path / "kept"), tmp_path / "out"
    out.mkdir()
    for bundle in ("d@1", "d@2", "d@2"):
        offer(samples, replace(PERSON, bundle=bundle))
    [model] = take_sample(tmp_path / "kept", out)
    assert model.bundle == "d@2" and len(read_predictions(out / "predictions.jsonl")) == 2
    for content in (b"", encoded(PICTURE), encoded(PICTURE)[:50]):
        (tmp_path / "kept" / "a.png").write_bytes(content)
        with pytest.raises(SettingsError, match=r"a\.png holds no answer of a server: .*--bundle"):
            take_sample(tmp_path / "kept", out)
    with pytest.raises(SettingsError, match="out holds no sample of a server: name a bundle"):
        take_sample(out, out)
    assert len(read_predictions(out / "predictions.jsonl")) == 2
