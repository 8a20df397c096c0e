"""Hostile requests, written by hand.

The property: no 5xx but 503 and 504, every error in OpenAI's format, and the server ends with
status 0 and no traceback in its log.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import threading
from functools import partial

import httpx

from tests.fuzz.driver import address, error_of, served, together
from tests.support.serve_helpers import make_bundle

SECRET = "an-admin-key-for-the-fuzzing"
HEADERS = {"authorization": f"Bearer {SECRET}"}
JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
LIMITS = {"health": 0.2}
AT_ONCE, MIXED = 8, 8  # hostile requests of one kind, and of any
CHAT, COMPLETIONS, VISION = "/v1/chat/completions", "/v1/completions", "/v1/vision/scene"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"
PATHS = (CHAT, COMPLETIONS, VISION, "/v1/load_lora_adapter", "/v1/unload_bundle")


def hostile(rng):
    """Bodies that cost a careless server much, by name: path, headers, content or what makes it."""
    many = rng.randrange(200_000, 2_000_000)
    user = [{"role": "user", "content": "a"}]
    path = rng.choice(PATHS)
    part = b'--b\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\nx\r\n'

    def keys(form, count):
        return b"{" + b",".join(form % n for n in range(count)) + b"}"

    def coded(size):
        return base64.b64encode(rng.randbytes(size))

    def turn(content):
        return b'{"messages":[{"role":"user","content":' + content + b'}],"max_tokens":1}'

    def picture(url):
        return turn(b'[{"type":"image_url","image_url":{"url":"' + url + b'"}}]')

    bodies = {
        "unknown keys": (path, lambda: keys(b'"k%d":1', many)),
        "long keys": (path, lambda: keys(b'"%09000d":1', 5000)),
        "nested lists": (path, b"[" * many),
        "nested objects": (path, b'{"a":' * many),
        "tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * many + b"1]}"),
        "token lists": (COMPLETIONS, b'{"prompt":[' + b"[1]," * 900 + b"[1]]}"),
        "stop texts": (COMPLETIONS, json.dumps(
            {"prompt": "a" * 390_000, "stop": ["a" * n for n in range(1, 17)], "n": 16}).encode()),
        "a huge integer": (path, b'{"n":' + b"9" * (10 * many) + b"}"),
        "escapes": (CHAT, turn(b'"' + rb"\u0000" * many + b'"')),
        "foreign characters": (CHAT, turn(('"' + "\u20ac" * many + '"').encode())),
        "one character": (CHAT, turn(b'"' + b"a" * 399_000 + b'"')),
        "marks": (COMPLETIONS, json.dumps({"prompt": "a\u0301" * 199_000}).encode()),
        "messages": (CHAT, b'{"messages":[' + b'{"role":"user","content":"a"},' * 9_000 + b"1]}"),
        "unknown keys within": (CHAT, turn(
            b'[{"type":"text",' + keys(b'"k%d":1', 4200)[1:40_000] + b'":1}]')),
        "a large schema": (CHAT, json.dumps({"messages": user, "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"enum": [f"v{n}" for n in range(19_000)]}}}}).encode()),
        "log probabilities": (CHAT, json.dumps({
            "messages": user, "n": 16, "max_tokens": 64, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 20}).encode()),
        "a logit bias": (CHAT, json.dumps(
            {"messages": user, "logit_bias": {str(n): 1 for n in range(4000)}}).encode()),
        "log probabilities, streamed": (CHAT, json.dumps({
            "messages": user, "n": 16, "max_tokens": 32, "ignore_eos": True, "logprobs": True,
            "top_logprobs": 20, "stream": True}).encode()),
        "log probabilities of a prompt": (COMPLETIONS, json.dumps({
            "prompt": "a b c d " * 200, "max_tokens": 0, "echo": True, "logprobs": 20}).encode()),
        "log probabilities of a response": (RESPONSES, json.dumps({
            "input": "a", "max_output_tokens": 400, "top_logprobs": 20,
            "include": ["message.output_text.logprobs"]}).encode()),
        "embeddings": (EMBEDDINGS, json.dumps({"input": ["a b c"] * 300}).encode()),
        "a large image": (CHAT, lambda: picture(
            b"data:image/png;base64," + coded(15_000_000))),
        "a large video": (CHAT, lambda: turn(
            b'[{"type":"video_url","video_url":{"url":"data:video/mp4;base64,'
            + coded(24_000_000) + b'"}}]')),
        "many frames": (CHAT, turn(
            b'[{"type":"frames","frames":["data:image/jpeg;base64,'
            + b'","data:image/jpeg;base64,'.join([coded(75_000)] * 64) + b'"]}]')),
        "a long url": (CHAT, picture(b"http://" + b"a/" * many)),
        "a surrogate": (CHAT, turn(rb'"\ud800"')),
        "bytes": (path, rng.randbytes(many)),
        "too large": (path, b" " * (70 * 2**20)),
    }  # fmt: skip
    forms = {
        "parts of a form": part * 20_000 + b"--b--",
        "boundaries": part[:-3] + b"\r\n--bx" * many,
        "a large video as a form": lambda: (
            part.replace(b'"image"', b'"video"')[:-3] + rng.randbytes(60_000_000) + b"\r\n--b--"
        ),
        "a large file": lambda: part[:-3] + rng.randbytes(15_000_000) + b"\r\n--b--",
        "headers of a part": b"--b\r\n" + b"a: b\r\n" * many,
        "a part without end": part[:-3] + b"\r\n" * many,
    }
    long = {"content-type": f"multipart/form-data; boundary={'b' * 9000}"}
    url_form = {"content-type": "application/x-www-form-urlencoded"}
    made = {name: (place, JSON, body) for name, (place, body) in bodies.items()}
    made |= {name: (VISION, FORM, body) for name, body in forms.items()}
    made["a long boundary"] = (VISION, long, b"--" + b"b" * many)
    made["a form in JSON's place"] = (path, url_form, b"a=1&" * many)
    made["compressed"] = (path, JSON | {"content-encoding": "gzip"}, rng.randbytes(many))
    return made


def raw(rng):
    """Requests that HTTP clients do not send."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
    post += SECRET.encode() + b"\r\ncontent-type: application/json\r\n"
    chunked = post + b"transfer-encoding: chunked\r\n\r\n"
    end = b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    return {
        "chunks of one byte": chunked + b"1\r\na\r\n" * 500_000,
        "chunk extensions": chunked + b"1;" + b"a=b;" * 1_000_000,
        "trailers": chunked + b"0\r\n" + b"a: b\r\n" * 500_000,
        "pipelined requests": (get + b"\r\n") * 100_000,
        "headers": get + b"a: b\r\n" * 10_000 + b"\r\n",
        "a long path": b"GET /" + b"%41" * 20_000 + end,
        "a long query": b"GET /health?" + b"a=b&" * 15_000 + end,
        "two keys": post + b"authorization: Bearer x\r\ncontent-length: 2\r\n\r\n{}",
        "two lengths": post + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        "noise": rng.randbytes(100_000),
    }


