"""Replicas behind fronts: throughput by number, affinity against random, kills, cost of a front.

    python -m tests.bench.valora_serve.bench_replicas throughput affinity kill front

needs two GPUs (``--counts 1 2 4``: four) and prints a table for each. Throughput and recovery are
measured with 16 adapters, the routers with 200, where ``--affinity-layers`` of ``--base llava-7b``
are enough: loads and steps grow alike with them. Part ``front`` needs no GPU: its replicas answer
at once. Clients are processes of their own, as many as ``--senders`` says. With ``--tiny`` it runs
on the CPU with the tiny base model and few requests: it then shows that it works, and no more.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import pickle
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
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
from tests.bench.valora_serve.split_models import save_base
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
        senders: Processes of clients.
    """

    base: str
    adapters: int
    rank: int
    slots: int
    clients: int
    seconds: float
    tokens: int
    options: tuple[str, ...] = ()
    senders: int = 4


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
            "--adapter-folder", str(store), "--state-file", str(folder / f"{store.name}.json"),
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
        models = self._client.get("/v1/models").raise_for_status().json()["data"]
        known = {one["id"] for one in models}  # an earlier server's, from the state file
        for adapter in sorted(one for one in store.iterdir() if one.name not in known):
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

    def workers(self, of="ServeReplica"):
        """Processes of the replicas, the board (``ray::Board``) or the fronts."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [one] if of in " ".join(one.cmdline()[:3]) else []
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


@dataclass
class Answer:
    """An answered request: when it ended, seconds to its first token, status."""

    ended: float
    first: float
    status: int


def load(url, shape, seconds, *, seed=0, stream=True):
    """Keep `shape.clients` requests in progress, whose adapters are drawn uniformly."""
    count = shape.senders
    shares = [shape.clients // count + (n < shape.clients % count) for n in range(count)]
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        sent = [
            pool.submit(_load, url, replace(shape, clients=share), seconds, 1000 * seed + n, stream)
            for n, share in enumerate(shares)
        ]
        return [answer for one in sent for answer in one.result()]


def _load(*arguments):
    return asyncio.run(_ask(*arguments))


async def _ask(url, shape, seconds, seed, stream):
    generator = random.Random(seed)
    answers, end = [], time.monotonic() + seconds

    async def ask():
        # A pool of httpx looks through all its connections for every request: with one for all,
        # 128 clients were slower than two replicas.
        async with httpx.AsyncClient(
            base_url=url, headers=HEADERS, timeout=600, verify=False
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
    """Send a request, and read its answer to the end; a connection that is lost has status 0."""
    began, first, text, status = time.monotonic(), None, "", 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            status = answer.status_code
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        status = 599
                        break
                    for choice in piece["choices"]:
                        text += choice["delta"].get("content") or ""
                    first = first or (time.monotonic() - began if text else None)
    except httpx.TransportError:
        status = 0
        await asyncio.sleep(0.1)
    now = time.monotonic()
    return Answer(now, first or now - began, status)


def percentile(values, share):
    """The value below which a share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def table(title, *columns):
    """An empty table with machine and date."""
    where = f"{platform.processor() or platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    made = Table(title=f"{title} ({where}, {time.strftime('%Y-%m-%d')})", title_justify="left")
    for column in columns:
        made.add_column(column, justify="right")
    return made


def throughput(shape, folder, store, console, counts):
    """Requests per second at saturation by the number of replicas, and where the CPU time went."""
    made = table(
        "Throughput at saturation", "replicas", "requests/s", "x one", "CPU of fronts, ms/request",
        "CPU of the server's process, ms/request", "not answered",
    )  # fmt: skip
    alone = None
    for count in counts:
        busy = replace(shape, clients=shape.clients * count)
        with Server(busy, folder, store, "--replicas", str(count)) as server:
            load(server.url, busy, shape.seconds / 2, stream=False)  # warm
            fronts, own = server.workers("replicas.front"), psutil.Process(server.process.pid)
            before = cpu(fronts), cpu([own])
            answers = load(server.url, busy, shape.seconds, seed=1, stream=False)
            spent = cpu(fronts) - before[0], cpu([own]) - before[1]
        good = [answer for answer in answers if answer.status == 200]
        # The start of the senders' processes is no part of it.
        first, last = min(a.ended - a.first for a in good), max(a.ended for a in good)
        rate = len(good) / (last - first)
        alone = alone or rate
        each = [f"{1000 * seconds / len(answers):.2f}" for seconds in spent]
        made.add_row(
            str(count), f"{rate:.2f}", f"{rate / alone:.2f}", *each, str(len(answers) - len(good))
        )
    console.print(made)


