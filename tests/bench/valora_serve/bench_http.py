"""What the HTTP side costs: overhead over the engine, connections held, memory over many requests.

    python tests/bench/valora_serve/bench_http.py [--requests 20000] [--connections 1000]

All with the tiny base model and a random bundle. The overhead is measured request by request in
turn with direct calls of an engine in this process, so that both see the same machine; the client's
own time (a bare socket) is part of it.
"""

import argparse
import asyncio
import contextlib
import io
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.e2e.valora_serve.serving import Process, whole
from tests.support.serve_helpers import make_bundle
from valora_serve.engine.async_engine import start_engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.server.telemetry.metrics import memory_bytes
from valora_serve.types import Request, SamplingParams

TURNS = 400


def http(path, body, kind="application/json"):
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def exchange(reader, writer, message):
    """Send a request; gives the status and the body."""
    writer.write(message)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def overhead(folder, port):
    engine = await start_engine(EngineSettings(profile=False))
    await engine.load("bundle", folder)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize((96, 96)).convert("RGB").save(buffer, "PNG")
    picture = buffer.getvalue()
    form = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n'
    form += picture + b"\r\n--x--\r\n"
    text = {"model": "tiny", "prompt": "a red star and", "max_tokens": 8, "ignore_eos": True}

    def words(number):
        return Request(
            f"d{number}", "tiny", text=text["prompt"],
            sampling=SamplingParams(max_tokens=8, ignore_eos=True),
        )  # fmt: skip

    def head(number):
        return Request(f"d{number}", "scene", images=[Image.open(io.BytesIO(picture))])

    cases = {
        "completion of 8 tokens": (http("/v1/completions", json.dumps(text).encode()), words),
        "classification head, 96 x 96 PNG": (
            http("/v1/vision/scene", form, "multipart/form-data; boundary=x"), head
        ),
    }  # fmt: skip
    print("| request | engine alone, median ms | over HTTP, median ms | overhead ms |")
    print("|---|---|---|---|")
    for name, (message, request) in cases.items():
        direct, over = [], []
        for turn in range(TURNS + 20):
            began = time.perf_counter()
            async for _ in engine.generate(request(turn)):
                pass
            middle = time.perf_counter()
            status, answer = await exchange(reader, writer, message)
            over.append(time.perf_counter() - middle)
            direct.append(middle - began)
            assert status == 200, answer
        a, b = (1000 * np.median(values[20:]) for values in (direct, over))
        print(f"| {name} | {a:.2f} | {b:.2f} | {b - a:.2f} |")
    writer.close()
    await engine.close()


async def connections(port, count):
    """Hold connections open, ask over all of them; gives how many were answered, in what time."""
    held = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(count)))
    body = json.dumps({"prompt": "a", "max_tokens": 4, "ignore_eos": True}).encode()
    began = time.perf_counter()
    answers = await asyncio.gather(
        *(exchange(*pair, http("/v1/completions", body)) for pair in held), return_exceptions=True
    )
    took = time.perf_counter() - began
    for _, writer in held:
        writer.close()
    return sum(not isinstance(item, BaseException) and item[0] == 200 for item in answers), took


async def many(port, pid, count):
    """Ask so many times; gives the resident memory along the way, in MiB."""
    rng = np.random.default_rng(0)
    sizes = []
    done = 0

    async def worker():
        nonlocal done
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while done < count:
            done += 1
            number = done
            body = {
                "model": ["tiny", "sample/adapter-1", "caption"][number % 3], "max_tokens": 2,
                "prompt": rng.integers(100, 1000, int(rng.integers(2, 24))).tolist(),
            }  # fmt: skip
            status, answer = await exchange(
                reader, writer, http("/v1/completions", json.dumps(body).encode())
            )
            assert status == 200, answer
            if number % max(1, count // 10) == 0:
                sizes.append(memory_bytes(str(pid)) / 2**20)
        writer.close()

    await asyncio.gather(*(worker() for _ in range(32)))
    return sizes


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=20_000)
    options.add_argument("--connections", type=int, default=1_000)
    found = options.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = make_bundle(Path(place) / "sample", "tiny")
        began = time.perf_counter()
        process = Process(folder, "--log-level", "warning", cwd=place, start=whole).ready()
        try:
            ready = process.said(r"ready after (\S+) s")[1]
            print(
                f"process start to ready: {time.perf_counter() - began:.1f} s with the imports, "
                f"{ready} s from settings to serving (costs of steps not measured)"
            )
            asyncio.run(overhead(folder, process.port))
            answered, took = asyncio.run(connections(process.port, found.connections))
            print(f"{answered} of {found.connections} held connections answered in {took:.1f} s")
            began = time.perf_counter()
            sizes = asyncio.run(many(process.port, process.process.pid, found.requests))
            took = time.perf_counter() - began
            told = ", ".join(f"{size:.0f}" for size in sizes)
            print(f"{found.requests} requests in {took:.0f} s; resident MiB by tenths: {told}")
        finally:
            process.end()
    print(f"(this client: {memory_bytes() / 2**20:.0f} MiB)")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