def post(url, path, headers, content):
    """Send a hostile body."""
    try:
        answer = httpx.post(
            url + path, content=content, headers=HEADERS | headers, timeout=120, trust_env=False
        )
    except httpx.TransportError:
        assert len(content) >= 2**20, f"{path}: hung up on a small body"
        return "hung up"
    assert answer.status_code < 500 or answer.status_code in (503, 504), answer.text[:300]
    if answer.status_code >= 400:
        error_of(answer.text)
    return str(answer.status_code)


def talk(url, data):
    """Send bytes that may be no request."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(address(url), timeout=10) as sock:

        def send():
            with contextlib.suppress(OSError):
                sock.sendall(data)

        threading.Thread(target=send, daemon=True).start()
        answer = sock.recv(65536)
    status = answer[9:12].decode("ascii", "replace") if answer else "hung up"
    assert not status.startswith("5"), status
    return status


@contextlib.contextmanager
def running(folder):
    """``valora-serve`` with a random bundle; case N is the Nth of all kinds, in turn."""
    (folder / "store").mkdir()
    arguments = (
        make_bundle(folder / "bundle", "tiny"), "--no-golden", "--api-key", SECRET,
        "--allow-runtime-loading", "--adapter-folder", folder / "store",
        "--state-file", folder / "served.json", "--log-level", "error",
        # What is asked at random may take minutes on a CPU.
        "--answer-tokens", 16, "--deadline", 60,
    )  # fmt: skip

    with served(*arguments, cwd=folder) as process:
        url = process.url

        def make(rng, number):
            bodies, data = hostile(rng), raw(rng)
            works = [*bodies, *data]
            names = [*works, "a mixture"]
            name = names[number % len(names)]
            chosen = rng.choices(works, k=MIXED) if name == "a mixture" else [name] * AT_ONCE
            sends = {one: partial(talk, url, data[one]) for one in chosen if one in data}
            for one in dict.fromkeys(chosen):
                if one in bodies:
                    path, headers, content = bodies[one]
                    content = content() if callable(content) else content
                    sends[one] = partial(post, url, path, headers, content)
            return [name], ", ".join(sends), lambda: together([sends[one] for one in chosen])

        yield url, process.process.pid, make
