"""Replicas on Ray Serve: throughput of one and two, affinity against random, recovery from a kill.

    python -m tests.bench.valora_serve.bench_replicas throughput affinity kill

needs two GPUs and prints a table for each. Throughput and recovery are measured with 16 adapters,
the routers with 200 on ``--affinity-base``, which can have fewer layers: loads and steps grow alike
with them. With ``--tiny`` it runs on the CPU with the tiny base model and few requests, which shows
that it works and measures nothing.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import torch
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoConfig

from tests.bench.valora_serve.serve_models import ATTENTION
from valora_data.contract.base_model import base_folder

SECRET = "an-admin-key-of-the-benchmark"
HEADERS = {"authorization": f"Bearer {SECRET}"}


@dataclass(frozen=True)
class Shape:
    """Size of a benchmark.

    Attributes:
        base: Base model.
        adapters: Number of adapters.
        rank: Their rank.
        slots: Adapters on the device of a replica.
        clients: Requests in progress.
        seconds: Length of a measurement.
        tokens: Tokens of an answer.
        options: Further options of the server.
    """

    base: str
    adapters: int
    rank: int
    slots: int
    clients: int
    seconds: float
    tokens: int
    options: tuple[str, ...] = ()


TINY = Shape("tiny", 6, 4, 3, 8, 6.0, 8, ("--pages", "1000", "--no-profile"))


def save_adapters(shape, folder):
    """Write the adapters of a shape, whose weights are windows into one pool of random numbers."""
    text = AutoConfig.from_pretrained(base_folder(shape.base)).get_text_config()
    width, layers = text.hidden_size, text.num_hidden_layers
    head = getattr(text, "head_dim", None) or width // text.num_attention_heads
    query, key = head * text.num_attention_heads, head * text.num_key_value_heads
    sizes = {"q_proj": (query, width), "k_proj": (key, width), "v_proj": (key, width),
             "o_proj": (width, query)}  # fmt: skip
    count = shape.rank * max(query, width) + 1000 * shape.adapters
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(count, generator=generator).mul_(0.02).bfloat16()
    config = {
        "peft_type": "LORA", "r": shape.rank, "lora_alpha": shape.rank, "bias": "none",
        "target_modules": [*ATTENTION], "base_model_name_or_path": "", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    for number in range(shape.adapters):
        tensors = {}
        window = pool[1000 * number :]
        for layer in range(layers):
            for leaf, (outputs, inputs) in sizes.items():
                path = f"base_model.model.model.language_model.layers.{layer}.self_attn.{leaf}"
                a = window[: shape.rank * inputs].view(shape.rank, inputs)
                b = window[: shape.rank * outputs].view(outputs, shape.rank)
                tensors[f"{path}.lora_A.weight"] = a.clone()
                tensors[f"{path}.lora_B.weight"] = b.clone()
        place = folder / f"a{number:03d}"
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(config))
    return folder


class Server:
    """`valora-serve` with adapters that are loaded at run time."""

    def __init__(self, shape, folder, store, *options):
        self.port = 8300 + random.randrange(500)
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"log-{self.port}.txt"
        arguments = [
            "--base", shape.base, "--port", str(self.port), "--api-key", SECRET, "--slots",
            str(shape.slots), "--max-rank", str(max(64, shape.rank)), "--allow-runtime-loading",
            "--adapter-folder", str(store), "--state-file", str(folder / f"s-{self.port}.json"),
            *shape.options, *options,
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "valora_serve.cli", *arguments],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self._client = httpx.Client(base_url=self.url, headers=HEADERS, timeout=600)
        end = time.monotonic() + 900
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            try:
                if self._client.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        for adapter in sorted(store.iterdir()):
            body = {"lora_name": adapter.name, "lora_path": adapter.name}
            self._client.post("/v1/load_lora_adapter", json=body).raise_for_status()
        while not self.prepared() and time.monotonic() < end:
            time.sleep(0.5)

    def prepared(self):
        """Whether the engines have captured and compiled all that they leave for quiet moments."""
        engine = self._client.get("/v1/status").raise_for_status().json()
        return engine["prepared"] == engine["preparations"]

    def metrics(self, name):
        """Values of a metric by replica."""
        return {
            sample.labels.get("replica"): sample.value
            for family in text_string_to_metric_families(self._client.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"valora_{name}"
        }

    def workers(self):
        """Processes of the replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if "ServeReplica" in "".join(one.cmdline()[:1])]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


@dataclass
class Answer:
    """An answered request: when it ended, seconds to its first token, status, text."""

    ended: float
    first: float
    status: int
    text: str


async def load(server, shape, seconds, *, seed=0, stream=True):
    """Keep `shape.clients` requests in progress, whose adapters are drawn uniformly."""
    generator = random.Random(seed)
    answers, end = [], time.monotonic() + seconds

    async def ask():
        # A pool of httpx looks through all its connections for every request: with one for all,
        # 128 clients were slower than two replicas.
        async with httpx.AsyncClient(
            base_url=server.url, headers=HEADERS, timeout=600, verify=False
        ) as client:
            while time.monotonic() < end:
                body = {
                    "model": f"a{generator.randrange(shape.adapters):03d}", "stream": stream,
                    "max_tokens": shape.tokens, "ignore_eos": True,
                    "messages": [{"role": "user", "content": f"go {generator.randrange(10**6)}"}],
                }  # fmt: skip
                answers.append(await answered(client, body))

    await asyncio.gather(*(ask() for _ in range(shape.clients)))
    return answers


