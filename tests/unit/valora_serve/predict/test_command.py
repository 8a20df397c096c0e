"""`valora predict` over the fake engine: what is kept, what is asked again, what is refused."""

import asyncio
import contextlib
import json
import os
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from PIL import Image

from tests.support.data_sets import picture, write_video
from tests.support.fake_engine import CAPTION, PERSON, SCENE, FakeEngine
from valora_serve.predict import command
from valora_serve.predict.run import answer_all, find_jobs, make_request, read_predictions
from valora_serve.server.samples import Samples
from valora_serve.server.settings import ServerSettings
from valora_serve.types import Output, Request


class Engine(FakeEngine):
    """Is interrupted after `fails_after` requests."""

    fails_after = None

    async def generate(self, request):
        if self.fails_after is not None and len(self.asked) >= self.fails_after:
            raise KeyboardInterrupt
        async for output in super().generate(request):
            yield output


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """The engines that the command has started."""
    found = []

    async def start(_settings):
        found.append(Engine())
        return found[-1]

    monkeypatch.setattr("valora_serve.engine.async_engine.start_engine", start)
    monkeypatch.setattr(command, "short_pauses", contextlib.nullcontext)  # a collection takes 1 s
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    content = {
        "schema_version": 2, "name": "d", "version": 1, "files": {}, "adapters": {},
        "base": {"id": "tiny", "sha256": "0"},
        "domains": {name: {"adapter": None, "media": media} for name, media in (
            ("person", None), ("car", "images"), ("mood", "text"))},  # which is left out
    }  # fmt: skip
    (bundle / "bundle.json").write_text(json.dumps(content))
    for number in range(5):
        picture(tmp_path / "in" / f"{number}.png", number, (40 + number, 20))
    return found


def predict(tmp_path, *more):
    return command.main([
        str(tmp_path / "in"), "--bundle", str(tmp_path / "bundle"), "--out", str(tmp_path / "out"),
        *more,
    ])  # fmt: skip


def rows(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").open()]


def test_every_domain_answers_every_file(engines, tmp_path, capsys):
    assert predict(tmp_path, "--format", "jsonl,coco,labelstudio", "--min-score", "0.3") == 0
    found = {(row["file"], row["domain"]): row for row in rows(tmp_path)}
    assert set(found) == {(f"{n}.png", name) for n in range(5) for name in ("person", "car")}
    boxes = found["2.png", "person"]["answer"]["detections"]
    assert [row["box"] for row in boxes] == [[0, 0, 21, 10], [10.5, 5, 42, 20]]
    assert {request.min_score for request in engines[0].asked} == {0.3}
    assert engines[0].closed
    assert (tmp_path / "out" / "coco.json").is_file()
    assert (tmp_path / "out" / "labelstudio.json").is_file()
    assert "person" in capsys.readouterr().err
    assert predict(tmp_path, "--min-score", "0.1") == 1 and len(engines) == 1  # are not mixed
    assert "of another run, with other min_score" in capsys.readouterr().err


def test_an_interrupted_run_continues(engines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Engine, "fails_after", 4)
    assert predict(tmp_path, "--at-once", "1") == 130
    assert "run the same command again" in capsys.readouterr().err
    assert len(rows(tmp_path)) == 4
    path = tmp_path / "out" / "predictions.jsonl"
    path.write_bytes(path.read_bytes()[:-5])  # killed while it wrote
    monkeypatch.setattr(Engine, "fails_after", None)
    again = shutil.copytree(tmp_path / "bundle", tmp_path / "downloaded again")
    assert predict(tmp_path, "--at-once", "1", "--bundle", str(again)) == 0
    assert len(engines[1].asked) == 7
    assert len(rows(tmp_path)) == 10
    monkeypatch.setenv("HOME", str(tmp_path))
    assert predict(tmp_path, "--format", "coco", "--out=~/out") == 0
    assert len(engines) == 2  # nothing was left to ask
    assert len(json.loads((tmp_path / "out" / "coco.json").read_text())["images"]) == 5


def test_ctrl_c_while_the_model_loads(engines, tmp_path, capsys, monkeypatch):
    async def start(_settings):  # in a thread, which cannot be ended
        raise asyncio.CancelledError

    def leave(status):
        raise OSError(status, f"left with {status}")

    monkeypatch.setattr("valora_serve.engine.async_engine.start_engine", start)
    monkeypatch.setattr(os, "_exit", leave)
    assert predict(tmp_path) == 1
    assert "interrupted: run the same" in (said := capsys.readouterr().err) and "130" in said


def test_changed_and_new_files_are_answered_again(engines, tmp_path, capsys):
    out = tmp_path / "in" / "out[" / "b]"  # whose pictures nobody asks about
    picture(out / "downloads" / "bundle" / "golden.png", 1, (40, 20))
    more = "--out", str(out), "--format", "yolo"
    assert predict(tmp_path, *more) == 0
    assert f"yolo: {out}/yolo" in capsys.readouterr().err
    picture(tmp_path / "in" / "0.png", 50, (80, 20))
    picture(tmp_path / "in" / "more" / "6.png", 6, (40, 20))
    assert predict(tmp_path, *more) == 0
    assert len(engines[1].asked) == 4
    made = read_predictions(out / "predictions.jsonl")
    found = {(item.file, item.domain): item for item in made}
    assert len(found) == 12
    assert found["0.png", "person"].width == 80


def test_a_broken_file_costs_only_its_answers(engines, tmp_path, capsys):
    (tmp_path / "in" / "1.png").write_bytes(b"broken")
    assert predict(tmp_path, "--domain", "car") == 1
    assert "1.png, car: 1.png cannot be decoded" in capsys.readouterr().err
    assert len(engines[0].asked) == 4
    picture(tmp_path / "in" / "1.png", 1, (40, 20))
    assert predict(tmp_path, "--domain", "car") == 0
    assert len(engines[1].asked) == 1


def test_beside_a_small_model(engines, tmp_path, capsys):
    file = tmp_path / "small.jsonl"
    asked = ("--domain", "person", "--beside", str(file))
    assert predict(tmp_path, *asked) == 1  # before anything is asked
    assert "small.jsonl" in capsys.readouterr().err and not engines[0].asked
    row = {"file": "1.png", "domain": "person", "answer": {"detections": []}}
    file.write_text(json.dumps(row), encoding="utf-8")
    assert predict(tmp_path, *asked) == 0
    assert "on 1 image: " in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "beside.json").read_text())["images"] == 1


