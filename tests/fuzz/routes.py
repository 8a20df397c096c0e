"""Hostile requests, written by hand: no 5xx but 503 and 504, every error in OpenAI's format."""

import contextlib
import json
import socket
import threading
from functools import partial

import httpx

from tests.e2e.valora_serve.serving import HEADERS, SECRET
from tests.fuzz.driver import error_of, served, together
from tests.fuzz.mutations import json_texts
from tests.support.http_helpers import CHAT, data_url
from tests.support.serve_helpers import make_bundle

JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=b"}
LIMITS = {"health": 0.2}
AT_ONCE, MIXED = 8, 8  # hostile requests of one kind, and of any
COMPLETIONS, VISION = "/v1/completions", "/v1/vision/scene"
PATHS = (CHAT, COMPLETIONS, VISION, "/v1/load_lora_adapter", "/v1/unload_bundle")


def hostile(rng):
    """Bodies that cost a careless server much, by name: path, headers, content or what makes it."""
    many = rng.randrange(200_000, 2_000_000)
    path = rng.choice(PATHS)
    part = b'--b\r\ncontent-disposition: form-data; name="image"; filename="x"\r\n\r\n'

    def data(size, kind="image/png"):
        return data_url(rng.randbytes(size), kind)

    def turn(content, **more):
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 1} | more

    def part_of(kind, sent):
        return turn([{"type": kind, kind: sent}])

    likely = {"n": 16, "max_tokens": 64, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    schema = {"schema": {"enum": [f"v{n}" for n in range(19_000)]}}
    chats = {
        "escapes": turn("\0" * many),
        "foreign characters": turn("\u20ac" * many),
        "one character": turn("a" * 399_000),
        "a large schema": turn(
            "a", response_format={"type": "json_schema", "json_schema": schema}),
        "log probabilities": turn("a", **likely),
        "log probabilities, streamed": turn("a", **likely, stream=True),
        "a large image": lambda: part_of("image_url", {"url": data(15_000_000)}),
        "a large video": lambda: part_of("video_url", {"url": data(24_000_000, "video/mp4")}),
        "many frames": lambda: part_of("frames", [data(75_000)] * 64),
        "a long url": part_of("image_url", {"url": "http://" + "a/" * many}),
    }  # fmt: skip
    prompts = {
        "stop texts": {"prompt": "a" * 390_000, "stop": ["a" * n for n in range(1, 17)], "n": 16},
        "marks": {"prompt": "a\u0301" * 199_000},
        "log probabilities of a prompt": {
            "prompt": "a b c d " * 200, "max_tokens": 0, "echo": True, "logprobs": 20},
    }  # fmt: skip
    forms = {
        "parts of a form": (part + b"x\r\n") * 20_000 + b"--b--",
        "boundaries": part + b"\r\n--bx" * many,
        "a large video as a form": lambda: (
            part.replace(b"image", b"video") + rng.randbytes(60_000_000) + b"\r\n--b--"),
        "a large file": lambda: part + rng.randbytes(15_000_000) + b"\r\n--b--",
        "headers of a part": b"--b\r\n" + b"a: b\r\n" * many,
        "a part without end": part + b"\r\n" * many,
    }  # fmt: skip
    url_form = {"content-type": "application/x-www-form-urlencoded"}
    return {
        **{name: (CHAT, JSON, body) for name, body in chats.items()},
        **{name: (COMPLETIONS, JSON, body) for name, body in prompts.items()},
        **{name: (VISION, FORM, body) for name, body in forms.items()},
        **{name: (path, JSON, make) for name, make in json_texts(many).items()},
        "log probabilities of a response": ("/v1/responses", JSON, {
            "input": "a", "max_output_tokens": 400, "top_logprobs": 20,
            "include": ["message.output_text.logprobs"]}),
        "too large": (path, JSON, b" " * (70 * 2**20)),
        "a form in JSON's place": (path, url_form, b"a=1&" * many),
        "compressed": (path, JSON | {"content-encoding": "gzip"}, rng.randbytes(many)),
    }  # fmt: skip


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
        "a long path": b"GET /" + b"%41" * 20_000 + end,
        "a long query": b"GET /health?" + b"a=b&" * 15_000 + end,
        "two keys": post + b"authorization: Bearer x\r\ncontent-length: 2\r\n\r\n{}",
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
        make_bundle(folder / "bundle", "tiny"), "--no-golden", "--api-key", SECRET,
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
