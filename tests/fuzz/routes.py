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

from tests.fuzz.driver import HEADERS, KEY, error_of, served, together
from tests.fuzz.mutations import json_texts
from tests.support.serve_helpers import make_bundle

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
LIMITS = {"health": 0.2}
AT_ONCE, MIXED = 8, 8  # hostile requests of one kind, and of any
CHAT, COMPLETIONS, VISION = "/v1/chat/completions", "/v1/completions", "/v1/vision/scene"
PATHS = (CHAT, COMPLETIONS, VISION, "/v1/load_lora_adapter", "/v1/unload_bundle")


def hostile(rng):
    """Bodies that cost a careless server much, by name: path, headers, content or what makes it."""
    many = rng.randrange(200_000, 2_000_000)
    path = rng.choice(PATHS)
    part = b'--b\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\nx\r\n'

    def data(kind, size):
        return f"data:{kind};base64,{base64.b64encode(rng.randbytes(size)).decode()}"

    def turn(content, **more):
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1} | more

    def part_of(kind, sent):
        return turn([{"type": kind, kind: sent}])

    likely = {"n": 16, "max_tokens": 64, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    schema = {"schema": {"enum": [f"v{n}" for n in range(19_000)]}}
    bodies = {
        "tokens": (COMPLETIONS, b'{"prompt":[' + b"1," * many + b"1]}"),
        "token lists": (COMPLETIONS, {"prompt": [[1]] * 901}),
        "stop texts": (COMPLETIONS, {
            "prompt": "a" * 390_000, "stop": ["a" * n for n in range(1, 17)], "n": 16}),
        "escapes": (CHAT, turn("\0" * many)),
        "foreign characters": (CHAT, turn("\u20ac" * many)),
        "one character": (CHAT, turn("a" * 399_000)),
        "marks": (COMPLETIONS, {"prompt": "a\u0301" * 199_000}),
        "messages": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 9_000 + [1]}),
        "unknown keys within": (CHAT, turn(
            [{"type": "text", **{f"k{n}": 1 for n in range(4200)}}])),
        "a large schema": (CHAT, turn("a", response_format={
            "type": "json_schema", "json_schema": schema})),
        "log probabilities": (CHAT, turn("a", **likely)),
        "log probabilities, streamed": (CHAT, turn("a", **likely, stream=True)),
        "a logit bias": (CHAT, turn("a", logit_bias={str(n): 1 for n in range(4000)})),
        "log probabilities of a prompt": (COMPLETIONS, {
            "prompt": "a b c d " * 200, "max_tokens": 0, "echo": True, "logprobs": 20}),
        "log probabilities of a response": ("/v1/responses", {
            "input": "a", "max_output_tokens": 400, "top_logprobs": 20,
            "include": ["message.output_text.logprobs"]}),
        "embeddings": ("/v1/embeddings", {"input": ["a b c"] * 300}),
        "a large image": (CHAT, lambda: part_of(
            "image_url", {"url": data("image/png", 15_000_000)})),
        "a large video": (CHAT, lambda: part_of(
            "video_url", {"url": data("video/mp4", 24_000_000)})),
        "many frames": (CHAT, lambda: part_of("frames", [data("image/jpeg", 75_000)] * 64)),
        "a long url": (CHAT, part_of("image_url", {"url": "http://" + "a/" * many})),
        "a surrogate": (CHAT, json.dumps(turn("\ud800")).encode()),
        "too large": (path, b" " * (70 * 2**20)),
        **{name: (path, make) for name, make in json_texts(rng, many).items()},
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
    return {
        **{name: (place, JSON, body) for name, (place, body) in bodies.items()},
        **{name: (VISION, FORM, body) for name, body in forms.items()},
        "a long boundary": (VISION, long, b"--" + b"b" * many),
        "a form in JSON's place": (path, url_form, b"a=1&" * many),
        "compressed": (path, JSON | {"content-encoding": "gzip"}, rng.randbytes(many)),
    }


def raw(rng):
    """Requests that HTTP clients do not send."""
    post = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer "
    post += KEY.encode() + b"\r\ncontent-type: application/json\r\n"
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


def talk(port, data):
    """Send bytes that may be no request."""

    def send(sock):
        with contextlib.suppress(OSError):
            sock.sendall(data)

    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 10) as sock:
        threading.Thread(target=send, args=(sock,), daemon=True).start()
        answer = sock.recv(65536)
    status = answer[9:12].decode("ascii", "replace") if answer else "hung up"
    assert not status.startswith("5"), status
    return status


@contextlib.contextmanager
def running(folder):
    """``valora-serve`` with a random bundle; case N is the Nth of all kinds, in turn."""
    (folder / "store").mkdir()
    arguments = (
        make_bundle(folder / "bundle", "tiny"), "--no-golden", "--api-key", KEY,
        "--allow-runtime-loading", "--adapter-folder", folder / "store",
        "--state-file", folder / "served.json", "--log-level", "error",
        # What is asked at random may take minutes on a CPU.
        "--answer-tokens", 16, "--deadline", 60,
    )  # fmt: skip

    with served(*arguments, cwd=folder) as process:

        def sender(work):
            if isinstance(work, bytes):
                return partial(talk, process.port, work)
            path, headers, content = work
            content = content() if callable(content) else content
            if isinstance(content, dict):
                content = json.dumps(content, ensure_ascii=False).encode()
            return partial(post, process.url, path, headers, content)

        def make(rng, number):
            works = hostile(rng) | raw(rng)
            names = [*works, "a mixture"]
            name = names[number % len(names)]
            chosen = rng.choices([*works], k=MIXED) if name == "a mixture" else [name] * AT_ONCE
            sends = {one: sender(works[one]) for one in dict.fromkeys(chosen)}
            return name, ", ".join(sends), lambda: together([sends[one] for one in chosen])

        yield process, make
