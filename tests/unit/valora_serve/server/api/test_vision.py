"""``/v1/vision/{domain}``, over the fake engine."""

import json
from dataclasses import replace

import pytest

from tests.support.fake_engine import BASE, CAPTION, PERSON, FakeEngine
from tests.support.http_helpers import PNG, PNG_URL, data_url, encoded, picture, refused, serving
from tests.support.videos import video_file
from valora_serve.errors import DeadlineError, UnknownModelError
from valora_serve.server.access.admission import Admission
from valora_serve.types import SamplingParams


@pytest.fixture(scope="module")
def server():
    with serving(max_images=3, max_video_frames=4, video_frames=5) as running:
        yield running


def post(server, domain, **arguments):
    return server.client.post(f"/v1/vision/{domain}", **arguments)


TALL = encoded(picture(20, 60))
URLS, FILES = [PNG_URL, data_url(TALL)], [("image", PNG), ("image", TALL)]
ALL = {"person", "scene", "caption"}


def test_json_and_multipart_say_the_same(server):
    by_json = post(server, "person", json={"images": URLS}).json()
    files = [("image", ("a.png", PNG)), ("images", ("b.png", TALL))]
    by_form = post(server, "person", files=files).json()
    assert by_json["results"] == by_form["results"]
    assert [r["width"] for r in by_json["results"]] == [40, 20]
    first, second = by_json["results"]
    assert first["detections"] == [
        {"label": "person", "confidence": 0.9, "box": [0.0, 0.0, 20.0, 10.0]}
    ]
    assert second["detections"][0]["box"] == [0.0, 0.0, 10.0, 30.0]
    facts = {"domain": "person", "kind": "detection", "adapter": "adapter-1", "bundle": "d@1"}
    assert facts.items() <= by_json.items()
    assert by_json["usage"]["prompt_tokens"] == 2 * 69


def test_fields_of_a_form(server):
    data = {"min_score": "0.3", "deadline": "5", "prompt": "detect person", "max_tokens": "7"}
    answer = post(server, "person", files={"image": PNG}, data=data)
    assert len(answer.json()["results"][0]["detections"]) == 2
    asked = server.engine.asked[-1]
    assert (asked.min_score, asked.sampling.max_tokens) == (0.3, 7)
    assert asked.messages[0]["content"][0] == {"type": "text", "text": "detect person"}


def test_labels_words_and_upright_images(server):
    results = post(server, "scene", files=FILES).json()["results"]
    assert [(r["label"], r["confidence"]) for r in results] == [("street", 0.75), ("beach", 0.875)]
    assert results[1]["confidences"] == {"street": 0.125, "beach": 0.875}
    (result,) = post(server, "caption", json={"images": [PNG_URL]}).json()["results"]
    assert result["text"].startswith("a red star")
    assert result["detections"] is None
    assert server.engine.asked[-1].messages is None  # a domain without a head adds its prompt
    exif = picture().getexif()
    exif[0x0112] = 6  # turned by 90 degrees
    files = {"image": encoded(picture(), "JPEG", exif=exif)}
    (result,) = post(server, "person", files=files).json()["results"]
    assert (result["width"], result["height"]) == (20, 40)  # which boxes refer to


def test_a_video_is_sampled_evenly(server, tmp_path):
    file = video_file(tmp_path / "clip.mp4", count=20, size=(64, 48))
    answer = post(server, "scene", files={"video": file.read_bytes()})
    assert len(answer.json()["results"]) == 1, answer.text
    frames = server.engine.asked[-1].videos[0]
    assert len(frames) == 5
    # Frame i is grey of level 10·i: those at (k + ½)/5 of 20 frames are 2, 6, 10, 14, 18.
    levels = [frame.getpixel((30, 20))[0] for frame in frames]
    assert levels == pytest.approx([20, 60, 100, 140, 180], abs=4)


