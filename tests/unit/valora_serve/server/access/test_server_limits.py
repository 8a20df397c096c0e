"""Who gets in, how much at once, and what happens to slow, rude and vanishing clients."""

import json
import socket
import threading
import time

import httpx
import pytest
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import chat, data_url, encoded, picture, serving, until
from valora_data.contract.base_model import base_folder
from valora_serve.errors import OverloadedError, SettingsError
from valora_serve.server.access.keys import hashed, new_key, read_keys
from valora_serve.server.settings import ServerSettings

PATH = "/v1/chat/completions"


def ask(server, key=None, **more):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.client.post(PATH, json=chat(**more), headers=headers)


# Keys


@pytest.fixture
def keys_file(tmp_path):
    secrets = {}
    lines = ["# who may ask", ""]
    for name, role in (("app", "user"), ("ops", "admin")):
        secrets[name], line = new_key(name, role)
        lines.append(line + "  # made today")
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return file, secrets


def test_every_known_key_is_let_in_and_no_other(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file)) as server:
        for secret in secrets.values():
            assert ask(server, secret).status_code == 200
        stored = hashed(secrets["app"])
        for wrong in ("x", secrets["app"][:-1], secrets["app"] + "x", stored, "é", "\udc80"):
            headers = {"authorization": f"Bearer {wrong}".encode("utf-8", "surrogateescape")}
            answer = server.client.post(PATH, json=chat(), headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for header in ("", "Bearer", f"Basic {secrets['app']}", secrets["app"]):
            headers = {"authorization": header}
            assert server.client.post(PATH, json=chat(), headers=headers).status_code == 401


def test_every_route_under_v1_asks_for_a_key(keys_file):
    with serving(keys_file=str(keys_file[0])) as server:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/status", "/v1/unknown"):
            assert server.client.get(path).status_code == 401, path
        for path in (PATH, "/v1/completions", "/v1/vision/person"):
            assert server.client.post(path, json={}).status_code == 401, path
        for path in ("/health", "/ready", "/version", "/metrics", "/", "/openapi.json"):
            assert server.client.get(path).status_code == 200, path
        # No spelling of a path leads around.
        for path in ("//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/%76%31/models",
                     "/console/../v1/models"):  # fmt: skip
            raw = httpx.Request("GET", server.url + path)
            raw.url = raw.url.copy_with(raw_path=path.encode())
            assert server.client.send(raw).status_code in (401, 404), path


def test_metrics_can_be_protected(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), protect_metrics=True) as server:
        assert server.client.get("/metrics").status_code == 401
        headers = {"authorization": f"Bearer {secrets['app']}"}
        assert server.client.get("/metrics", headers=headers).status_code == 200


def test_a_stranger_costs_no_body(keys_file):
    """The key is checked before the body is read."""
    head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with serving(keys_file=str(keys_file[0])) as server:
        assert b" 401 " in talk(server, f"{head}content-length: 1000000\r\n\r\n{{".encode())


def test_keys_are_kept_as_hashes(keys_file):
    file, secrets = keys_file
    text = file.read_text()
    for key, secret in zip(read_keys(file), secrets.values(), strict=True):
        assert secret not in text
        assert key.sha256 == hashed(secret)
    assert "an-api-key-in-the-clear" not in repr(ServerSettings(api_key="an-api-key-in-the-clear"))


@pytest.mark.parametrize("line", ["name", "name user abc", "name root " + "a" * 64, "sk-valora-x"])
def test_a_damaged_keys_file_is_said_without_repeating_it(tmp_path, line):
    file = tmp_path / "keys"
    file.write_text(f"# fine\n{line}\n")
    with pytest.raises(SettingsError, match="line 2") as caught:
        read_keys(file)
    assert "sk-valora-x" not in str(caught.value)


# Rates and queue


