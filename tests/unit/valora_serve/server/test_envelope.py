"""Limits on size and time, odd requests, clients that go away, and errors."""

import json
import re
import socket
import time
import urllib.parse

import pytest
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import (
    CHAT,
    ask,
    begin,
    chat,
    data_url,
    encoded,
    picture,
    serving,
    talk,
    until,
)
from valora_data.contract.base_model import base_folder
from valora_serve.errors import OverloadedError


@pytest.fixture(scope="module")
def plain():
    """A server with the default settings, which no request changes."""
    with serving() as server:
        yield server


def test_a_large_body_is_refused_with_and_without_a_length():
    with serving(max_body_bytes=10_000) as server:
        answer = server.client.post(CHAT, content=b"x" * 10_001)
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"

        def pieces():
            for _ in range(20):
                yield b"x" * 1000

        assert server.client.post(CHAT, content=pieces()).status_code == 413
        raw = (
            b"POST "
            + CHAT.encode()
            + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: "
            + b"9" * 30
        )
        assert b" 413 " in (said := talk(server, raw + b"\r\n\r\n")) or b" 400 " in said


def test_json_has_a_limit_of_its_own_and_forms_do_not():
    picture_file = encoded(picture(400, 300))
    with serving(max_json_bytes=len(picture_file), max_body_bytes=10 * len(picture_file)) as server:
        path = "/v1/vision/person"
        assert server.client.post(path, files={"image": picture_file}).status_code == 200
        answer = server.client.post(path, json={"images": [data_url(picture_file)]})
        assert answer.status_code == 413
        assert "as a form" in answer.json()["error"]["message"]
    with serving(max_body_bytes=1000) as server:  # the lower one of the two counts
        answer = server.client.post(CHAT, json=chat("x" * 1000))
        assert answer.json()["error"]["message"].endswith("1000 bytes: send less at once")


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
def test_odd_json_is_400(plain, body):
    answer = plain.client.post(CHAT, content=body, headers={"content-type": "application/json"})
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
def test_long_lists_are_refused_in_a_few_words(plain, path, body):
    answer = plain.client.post(
        f"/v1/{path}", content=body, headers={"content-type": "application/json"}
    )
    # Bodies of texts alone may be smaller than those with images.
    too_large = path == "completions" and len(body) > 3_500_000
    assert answer.status_code == (413 if too_large else 400)
    assert len(answer.content) < 1000
    assert plain.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "image/png"]
)
def test_wrong_content_types(plain, kind):
    for path in (CHAT, "/v1/completions"):
        answer = plain.client.post(path, content=json.dumps(chat()), headers={"content-type": kind})
        assert answer.status_code in (400, 415)
        assert answer.json()["error"]["message"]


def test_wrong_methods_and_paths(plain):
    assert plain.client.get(CHAT).status_code == 405
    assert plain.client.request("BREW", CHAT).status_code in (400, 405)
    answer = plain.client.get("/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_slow_body_gets_a_408():
    with serving(body_seconds=0.4) as server:
        head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
        began = time.monotonic()
        assert b" 408 " in talk(server, head + b"content-type: application/json\r\n\r\n{")
        assert time.monotonic() - began < 5
        assert server.inside == 0


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


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 415, "no content type, .*-H 'content-type: application/json'"),
        ({"content-type": "text/plain"}, 415, "'text/plain', .*-H 'content-type"),
        ({"content-type": "application/x-www-form-urlencoded"}, 415, "-H 'content-type: appl"),
        ({"content-type": "application/vnd.api+json"}, 415, "reads application/json"),
        ({"content-type": "application/jsonx"}, 415, "reads application/json"),
        ({"content-type": "application/json; charset=latin-1"}, 415, "'latin-1': send JSON in UTF"),
        ({"content-type": "application/json", "content-encoding": "gzip"}, 415, "uncompressed"),
        ({"content-type": "application/json", "content-encoding": "identity"}, 200, ""),
        ({"content-type": "application/json; charset=UTF-8"}, 200, ""),
        ({"content-type": 'Application/JSON ;x=1; charset="utf-8"'}, 200, ""),
        ({"content-type": "application/json;"}, 200, ""),
    ],
)
def test_content_types_of_a_json_route(plain, headers, status, said):
    answer = plain.client.post(CHAT, content=json.dumps(chat()), headers=headers)
    assert answer.status_code == status, answer.text
    if status == 415:
        assert re.search(said, answer.json()["error"]["message"])
        assert answer.json()["error"]["code"] == "unsupported_media_type"


def test_every_json_route_says_which_content_type_it_reads(tmp_path):
    key = "a key for the tests"
    with serving(
        api_key=key, allow_runtime_loading=True, adapter_folder=str(tmp_path),
        state_file=str(tmp_path / "served.json"),
    ) as server:  # fmt: skip
        schema = server.client.get("/openapi.json").json()
        posts = [path for path, operations in schema["paths"].items() if "post" in operations]
        assert len(posts) >= 7
        for path in posts:
            answer = server.client.post(
                path.replace("{domain}", "person").replace("{name}", "person"), content="a=1",
                headers={"authorization": f"Bearer {key}",
                         "content-type": "application/x-www-form-urlencoded"},
            )  # fmt: skip
            assert answer.status_code == 415, path
            said = answer.json()["error"]
            said = said["message"] if isinstance(said, dict) else said
            assert "-H 'content-type: application/json'" in said


@pytest.fixture(scope="module")
def guarded():
    """A server with a key."""
    with serving(api_key="a key for the tests") as server:
        yield server