def test_frames_of_a_video(server):
    frames = [encoded(picture(20, 10, (n, 0, 0))) for n in (10, 20, 30)]
    for body in ({"json": {"frames": [data_url(frame) for frame in frames]}},
                 {"files": [("frames", frame) for frame in frames]}):  # fmt: skip
        assert post(server, "scene", **body).status_code == 200
        (video,) = server.engine.asked[-1].videos
        assert [frame.getpixel((5, 5))[0] for frame in video] == [10, 20, 30]


def test_wrong_forms_and_content_types_are_refused(server):
    for arguments in (
        *({"files": files} for files in (
            {"image": b"PK\x03\x04 a zip"}, {"picture": PNG}, [("image", PNG)] * 4,
            {"image": PNG, "video": PNG}, {"video": PNG}, [("video", PNG)] * 2,
        )),
        {"files": {"image": PNG}, "data": {"domains": "*"}},
        *({"files": {"image": PNG}, "data": data} for data in (
            {"min_score": "high"}, {"min_score": "nan"}, {"deadline": "inf"}, {"unknown": "x"},
        )),
        *({"content": json.dumps({"images": [PNG_URL]}), "headers": {"content-type": kind}}
          for kind in ("text/plain", "application/xml", "image/png", "", "multipart/form-data")),
    ):  # fmt: skip
        answer = post(server, "person", **arguments)
        assert answer.status_code in (400, 415), (arguments, answer.text)
        assert answer.json()["error"]["message"]
    assert server.client.post("/v1/vision", files={"image": PNG}).status_code == 400
    refused(post(server, "person", files={"image": (None, PNG)}), 400, "lacks a file name")
    refused(post(server, "person", files=FILES, data={"prompt": ["a", "b"]}), 400, "or repeated")


def test_a_form_that_was_cut_is_never_answered_in_part(server):
    parts = ['--x\r\ncontent-disposition: form-data; name="domains"\r\n\r\nperson\r\n']
    parts += ['--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n'] * 2
    content = b"".join(
        head.encode() + (PNG + b"\r\n" if "image" in head else b"") for head in parts
    )
    kind = {"content-type": "multipart/form-data; boundary=x"}
    whole = content + b"--x--\r\n"
    assert server.client.post("/v1/vision", content=whole, headers=kind).status_code == 200
    for end in range(len(content) + 4, 20, -17):
        answer = server.client.post("/v1/vision", content=whole[:end], headers=kind)
        refused(answer, 400, "The form is not whole")


def look(server, domains, **more):
    body = {"domains": domains, "images": [PNG_URL], **more}
    return server.client.post("/v1/vision", json=body)


def test_several_domains_answer_as_each_does_alone(server):
    found = look(server, ["scene", "person", "caption"], images=URLS, min_score=0.3).json()
    assert found["object"] == "vision.look"
    assert list(found["domains"]) == ["scene", "person", "caption"]
    for name, got in found["domains"].items():
        alone = post(server, name, json={"images": URLS, "min_score": 0.3}).json()
        for varying in ("id", "created", "seconds"):
            del got[varying], alone[varying]
        assert got == alone
    assert len({one.arrival for one in server.engine.asked[-2:]}) == 1  # their deadlines are one
    data = {"domains": "scene, person,caption", "min_score": "0.3"}
    by_form = server.client.post("/v1/vision", files=FILES, data=data).json()
    first, second = ([d["results"] for d in got["domains"].values()] for got in (found, by_form))
    assert first == second


def test_a_star_or_a_bundle_stands_for_its_domains(server):
    assert set(look(server, "*").json()["domains"]) == ALL
    twice = look(server, ["person", "person"]).json()["domains"]["person"]
    assert twice["warnings"] == ["person is named several times: answered once"]
    for names in (["*"], ["*", "scene", "*"], ["person", "*"]):
        data = {"files": {"image": PNG}, "data": {"domains": " ,".join(names)}}
        for answer in (look(server, names), server.client.post("/v1/vision", **data)):
            assert set(answer.json()["domains"]) == ALL
    named = [set(look(server, [name]).json()["domains"]) for name in ("d", "d@1")]
    assert named[0] == named[1]