def test_each_key_has_its_rate(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), rate=6, burst=2) as server:
        assert [ask(server, secrets["app"]).status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(server, secrets["app"])
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert ask(server, secrets["ops"]).status_code == 200
        assert server.client.get("/health").status_code == 200


def test_a_full_queue_is_a_429_with_retry_after():
    engine = FakeEngine(slots=1, step=0.05)
    with serving(engine, max_waiting=2) as server:
        answers = []
        threads = [
            threading.Thread(target=lambda: answers.append(ask(server, max_tokens=4)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
            until(lambda: server.inside == len(engine.running) + len(engine.waiting))
        until(lambda: len(engine.waiting) == 2)
        refused = ask(server, max_tokens=4)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
        streamed = ask(server, stream=True)
        assert streamed.status_code == 429
        assert ask(server, n=3).status_code == 429
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200] * 3
        assert server.inside == 0
        assert ask(server).status_code == 200


def test_deadlines_of_request_and_domain():
    engine = FakeEngine(slots=1, step=0.02)
    with serving(
        engine, deadline=20, deadlines={"person": 0.5}, deadline_admission=False
    ) as server:
        ask(server)
        assert 19 < engine.asked[-1].deadline <= 20
        ask(server, model="person", valora={"deadline": 5}, url=data_url(encoded(picture())))
        assert engine.asked[-1].deadline <= 0.5
        ask(server, valora={"deadline": 3})
        assert 2 < engine.asked[-1].deadline <= 3
        thread = threading.Thread(target=lambda: ask(server, max_tokens=20, ignore_eos=True))
        thread.start()
        until(lambda: engine.running)
        late = ask(server, valora={"deadline": 0.05})
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "deadline_exceeded"
        thread.join()
        assert server.inside == 0


def test_what_would_miss_its_deadline_is_refused_at_once():
    engine = FakeEngine(slots=1, step=0.02)
    with serving(engine) as server:
        for _ in range(3):
            ask(server, max_tokens=5)
        threads = [threading.Thread(target=lambda: ask(server, max_tokens=5)) for _ in range(6)]
        for thread in threads:
            thread.start()
        until(lambda: len(engine.waiting) >= 4 and len(engine.asked) == 9)
        before = len(engine.asked)
        refused = ask(server, max_tokens=5, valora={"deadline": 0.05})
        assert refused.status_code == 429
        assert "deadline" in refused.json()["error"]["message"]
        assert len(engine.asked) == before
        for thread in threads:
            thread.join()


# Sizes, times and odd HTTP


def test_a_large_body_is_refused_with_and_without_a_length():
    with serving(max_body_bytes=10_000) as server:
        answer = server.client.post(PATH, content=b"x" * 10_001)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"

        def pieces():
            for _ in range(20):
                yield b"x" * 1000

        assert server.client.post(PATH, content=pieces()).status_code == 413
        raw = b"POST " + PATH.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: " + b"9" * 30
        assert b" 413 " in (said := talk(server, raw + b"\r\n\r\n")) or b" 400 " in said


def talk(server, data, close=False):
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(10)
        sock.sendall(data)
        if close:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while piece := sock.recv(65536):
                found += piece
                if b"\r\n\r\n" in found:
                    break
        except TimeoutError:
            pass
        return found


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000, b'{"a":' * 50_000, b'{"messages": ' + b"9" * 10_000 + b"}", b"{", b"",
        b"\xff\xfe", b'{"messages": NaN}', b'{"temperature": 1e999}', b'"\\ud800"', b"null",
        b'{"messages": [{"role": "user", "content": "' + b"x" * 500_000 + b'"}]}',
        b'{"messages": {}, "messages": 1}',
        b'{"model": "' + b"\\ud800" * 50 + b'", "messages": []}',
    ],
)  # fmt: skip
def test_odd_json_is_400(body):
    with serving() as server:
        answer = server.client.post(
            PATH, content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert len(answer.content) < 3000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b'{"prompt": [' + b"1," * 2_000_000 + b"1]}"),
        ("completions", b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"),
        ("completions", b'{"prompt": [' + b'"a",' * 1_000_000 + b'"a"]}'),
        ("completions", b'{"prompt": [' + b"{}," * 1_000_000 + b"{}]}"),
        ("chat/completions", b'{"messages": [' + b'{"role":1},' * 400_000 + b"{}]}"),
        ("vision/person", b'{"images": [' + b'"data:",' * 400_000 + b'"x"]}'),
    ],
    ids=["tokens", "lists", "texts", "objects", "messages", "images"],
)
def test_long_lists_are_refused_in_a_few_words(path, body):
    with serving() as server:
        answer = server.client.post(
            f"/v1/{path}", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 400
        assert len(answer.content) < 1000
        assert server.client.get("/health").status_code == 200


def test_pixels_are_given_back_when_a_request_ends():
    engine = FakeEngine(step=0.02)
    urls = [data_url(encoded(picture(50, 50)))] * 3
    with serving(engine, max_held_pixels=3 * 2500) as server:
        media = server.app.state.context.media
        for body in ({"images": urls}, {"images": [*urls, *urls]}, {"images": [urls[0], "data:x"]}):
            server.client.post("/v1/vision/person", json=body)
            until(lambda: media._held == 0)
        sock = begin(server, chat(url=urls[0], max_tokens=2000, ignore_eos=True, stream=True))
        until(lambda: engine.running)
        assert media._held == 2500
        busy = server.client.post("/v1/vision/person", json={"images": urls})
        assert busy.status_code == 429
        sock.close()
        until(lambda: media._held == 0, 3)
        assert server.client.post("/v1/vision/person", json={"images": urls}).status_code == 200


def test_a_huge_schema_is_400():
    schema = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    many = {"enum": ["x" * 100] * 5000}
    engine = FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny")))
    with serving(engine) as server:
        assert ask(server, response_format=form).status_code in (200, 400)
        form["json_schema"]["schema"] = many
        assert ask(server, response_format=form).status_code == 400


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "image/png"]
)
def test_wrong_content_types(kind):
    with serving() as server:
        for path in (PATH, "/v1/completions"):
            answer = server.client.post(
                path, content=json.dumps(chat()), headers={"content-type": kind}
            )
            assert answer.status_code in (400, 415)
            assert answer.json()["error"]["message"]