@pytest.mark.parametrize(
    "header",
    ["authorization", "content-type", "x-request-id", "origin", "content-encoding"],
)
def test_a_header_that_is_sent_twice_is_refused(guarded, header):
    twice = [("authorization", "Bearer a key for the tests"), (header, "a"), (header, "b")]
    if header == "authorization":
        twice.pop()
    answer = guarded.client.get("/v1/models", headers=twice)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        f"The request has several {header} headers: send one"
    )
    fine = [("authorization", "Bearer a key for the tests"), ("accept", "a"), ("accept", "b")]
    assert guarded.client.get("/v1/models", headers=fine).status_code == 200


def test_two_hosts_and_two_lengths_are_refused(plain):
    twice = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n"
    assert b" 400 " in talk(plain, twice)
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
    twice = b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} "
    assert b" 400 " in talk(plain, head + twice)


def test_head_and_options_are_answered_on_every_path(plain):
    for path in ("/", "/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/status",
                 "/v1/models/tiny", "/docs", "/openapi.json", "/console/app.js"):  # fmt: skip
        head = plain.client.head(path)
        assert head.status_code == 200, path
        assert head.content == b""
        got = plain.client.get(path)
        assert head.headers["content-type"] == got.headers["content-type"]
        options = plain.client.options(path)
        assert options.status_code == 204
        assert options.headers["allow"] == "GET, HEAD, OPTIONS"
    assert plain.client.head("/nothing").status_code == 404
    assert plain.client.head(CHAT).status_code == 405
    assert plain.client.options(CHAT).headers["allow"] == "OPTIONS, POST"
    assert plain.client.options("/nothing").status_code in (404, 405)


def test_messages_name_files_without_their_folders_and_quote_requests_as_they_are():
    engine = FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny")))
    with serving(engine) as server:
        engine.refuse = OverloadedError("adapter /srv/secret/place/a.bin: see /v1/models and /docs")
        said = ask(server).json()["error"]["message"]
        assert said == "adapter a.bin: see /v1/models and /docs"
        engine.refuse = None
        form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/Missing"}}}
        for sent, part in (
            ({"response_format": form}, "refers to #/$defs/Missing at"),
            ({"model": "/models/Qwen"}, "no model '/models/Qwen'"),
            ({"tool_choice": "/a/b/c"}, "is '/a/b/c'"),
        ):
            assert part in ask(server, **sent).json()["error"]["message"]


def test_bodies_in_progress_are_bounded_together():
    body = chat("x" * 50_000)
    with serving(max_held_bytes=120_000, body_seconds=30) as server:
        held = []
        for _ in range(2):
            content = json.dumps(body).encode()
            sock = socket.create_connection(("127.0.0.1", server.port))
            sock.sendall(
                b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: localhost\r\n"
                b"content-type: application/json\r\ncontent-length: 60000\r\n\r\n" + content
            )
            held.append(sock)
        until(lambda: ask(server, text="y" * 30_000).status_code == 429)
        for sock in held:
            sock.close()
        until(lambda: ask(server, text="y" * 30_000).status_code != 429)


@pytest.mark.parametrize("url", ["/health?" + "a=b&" * 5_000, "/" + "%41" * 9_000])
def test_a_long_url_is_refused_before_it_is_taken_apart(plain, url):
    found = talk(plain, b"GET " + url.encode() + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b" 400 " in found


@pytest.mark.parametrize("prefix", ["", "/valora"])
def test_a_proxy_may_show_the_server_below_a_path_and_take_it_off_or_not(prefix):
    with serving(root_path="/valora") as server:
        client = server.client
        for path in ("/", "/v1/models", "/console/app.js", "/docs"):
            assert client.get(prefix + path).status_code == 200, path
        assert client.post(prefix + CHAT, json=chat(max_tokens=1)).status_code == 200
        assert client.get(f"{prefix}/v2/models/none").status_code == 410
        links = re.findall(r"(?:src|href)=\"([^\"]+)\"", client.get(f"{prefix}/docs").text)
        links += re.findall(r"url: '([^']+)'", client.get(f"{prefix}/docs").text)
        assert "/valora/openapi.json" in links
        for link in links:
            assert link.startswith("/valora/")
            assert client.get(link).status_code == 200
        assert client.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/valora"}]
        bare = client.get("/valora")  # links of the console are relative
        assert (bare.status_code, bare.headers["location"]) == (307, "/valora/")
        for path in ("/valora2/v1/models", "/valora/valora/v1/models"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "there"),
    [
        ("/v1/models/", "/v1/models"),
        ("/v1/models/a%3Fb%2F/?x=1", "/v1/models/a%3Fb%2F?x=1"),
        ("/docs/", "/docs"),
        (f"{CHAT}/", CHAT),
        ("//elsewhere.example/", "/elsewhere.example"),
    ],
)
def test_a_path_with_a_slash_at_its_end_is_elsewhere_on_the_same_host(plain, path, there):
    """Relative, whatever scheme and prefix a proxy has, and with the method and the body kept."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-forwarded-host: elsewhere.example\r\n\r\n"
    found = talk(plain, head.encode()).decode()
    assert found.startswith("HTTP/1.1 307 ")
    location = re.search(r"location: (.*)\r\n", found)[1]
    for base in ("https://proxy.example", "https://proxy.example/valora"):
        assert urllib.parse.urljoin(base + path, location) == base + there


def test_a_post_is_sent_again_to_the_path_without_its_slash(plain):
    answer = plain.client.post(f"{CHAT}/", json=chat(max_tokens=1), follow_redirects=True)
    assert answer.status_code == 200
    assert answer.url == f"{plain.url}{CHAT}"
