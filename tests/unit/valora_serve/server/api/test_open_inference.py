"""``/v2`` over the fake engine: metadata, readiness, tensors in JSON and as bytes, errors."""

import base64
import json
import struct

import numpy as np
import pytest

from tests.support.http_helpers import encoded, picture, serving
from tests.support.videos import video_file
from valora_serve.server.access.keys import new_key
from valora_serve.types import EngineStats

WIDE, TALL = picture(40, 20), picture(20, 60)


@pytest.fixture(scope="module")
def server():
    with serving(max_images=3, max_video_frames=4, video_frames=5) as running:
        yield running


def infer(server, domain, *inputs, status=200, outputs=(), path="infer", **more):
    body = {"inputs": list(inputs), "outputs": [{"name": name} for name in outputs], **more}
    answer = server.client.post(f"/v2/models/{domain}/{path}", json=body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    if status != 200:
        assert isinstance(found["error"], str)
        return found["error"]
    return {entry["name"]: array(entry) for entry in found["outputs"]} | {"": found}


def array(entry):
    return np.array(entry["data"]).reshape(entry["shape"])


def files(*images):
    data = [base64.b64encode(encoded(image)).decode() for image in images]
    return {"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}


def pixels(image, name="image"):
    rows = np.asarray(image)
    return {"name": name, "datatype": "UINT8", "shape": list(rows.shape), "data": rows.tolist()}


def test_what_the_server_and_its_models_say_of_themselves(server):
    get = server.client.get
    assert get("/v2").json()["name"] == "valora"
    assert get("/v2/health/live").json() == {"live": True}
    assert get("/v2/health/ready").json() == {"ready": True}
    found = get("/v2/models/person").json()
    assert (found["name"], found["versions"]) == ("person", ["1"])
    assert found["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert [entry["name"] for entry in found["outputs"]] == [
        "count", "boxes", "scores", "labels", "size",
    ]  # fmt: skip
    assert get("/v2/models/person/versions/1").json() == found
    assert get("/v2/models/scene").json()["parameters"]["labels"] == ["street", "beach"]
    index = server.client.post("/v2/repository/index").json()
    assert {"name": "person", "version": "1", "state": "READY"} in index


def test_boxes_are_padded_to_the_most_of_them(server):
    found = infer(server, "person", files(WIDE, TALL), id="7", parameters={"min_score": 0.3})
    assert found[""]["id"] == "7"
    assert (found[""]["model_name"], found[""]["model_version"]) == ("person", "1")
    assert found["count"].tolist() == [2, 2]
    assert found["boxes"][1].tolist() == [[0, 0, 10, 30], [5, 15, 20, 60]]
    assert found["scores"].tolist() == [[0.9, 0.4]] * 2
    assert found["labels"].tolist() == [["person"] * 2] * 2
    assert found["size"].tolist() == [[40, 20], [20, 60]]
    none = infer(server, "person", files(WIDE), parameters={"min_score": 0.95})
    assert none["boxes"].shape == (1, 0, 4)


def test_the_same_from_files_pixels_and_bytes(server):
    by_file = infer(server, "person", files(WIDE), outputs=["boxes", "count"])
    assert list(by_file)[:2] == ["boxes", "count"]
    assert "labels" not in by_file
    by_pixels = infer(server, "person", pixels(WIDE), outputs=["boxes"])
    sent = []
    for datatype, shape, blob in (
        ("BYTES", [1], struct.pack("<I", len(encoded(WIDE))) + encoded(WIDE)),
        ("UINT8", [1, 20, 40, 3], np.asarray(WIDE).tobytes()),
    ):
        given = {"name": "image", "datatype": datatype, "shape": shape,
                 "parameters": {"binary_data_size": len(blob)}}  # fmt: skip
        head = json.dumps({"inputs": [given], "outputs": [{"name": "boxes"}]}).encode()
        answer = server.client.post(
            "/v2/models/person/infer", content=head + blob,
            headers={"Inference-Header-Content-Length": str(len(head)),
                     "Content-Type": "application/octet-stream"},
        )  # fmt: skip
        sent.append(array(answer.json()["outputs"][0]))
    for found in (by_pixels["boxes"], *sent):
        assert found.tolist() == by_file["boxes"].tolist()
    asked = server.engine.asked[-1]
    assert np.array_equal(np.asarray(asked.images[0]), np.asarray(WIDE))


def test_labels_texts_and_videos(server, tmp_path):
    labels = infer(server, "scene", files(WIDE, TALL))
    assert labels["label"].tolist() == ["street", "beach"]
    assert labels["scores"].tolist() == [[0.75, 0.25], [0.125, 0.875]]
    words = infer(server, "caption", pixels(WIDE), parameters={"max_tokens": 3})
    assert words["text"].tolist() == ["a red star"]
    clip = base64.b64encode(video_file(tmp_path / "a.mp4").read_bytes()).decode()
    given = {"name": "video", "datatype": "BYTES", "shape": [1], "data": [clip]}
    infer(server, "scene", given)
    assert len(server.engine.asked[-1].videos[0]) == 5
    frames = np.zeros((4, 20, 40, 3), np.uint8)
    rows = {"name": "video", "datatype": "UINT8", "shape": list(frames.shape),
            "data": frames.ravel().tolist()}  # fmt: skip
    infer(server, "scene", rows)
    assert len(server.engine.asked[-1].videos[0]) == 4
    asked = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["what color?"]}
    found = infer(server, "caption", files(WIDE), asked)
    assert "another text" in found[""]["parameters"]["warnings"]


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"shape": [2]}, 400, "1 value, which do not fit its shape [2]"),
        ({"datatype": "UINT8"}, 400, "numbers from 0 to 255"),
        ({"datatype": "FP32"}, 400, "BYTES"),
        ({"data": [7]}, 400, "takes texts"),
        ({"data": None}, 400, "has no data"),
        ({"data": ["bm8gaW1hZ2U="]}, 400, "none of JPEG"),
        ({"name": "picture"}, 400, "image"),
        ({"shape": [-1]}, 400, "not negative"),
        ({"parameters": {"binary_data_size": 9}}, 400, "0 bytes follow"),
    ],
)
def test_wrong_tensors_are_sentences(server, change, status, said):
    assert said in infer(server, "person", files(WIDE) | change, status=status)