def test_wrong_methods_and_paths():
    with serving() as server:
        assert server.client.get(PATH).status_code == 405
        assert server.client.request("BREW", PATH).status_code in (400, 405)
        answer = server.client.get("/nothing")
        assert answer.status_code == 404
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_garbage_instead_of_http():
    with serving() as server:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"hello\r\n\r\n"):
            assert b" 400 " in talk(server, data)
        smuggled = (
            b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        assert b" 200 " not in talk(server, smuggled)
        assert server.client.get("/health").status_code == 200


def test_a_slow_body_gets_a_408():
    with serving(body_seconds=0.4) as server:
        head = b"POST " + PATH.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
        began = time.monotonic()
        assert b" 408 " in talk(server, head + b"content-type: application/json\r\n\r\n{")
        assert time.monotonic() - began < 5
        assert server.inside == 0


def test_a_slow_head_is_hung_up_on():
    with serving(body_seconds=0.4) as server:
        for begun in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.settimeout(5)
                sock.sendall(begun)
                with pytest.raises((ConnectionResetError, AssertionError)):
                    assert sock.recv(100) != b""


def test_a_head_without_end_is_hung_up_on():
    with serving() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(5)
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for number in range(200):
                sock.sendall(b"x-%d: %s\r\n" % (number, b"y" * 1000))
                time.sleep(0.001)
            assert not sock.recv(100)
            raise ConnectionResetError
        assert server.client.get("/health").status_code == 200


def begin(server, body):
    """Send a request, and give the open connection."""
    content = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(5)
    sock.sendall(
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: " + str(len(content)).encode() + b"\r\n\r\n" + content
    )
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_goes_away_is_cancelled(stream, n, half):
    engine = FakeEngine(step=0.02)
    with serving(engine) as server:
        sock = begin(server, chat(max_tokens=2000, ignore_eos=True, stream=stream, n=n))
        until(lambda: len(engine.running) == n)
        if stream:
            assert b"200 OK" in sock.recv(4096)
        if half:
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
        until(lambda: not engine.running, 3)
        until(lambda: len(engine.cancelled) == n, 3)
        until(lambda: server.inside == 0, 3)
        sock.close()
        assert ask(server).status_code == 200


def test_a_client_that_goes_away_while_it_waits_is_cancelled():
    engine = FakeEngine(slots=1, step=0.02)
    with serving(engine) as server:
        first = begin(server, chat(max_tokens=2000, ignore_eos=True))
        until(lambda: engine.running)
        second = begin(server, chat(max_tokens=5))
        until(lambda: engine.waiting)
        second.close()
        until(lambda: not engine.waiting and server.inside == 1, 3)
        first.close()
        until(lambda: server.inside == 0, 3)


def test_a_client_that_takes_nothing_is_cancelled():
    engine = FakeEngine(step=0.0)
    with serving(engine, send_seconds=0.5, answer_tokens=10_000_000) as server:
        body = chat(max_tokens=5_000_000, ignore_eos=True, stream=True)
        sock = begin(server, body)
        until(lambda: engine.running)
        until(lambda: not engine.running, 10)
        until(lambda: server.inside == 0, 3)
        sock.close()


def test_many_connections_at_once():
    with serving(body_seconds=30) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(300)]
        assert ask(server).status_code == 200
        for sock in held:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        for sock in held:
            sock.settimeout(10)
            assert b" 200 " in sock.recv(4096)
            sock.close()


def test_connections_are_bounded():
    with serving(max_connections=5, body_seconds=30) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        until(lambda: len(server.server.server_state.connections) == 8)
        held[0].sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        held[0].settimeout(5)
        assert b" 503 " in held[0].recv(4096)
        for sock in held:
            sock.close()


# The end


def test_running_requests_end_and_new_ones_are_refused_while_draining():
    engine = FakeEngine(step=0.03)
    with serving(engine, drain_seconds=10) as server:
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(ask(server, max_tokens=15, ignore_eos=True))
        )
        thread.start()
        until(lambda: engine.running)
        server.service.draining = True
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/ready").json() == {"status": "draining"}
        assert server.client.get("/health").status_code == 200
        refused = ask(server)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "unavailable"
        server.stop()
        thread.join()
        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 15
    assert engine.closed


def test_an_engine_that_has_failed_is_said():
    engine = FakeEngine()
    with serving(engine) as server:
        engine.healthy = False
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").json() == {"status": "failed"}
        assert ask(server).status_code == 503


def test_errors_of_the_engine_keep_their_status():
    engine = FakeEngine()
    with serving(engine) as server:
        engine.refuse = OverloadedError("full", 7.2)
        for stream in (False, True):
            answer = ask(server, stream=stream)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "8"
        files = {"image": encoded(picture())}
        assert server.client.post("/v1/vision/person", files=files).status_code == 429
        assert server.inside == 0


def test_an_unexpected_failure_is_a_500_that_tells_nothing():
    class Broken(FakeEngine):
        def stats(self):
            raise RuntimeError("a secret of the inside")

    with serving(Broken()) as server:
        answer = ask(server)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"