def test_an_adapter_named_as_a_bundle_goes_first_and_names_may_hold_slashes():
    engine = FakeEngine()
    for name in ("d", "a/b? c"):
        engine._served[name] = replace(PERSON, name=name, kind="adapter", bundle=None)
    with serving(engine) as odd:
        for name, path in (("d", "d"), ("a/b? c", "a/b%3F%20c"), ("a/b? c", "a%2fb%3F%20c")):
            assert post(odd, path, json={"images": [PNG_URL]}).json()["domain"] == name
            assert list(look(odd, [name]).json()["domains"]) == [name]


def test_a_star_asks_no_domain_for_what_is_not_there():
    engine = FakeEngine()
    asking = (replace(CAPTION, name="a", prompt=None), replace(CAPTION, name="b", prompt="is {}?"),
              replace(CAPTION, name="c", prompted=True))  # fmt: skip
    engine._served["two"] = replace(PERSON, name="two", images=2)
    engine._served |= {one.name: one for one in asking}
    with serving(engine) as words:
        for prompt in (None, "", " \n"):
            assert set(look(words, "*", prompt=prompt).json()["domains"]) == ALL
        found = look(words, "*", prompt="red").json()["domains"]
        assert set(found) == {*ALL, "a", "b", "c"}


SHOWN = {"type": "image_url", "image_url": {"url": PNG_URL}}


def chat(server, model, *parts, **more):
    body = {"model": model, "messages": [{"role": "user", "content": [*parts]}], **more}
    return server.client.post("/v1/chat/completions", json=body)


def test_a_chat_with_a_bundle_is_answered_by_all_of_its_domains(server):
    text = {"type": "text", "text": "?"}
    found = chat(server, "d", text, SHOWN).json()
    said = json.loads(found["choices"][0]["message"]["content"])
    alone = look(server, ["d"]).json()["domains"]
    assert {k: v["results"] for k, v in said.items()} == {
        k: [{n: x for n, x in one.items() if x is not None} for one in v["results"]]
        for k, v in alone.items()
    }
    assert all(one.messages is None for one in server.engine.asked[-len(said) :])  # their prompts
    tokens = [one["usage"]["total_tokens"] for one in alone.values()]
    assert found["usage"]["total_tokens"] == sum(tokens)
    assert chat(server, "d", SHOWN, response_format={"type": "text"}).status_code == 200
    given = {"temperature": 0.5, "seed": 3, "top_p": 0.9, "max_tokens": 4, "stop": ["x"]}
    turns = [{"role": "user", "content": [SHOWN] * count} for count in (1, 2)]
    before = len(server.engine.asked)
    assert chat(server, "d", messages=turns, **given).status_code == 200
    asked = server.engine.asked[before:]  # of the newest turn alone
    assert len(asked) == 2 * len(said)
    assert {one.sampling for one in asked} == {SamplingParams(**given | {"stop": ("x",)})}
    clip = {"type": "video_url", "video_url": {"url": PNG_URL}}
    frames = {"type": "frames", "frames": [PNG_URL]}
    for parts in ([text], [SHOWN, clip], [clip, clip], [SHOWN] * 4, [{"type": "file"}, SHOWN],
                  [frames, clip], [frames, SHOWN]):  # fmt: skip
        assert chat(server, "d", *parts).status_code == 400, parts
    refused(chat(server, "d", frames, frames), 400, "send images, or one video")
    assert chat(server, "e", SHOWN).status_code == 404


@pytest.mark.parametrize("field", ["images", "frames"])
def test_an_error_says_which_of_several_images_it_is_about(server, field):
    bad = "data:image/png;base64,AAAA"
    said = "Image 2 of 3: The image is damaged"
    refused(look(server, ["person"], **{"images": [], field: [PNG_URL, bad, PNG_URL]}), 400, said)
    refused(look(server, ["person"], images=[bad]), 400, "The image is damaged")
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in (PNG_URL, PNG_URL, bad)]
    refused(chat(server, "tiny", *shown), 400, "Image 3 of 3: The image is damaged")