def test_other_mistakes_are_sentences_too(server):
    assert "There is no domain" in infer(server, "cow", files(WIDE), status=404)
    assert "no version" in infer(server, "person", files(WIDE), status=404, path="versions/9/infer")
    assert "its outputs are count" in infer(
        server, "person", files(WIDE), status=400, outputs=["x"]
    )
    wrong = infer(server, "person", files(WIDE), status=400, parameters={"top": 1})
    assert "expected min_score" in wrong
    assert "send it once" in infer(server, "person", files(WIDE), files(TALL), status=400)
    many = infer(server, "person", files(*[WIDE] * 4), status=400)
    assert "more than 3" in many
    prompt = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["x"]}
    assert "Send images" in infer(server, "person", prompt, status=400)
    said = server.client.get("/v2/models/cow/ready")
    assert (said.status_code, type(said.json()["error"])) == (404, str)
    assert isinstance(server.client.get("/v2/nothing").json()["error"], str)
    head = {"Inference-Header-Content-Length": "900"}
    said = server.client.post("/v2/models/person/infer", content=b"{}", headers=head)
    assert "send the length of the JSON" in said.json()["error"]


def test_large_pixels_are_refused_before_they_are_images():
    with serving(max_image_pixels=500) as server:
        said = infer(server, "person", pixels(WIDE), status=400)
    assert "800 pixels, more than 500" in said


def test_readiness_by_model_while_a_key_is_needed_and_while_draining(tmp_path, monkeypatch):
    secret, line = new_key("app", "user")
    (tmp_path / "keys").write_text(line)
    with serving(keys_file=str(tmp_path / "keys")) as server:
        get = server.client.get
        assert get("/v2/models/person/ready").json() == {"name": "person", "ready": True}
        assert get("/v2/models/person").status_code == 401
        assert server.client.post("/v2/models/person/infer", json={}).status_code == 401
        headers = {"authorization": f"Bearer {secret}"}
        assert get("/v2/models/person", headers=headers).status_code == 200
        stats = EngineStats(quarantined={"adapter-1": "not finite"})
        monkeypatch.setattr(server.engine, "stats", lambda: stats)
        answer = get("/v2/models/person/ready", headers={"host": "10.0.0.9"})
        assert (answer.status_code, answer.json()["ready"]) == (503, False)
        monkeypatch.undo()
        server.app.state.context.drain.begun = True
        for path, status in (("/v2/health/live", 200), ("/health", 200), ("/v2/health/ready", 503),
                             ("/v2/models/person/ready", 503), ("/ready", 503)):  # fmt: skip
            assert get(path).status_code == status, path