async def answered(client, body):
    """Send a request, and read its answer to the end."""
    began, first, text = time.monotonic(), None, ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])
                if "error" in piece:
                    text = "error"
                    break
                for choice in piece["choices"]:
                    text += choice["delta"].get("content") or ""
                first = first or (time.monotonic() - began if text else None)
            elif line.startswith("{"):
                text = "error" if "error" in json.loads(line) else "answer"
    now = time.monotonic()
    status = 599 if text == "error" and answer.status_code == 200 else answer.status_code
    return Answer(now, first or now - began, status, text)


def percentile(values, share):
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(title, *columns):
    """An empty table with machine and date."""
    where = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    made = Table(title=f"{title} ({where}, {time.strftime('%Y-%m-%d')})", title_justify="left")
    for column in columns:
        made.add_column(column, justify="right")
    return made


def throughput(shape, folder, store, console, then=None):
    """Requests per second at saturation, of one replica and of two; `then` gets the two."""
    made = table("Throughput at saturation", "replicas", "requests/s", "x one")
    alone = None
    for count in (1, 2):
        busy = replace(shape, clients=shape.clients * count)
        with Server(busy, folder, store, "--replicas", str(count)) as server:
            asyncio.run(load(server, busy, shape.seconds / 2, stream=False))  # warm
            began = time.monotonic()
            answers = asyncio.run(load(server, busy, shape.seconds, seed=1, stream=False))
            rate = len(answers) / (max(a.ended for a in answers) - began)
            alone = alone or rate
            made.add_row(str(count), f"{rate:.2f}", f"{rate / alone:.2f}")
            if count == 2:
                console.print(made)
                if then is not None:
                    then(server)


def affinity(shape, folder, store, console):
    """Time to first token and adapter loads of two replicas, by router."""
    made = table(
        f"{shape.adapters} adapters of rank {shape.rank}, {shape.slots} slots a replica",
        "router", "requests/s", "TTFT p50, s", "TTFT p99, s", "adapter loads",
    )  # fmt: skip
    for router in ("affinity", "random"):
        options = ("--replicas", "2", "--router", router)
        with Server(shape, folder, store, *options) as server:
            asyncio.run(load(server, shape, shape.seconds / 2))
            before = sum(server.metrics("adapter_loads_total").values())
            answers = asyncio.run(load(server, shape, shape.seconds, seed=1))
            time.sleep(1.5)  # reports of the replicas
            loads = sum(server.metrics("adapter_loads_total").values()) - before
        first = [answer.first for answer in answers]
        made.add_row(
            router, f"{len(answers) / shape.seconds:.2f}", f"{statistics.median(first):.3f}",
            f"{percentile(first, 0.99):.3f}", f"{loads:.0f}",
        )  # fmt: skip
    console.print(made)


def recovery(ended, usual, seconds):
    """Seconds until as many answers a second end as before, after the fewest; NaN if never."""
    window = max(2.0, seconds / 10)
    starts = [start / 10 for start in range(int(10 * (max(ended) - window)))]
    rates = [sum(start <= at < start + window for at in ended) / window for start in starts]
    fewest = min(rates)
    if fewest >= 0.95 * usual:
        return 0.0
    pairs = list(zip(starts, rates, strict=True))[rates.index(fewest) :]
    return next((start for start, rate in pairs if rate >= 0.95 * usual), float("nan"))


def kill(shape, folder, store, console, running=None):
    """What a `kill -9` of one of two replicas does to requests, and when the throughput is back."""
    made = table(
        "kill -9 of one of two replicas", "requests", "answered", "clear errors", "others",
        "throughput back after, s",
    )  # fmt: skip
    started = contextlib.nullcontext(running) if running else None
    with started or Server(shape, folder, store, "--replicas", "2") as server:
        before = asyncio.run(load(server, shape, shape.seconds))
        usual = len(before) / shape.seconds

        async def case():
            seconds = max(60.0, 3 * shape.seconds)
            task = asyncio.create_task(load(server, shape, seconds, seed=1))
            await asyncio.sleep(shape.seconds / 4)
            victims = await asyncio.to_thread(server.workers)
            victims[0].send_signal(signal.SIGKILL)
            return time.monotonic(), await task

        killed, answers = asyncio.run(case())
    back = recovery([a.ended - killed for a in answers if a.status == 200], usual, shape.seconds)
    fine = sum(answer.status == 200 for answer in answers)
    clear = sum(answer.status in (503, 599) for answer in answers)
    made.add_row(
        str(len(answers)), str(fine), str(clear), str(len(answers) - fine - clear), f"{back:.1f}"
    )
    console.print(made)


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["throughput", "affinity", "kill"])
    parser.add_argument("--tiny", action="store_true", help="a small run on the CPU")
    parser.add_argument("--base", help="base model: a folder or hub name, of the 7B shape")
    parser.add_argument("--affinity-base", help="base model of part affinity")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64, help="requests in progress")
    found = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server, too
    if not found.tiny and not found.base:
        parser.error("name --base, or use --tiny")
    few = many = TINY
    if not found.tiny:
        few = Shape(found.base, 16, 64, 32, found.clients, found.seconds, 128)
        many = Shape(
            found.affinity_base or found.base, 200, 64, 32, 2 * found.clients, found.seconds, 32
        )
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if {"throughput", "kill"} & {*found.parts}:
            store = save_adapters(few, folder / "few")

            def last(server=None):
                if "kill" in found.parts:
                    kill(few, folder, store, console, server)

            if "throughput" in found.parts:
                throughput(few, folder, store, console, last)
            else:
                last()
        if "affinity" in found.parts:
            affinity(many, folder, save_adapters(many, folder / "many"), console)


if __name__ == "__main__":
    main()