def test_the_sample_of_a_server_beside_a_small_model(engines, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.nice", lambda _: None)
    settings = ServerSettings(sample_folder=str(tmp_path / "kept"), sample_shares={"person": 1})
    samples, image = Samples(settings), Image.new("RGB", (40, 20))
    output = Output("r", head=FakeEngine._head(PERSON, [image], None))
    for _ in range(3):
        samples.offer(PERSON, Request("r", images=[image]), output)
        samples._thread.submit(int).result()
    small = tmp_path / "small.jsonl"
    for path in sorted((tmp_path / "kept").glob("*/*.png"))[:2]:
        found = json.dumps({"file": f"person/{path.name}", "domain": "person",
                            "answer": {"detections": []}})  # fmt: skip
        with small.open("a") as file:
            file.write(f"{found}\n")
    asked = [str(tmp_path / "kept"), "--out", str(tmp_path / "out"), "--format", "coco"]
    asked += ["--domain", "person", "--beside", str(small)]
    assert command.main([*asked, "--min-score", "0"]) == 1
    assert "go with --bundle: leave them out" in capsys.readouterr().err
    assert command.main(asked) == 0 and command.main(asked) == 0 and not engines
    assert "agreement 0.000 on 2 images" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "out" / "coco.json").read_text())["images"]) == 3
    asked[0] = str(tmp_path / "in")
    assert command.main([*asked[:2], str(tmp_path / "other"), *asked[3:]]) == 1
    assert "0.png holds no answer of a server" in capsys.readouterr().err
    assert predict(tmp_path, "--out", str(tmp_path / "other")) == 0  # nothing was begun there


def test_names_that_are_no_text_and_domains_that_are_named_twice(engines, tmp_path):
    (tmp_path / "in" / "0.png").rename(tmp_path / "in" / "\udcff.png")
    (tmp_path / "in" / "1.png").rename(tmp_path / "in" / "a\n\u2028.png")
    assert predict(tmp_path, "--format", "coco,labelstudio", "--domain", "person,person") == 0
    files = {row["file"] for row in rows(tmp_path)}
    assert files == {"\\udcff.png", "a\n\u2028.png", "2.png", "3.png", "4.png"}
    assert predict(tmp_path, "--domain", "person") == 0 and len(engines) == 1