def cpu(processes):
    """CPU seconds of processes."""
    times = [one.cpu_times() for one in processes]
    return sum(one.user + one.system for one in times)


def affinity(shape, folder, store, console):
    """Time to first token and adapter loads of two replicas, by router."""
    made = table(
        f"{shape.adapters} adapters of rank {shape.rank}, {shape.slots} slots a replica",
        "router", "requests/s", "TTFT p50, s", "TTFT p99, s", "adapter loads for 100 requests",
    )  # fmt: skip
    for router in ("affinity", "random"):
        options = ("--replicas", "2", "--router", router)
        with Server(shape, folder, store, *options) as server:
            load(server.url, shape, shape.seconds / 2)
            before = sum(server.metrics("adapter_loads_total").values())
            answers = load(server.url, shape, shape.seconds, seed=1)
            time.sleep(1.5)  # reports of the replicas
            loads = sum(server.metrics("adapter_loads_total").values()) - before
        first = [answer.first for answer in answers]
        made.add_row(
            router, f"{len(answers) / shape.seconds:.2f}", f"{statistics.median(first):.3f}",
            f"{percentile(first, 0.99):.3f}", f"{100 * loads / len(answers):.1f}",
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


VICTIMS = {"replica": "ServeReplica", "front": "replicas.front", "board": "ray::Board"}


def kill(shape, folder, store, console):
    """What `kill -9` of a process does to requests, and when the throughput is back."""
    made = table(
        "kill -9 with two replicas", "killed", "requests", "answered", "clear errors",
        "connections lost", "others", "throughput back after, s",
    )  # fmt: skip
    with Server(shape, folder, store, "--replicas", "2") as server:
        before = load(server.url, shape, shape.seconds)
        usual = len(before) / shape.seconds
        for what, name in VICTIMS.items():
            seconds = max(60.0, 3 * shape.seconds)  # 30 to come back in
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                loading = pool.submit(load, server.url, shape, seconds, seed=1)
                while not sum(server.metrics("num_requests_running").values()):
                    time.sleep(0.2)
                time.sleep(shape.seconds / 4)
                server.workers(name)[0].send_signal(signal.SIGKILL)
                killed = time.monotonic()
                answers = loading.result()
            count = [
                sum(answer.status in statuses for answer in answers)
                for statuses in ((200,), (503, 599), (0,))
            ]
            ended = [a.ended - killed for a in answers if a.status == 200]
            made.add_row(
                what, str(len(answers)), *map(str, count), str(len(answers) - sum(count)),
                f"{recovery(ended, usual, shape.seconds):.1f}",
            )  # fmt: skip
            while len(server.metrics("num_requests_running")) < 2:
                time.sleep(0.5)
    console.print(made)


class _AtOnce(asyncio.Protocol):
    """HTTP that answers every request with the same few bytes."""

    body = json.dumps({"choices": [{"message": {"content": "x" * 200}}]}).encode()
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

    def connection_made(self, transport):
        self.transport, self.buffer = transport, b""

    def data_received(self, data):
        self.buffer += data
        head, end, rest = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(rest) >= int(length or 0):
            self.buffer = rest[int(length or 0) :]
            self.transport.write(self.answer % len(self.body) + self.body)


def at_once(port):
    """A process that stands for a replica."""

    async def serve():
        made = await asyncio.get_running_loop().create_server(_AtOnce, "127.0.0.1", port)
        await made.serve_forever()

    asyncio.run(serve())


def send(port, clients, seconds):
    """Requests that some clients have had answered over connections that stay, and their times."""
    body = json.dumps({
        "model": "a000", "messages": [{"role": "user", "content": "what is this? " * 40}],
    }).encode()  # fmt: skip
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    sent = f"{head}application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def ask(end, times):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (began := time.monotonic()) < end:
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(len(_AtOnce.body))
            times.append(time.monotonic() - began)
        writer.close()

    async def all_of_them():
        times, end = [], time.monotonic() + seconds
        await asyncio.gather(*(ask(end, times) for _ in range(clients)))
        return times

    return asyncio.run(all_of_them())


def front(console, file, seconds, counts, senders, clients):
    """CPU time of a front for each request, and requests a second, with replicas of no cost."""
    from tests.support.replicas import report
    from valora_serve.replicas import cluster
    from valora_serve.replicas.settings import ReplicaSettings
    from valora_serve.server.listen import bind
    from valora_serve.server.settings import ServerSettings

    made = table(
        "Fronts before four replicas that answer at once", "fronts", "senders", "requests/s",
        "CPU of fronts, ms/request", "p50, ms", "p99, ms", "all cores busy, %",
    )  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    ports = range(8810, 8814)
    replicas = [spawn.Process(target=at_once, args=(port,), daemon=True) for port in ports]
    for one in replicas:
        one.start()
    known = [report(f"r{port}", f"http://127.0.0.1:{port}") for port in ports]
    settings = ServerSettings(port=0, log_level="warning")

    file.write_bytes(pickle.dumps(known))

    async def case(count):
        sockets, started = bind(settings), asyncio.Event()
        port = sockets[0].getsockname()[1]
        plan, tell = (file, settings, ReplicaSettings(replicas=4), 32), lambda: asyncio.sleep(0)
        task = asyncio.create_task(cluster.keep_fronts(count, sockets, plan, tell, started.set))
        await started.wait()
        loop = asyncio.get_running_loop()
        with ProcessPoolExecutor(senders, spawn) as pool:
            for length in (seconds / 4, seconds):
                below = psutil.Process().children()
                processes = [one for one in below if cluster.FRONT[-1] in one.cmdline()]
                before = cpu(processes)
                psutil.cpu_percent()
                told = await asyncio.gather(*(
                    loop.run_in_executor(pool, send, port, clients // senders, length)
                    for _ in range(senders)
                ))  # fmt: skip
                busy, spent = psutil.cpu_percent(), cpu(processes) - before
        os.kill(os.getpid(), signal.SIGTERM)
        await task
        times = [one for some in told for one in some]
        made.add_row(
            str(count), str(senders), f"{len(times) / seconds:.0f}",
            f"{1000 * spent / len(times):.2f}", f"{1000 * statistics.median(times):.1f}",
            f"{1000 * percentile(times, 0.99):.1f}", f"{busy:.0f}",
        )  # fmt: skip

    for count in counts:
        asyncio.run(case(count))
    for one in replicas:
        one.terminate()
    console.print(made)


def main():
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=["throughput", "affinity", "kill", "front"])
    parser.add_argument("--tiny", action="store_true", help="a small run on the CPU")
    parser.add_argument("--base", help="base model: a folder or hub name; llava-7b: that shape")
    parser.add_argument("--affinity-layers", type=int, default=32, help="of llava-7b")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--clients", type=int, default=64, help="requests in progress")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2], help="replicas")
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2, 4], help="of part front")
    parser.add_argument("--senders", type=int, default=TINY.senders, help="processes of clients")
    found = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server, too
    if {*found.parts} != {"front"} and not found.tiny and not found.base:
        parser.error("name --base, or use --tiny")
    few = many = replace(TINY, senders=found.senders)
    if not found.tiny:
        few = replace(
            few, base=found.base, adapters=16, rank=64, slots=32, clients=found.clients,
            seconds=found.seconds, tokens=128, options=(),
        )  # fmt: skip
        many = replace(few, adapters=200, clients=2 * found.clients, tokens=32)
    console = Console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if found.base == "llava-7b":
            wanted = {found.affinity_layers if one == "affinity" else 32 for one in found.parts}
            bases = {
                count: str(save_base(folder / f"base-{count}", "cuda:0", count, 4096))
                for count in wanted
            }
            torch.cuda.empty_cache()
            few = replace(few, base=bases.get(32, few.base))
            many = replace(many, base=bases.get(found.affinity_layers, many.base))
        if {"throughput", "kill"} & {*found.parts}:
            store = save_adapters(few, folder / "few")
            if "throughput" in found.parts:
                throughput(few, folder, store, console, found.counts)
            if "kill" in found.parts:
                kill(few, folder, store, console)
        if "front" in found.parts:
            seconds = 4.0 if found.tiny else min(found.seconds, 20.0)
            front(console, folder / "known", seconds, found.fronts, found.senders, found.clients)
        if "affinity" in found.parts:
            affinity(many, folder, save_adapters(many, folder / "many"), console)


if __name__ == "__main__":
    main()