def test_a_thousand_wrong_names_cost_little_where_there_are_many_domains(monkeypatch):
    engine = FakeEngine()
    many = [replace(PERSON, name=f"d{number:03}") for number in range(300)]
    engine._served |= {one.name: one for one in many}
    with serving(engine) as large:
        looks, models = [], engine.models
        monkeypatch.setattr(engine, "models", lambda: looks.append(1) or models())
        answer = look(large, ["person", *(f"x{number}" for number in range(999))])
        found = answer.json()["domains"]
        assert len(found) == 1000 and found["person"]["results"] and len(looks) < 10
        assert found["x1"]["error"]["message"].endswith(", d018 and 283 more (see /v1/models)")


@pytest.mark.parametrize("name", ["cats", "", "adapter-1", "tiny", "%00"])
def test_what_is_wrong_with_one_domain_concerns_it_alone(server, name):
    found = look(server, ["person", name]).json()["domains"]
    assert found["person"]["results"][0]["detections"]
    assert found[name]["error"]["message"].startswith(f"There is no domain {name!r}")
    assert found[name]["error"]["code"]
    assert look(server, [name]).status_code == 404  # nothing else is left to answer
    refused(post(server, name, json={"images": [PNG_URL]}), 404, "caption, person, scene")


def test_an_error_of_the_engine_concerns_its_own_domain(server, monkeypatch):
    def wrong(request):
        if request.model == "scene":
            return UnknownModelError("There is no scene: choose one of 30 secret names")
        return DeadlineError("too late") if request.model == "caption" else None

    monkeypatch.setattr(server.engine, "_problem", wrong)
    found = look(server, "*").json()["domains"]
    assert found["person"]["results"]
    assert found["scene"]["error"]["message"] == "scene was unloaded: name one of /v1/models"
    assert found["caption"]["error"]["code"] == "deadline_exceeded"
    assert look(server, ["caption"]).status_code == 504


def test_the_queue_has_room_for_all_domains_of_a_request_or_for_none(monkeypatch):
    """And each has a deadline of its own, which those beside it do not make late."""
    engine, names = FakeEngine(), ["person", "scene", "caption"]
    monkeypatch.setattr(Admission, "predicted", lambda self, *_: float(self.waiting(0)))
    with serving(engine, max_waiting=6, deadlines={"scene": 0.5}) as small:
        found = look(small, names, images=[PNG_URL] * 2).json()["domains"]
        assert all(found[name]["results"] for name in names)
        assert sorted(one.model for one in engine.asked if one.deadline) == ["scene"] * 2
        said = "0 requests are waiting, and no more than 6 may: try again in 1 s, with fewer"
        answer = look(small, ["nothing", *names], images=[PNG_URL] * 3)
        refused(answer, 429, said)
        assert answer.headers["retry-after"] == "1" and len(engine.asked) == 6
        monkeypatch.setattr(Admission, "waiting", lambda *_: 1)
        found = look(small, names).json()["domains"]
        assert found["scene"]["error"]["code"] == "overloaded" and found["person"]["results"]
        text = small.client.get("/metrics").text
        assert 'valora_request_failure_total{code="overloaded"} 2.0' in text
        assert 'valora_request_success_total{finished_reason="head",model_name="person"}' in text
    assert small.inside == 0


def test_a_text_only_base_model_decodes_nothing():
    engine = FakeEngine()
    engine._served["tiny"] = replace(BASE, media="text")
    with serving(engine) as server:
        for url in (data_url(b"no picture"), "https://nowhere.example/"):
            answer = server.client.post("/v1/vision/person", json={"images": [url]})
            refused(answer, 400, "reads text alone: leave images")