@pytest.mark.parametrize(
    ("make", "more", "said"),
    [
        (lambda out: out.touch(), (), "out cannot be used (File exists): make room, or name"),
        (lambda out: (out / "run.json").mkdir(parents=True), (), "cannot be used (Is a dir"),
        (lambda out: (out / "predictions.jsonl").mkdir(parents=True), (), "cannot be used (Is a"),
        (lambda out: (out.mkdir(), (out / "predictions.jsonl").symlink_to("/dev/full")), (),
         "out cannot be used (No space left on device): make room"),
        (lambda out: (out.mkdir(), (out / "yolo").touch()), ("--format", "yolo"), "cannot be used"),
        (lambda out: (out / "beside.html").mkdir(parents=True),
         ("--domain", "person", "--beside", "2.png.jsonl"), "beside.html cannot be used"),
        (lambda out: None, ("--domain", "person", "--beside", "other.png.jsonl"),
         "answers no picture of"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_or_compared(
    engines, tmp_path, capsys, monkeypatch, make, more, said
):
    monkeypatch.chdir(tmp_path)
    for name in ("2.png", "other.png"):
        row = {"file": name, "domain": "person", "answer": {"detections": []}}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
    make(tmp_path / "out")
    assert predict(tmp_path, *more) == 1
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error
    assert all(engine.closed for engine in engines)


def test_a_damaged_record_of_the_run_and_a_run_that_never_began(engines, tmp_path, capsys):
    assert predict(tmp_path, "--domain", "cow", "--prompt", "x") == 1
    assert predict(tmp_path, "--domain", "car") == 0  # other options, as nothing was answered yet
    for damaged in ("[]", "[" * 10**5, '{"models": [{"name": 5, "kind": "", "root": ""}]}'):
        (tmp_path / "out" / "run.json").write_text(damaged)
        assert predict(tmp_path) == 1
        assert "without a sound run.json: name another folder" in capsys.readouterr().err


@pytest.mark.parametrize("status", [130, -2])
def test_an_interrupted_small_model_is_no_error(engines, tmp_path, capsys, monkeypatch, status):
    monkeypatch.setattr("subprocess.run", asked := Mock(return_value=Mock(returncode=status)))
    options = ["--domain", "person", "--beside", "best.pt", "--min-score", "0.3"]
    assert predict(tmp_path, *options) == 130 and asked.call_args[0][0][-2:] == options[-2:]
    assert "interrupted: run the same command again" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--format", "xml"], "unknown format 'xml'"), (["--prompt", ""], "--prompt is empty"),
        (["--min-score", "3"], "name one from 0 to 1"), (["--at-once", "0"], "name at least 1"),
        (["--domain", "cow"], "there is no domain 'cow': choose from person, car, mood"),
        (["--domain", "mood"], "mood reads no single image or video: ask it over HTTP"),
        (["--beside", "best.pt"], "--beside compares one domain: name it with --domain"),
        (["--domain", "person", "--beside", ""], "--beside is empty: give it a value, or leave"),
        (["--bundle", " "], "--bundle is empty"), (["--format", ","], "--format is empty"),
    ],
)  # fmt: skip
def test_mistakes_are_sentences(engines, tmp_path, capsys, more, said):
    assert predict(tmp_path, *more) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["empty", "notes.txt"])
def test_a_folder_without_pictures_is_refused_before_a_model_is_loaded(
    engines, tmp_path, capsys, name
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    options = ["--bundle", str(tmp_path / "bundle"), "--out", str(tmp_path / "out")]
    assert command.main([str(tmp_path / name), *options]) == 1
    assert f"{name} holds no images or videos: check the path" in capsys.readouterr().err
    assert not engines and not (tmp_path / "out").exists()


def test_videos_questions_and_texts(tmp_path):
    write_video(tmp_path / "in.mp4", [10 * n for n in range(12)])
    video = replace(SCENE, media="video", images=4)
    longer = replace(video, name="longer", images=6)
    jobs, kept = find_jobs(tmp_path, [video, longer], tmp_path)
    assert ([(job.name, job.frames) for job in jobs], kept) == ([("in.mp4", 4), ("in.mp4", 6)], 0)
    said = SimpleNamespace(prompt="What color is the car?", min_score=None, max_tokens=9, at_once=4)
    for prompt, text in (("what color is {}?", "what color is the car?"), ("ask", said.prompt)):
        request = make_request("1", replace(CAPTION, prompt=prompt, prompted=True), ["image"], said)
        assert request.messages[0]["content"][0]["text"] == text
    assert request.sampling.max_tokens == 9
    engine, found = FakeEngine(), []
    engine._served |= {model.name: model for model in (video, longer, CAPTION, PERSON)}
    asyncio.run(answer_all(engine, jobs, said, found.append))
    frames = {one.model: len(one.videos[0]) for one in engine.asked}
    assert frames == {video.name: 4, "longer": 6}
    picture(tmp_path / "a.png", 1, (40, 20))
    jobs, _ = find_jobs(tmp_path / "a.png", [CAPTION], tmp_path)
    asyncio.run(answer_all(engine, jobs, said, found.append))
    assert found[0].answer["label"] == found[1].answer["label"] == "street"
    assert found[2].answer["text"].startswith("a red star")
    (tmp_path / "predictions.jsonl").write_text(f"{json.dumps(asdict(found[2]))}\n")
    assert find_jobs(tmp_path / "a.png", [CAPTION], tmp_path) == ([], 1)
    os.utime(tmp_path / "a.png", (1, 1))
    assert len(find_jobs(tmp_path / "a.png", [CAPTION], tmp_path)[0]) == 1
