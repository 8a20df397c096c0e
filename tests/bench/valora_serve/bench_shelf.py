"""`make bench-shelf`: the small models of a fusion beside the bundle, all domains on every image.

It needs what `make fuse TASK=detection` leaves in `.valora/` and `bundles/detection`. More domains
than the bundle has are more heads, up to a dozen on its adapter and on each copy of it, and more
copies of the small models. The server is asked by 16 clients, and by a lone one for the latency.
Ultralytics asks its models about batches, as it does itself; the same models run in ONNX Runtime
where `onnx` and `onnxruntime` are installed. Each runs in a process of its own.
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import io
import itertools
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil
import torch
from PIL import Image

from tests.bench.valora_serve.bench_http import exchange, http
from tests.bench.valora_serve.harness import table
from tests.e2e.valora_serve.serving import Process, whole
from valora_data import shards
from valora_data.contract.base_model import base_folder
from valora_data.schema import Split
from valora_serve.engine.async_engine import start_engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.server.loading.startup import follow_bundles
from valora_serve.types import Request
from valora_train.metrics.speed import machine

WAYS = {
    "bundle": "VaLoRA, all domains at once",
    "http": "VaLoRA, all domains at once, over HTTP to 16 clients",
    "apart": "VaLoRA, one domain after the other",
    "yolo": "YOLOs, Ultralytics (PyTorch)",
    "onnx": "YOLOs, Ultralytics (ONNX Runtime)",
}
PER_ADAPTER = 12  # domains
CLIENTS = 16
HEAD = [
    "domains", "what", "images/s", "CPU of one in a batch, ms", "latency of one alone, ms",
    "memory, MB", "on disk, MB", "mean F1",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=Path("bundles/detection"))
    parser.add_argument("--work", type=Path, default=Path(".valora"))
    parser.add_argument("--domains", type=int, nargs="+", default=[1, 6, 12, 30])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto", help="of the bundle's base model")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options, options.one, options.domains[0])))
        return
    rows = []
    for count in options.domains:
        for way in options.ways:
            if way == "onnx" and not all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))):
                continue
            command = [sys.executable, "-m", "tests.bench.valora_serve.bench_shelf", *sys.argv[1:]]
            command += ["--domains", str(count), "--one", way]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            rows.append([count, WAYS[way], *json.loads(done.stdout.splitlines()[-1])])
            print(rows[-1], file=sys.stderr)
    where = f"{machine(options.device)}, torch {torch.__version__}"
    table(f"The shelf and its bundle ({where}, {date.today()})", HEAD, rows)


def measure(options, way, count):
    """The figures of a row: images/s, CPU and latency in ms, MB in memory and on disk, F1."""
    bundle = newest(options.bundle.parent, options.bundle.name)
    manifest = json.loads((bundle / "bundle.json").read_text())
    names = list(manifest["domains"])
    images = images_of(options.work, names)
    chosen = [names[n % len(names)] for n in range(count)]
    facts = [manifest["domains"][name]["accuracy"] for name in chosen]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way in ("yolo", "onnx"):
        answer, disk = shelf(options, way, chosen)
        speed = asyncio.run(timed(options, answer, images))
        f1 = statistics.mean(one["teacher"] for one in facts)
    else:
        folder, names = enlarged(options.bundle, manifest, chosen)
        run = served if way == "http" else fused
        speed = asyncio.run(run(options, folder, names, way, images))
        parts = [*folder.glob("adapters/**/*"), *folder.glob("heads/*")]
        parts += Path(base_folder(manifest["base"]["id"])).glob("*")
        disk = sum(part.stat().st_size for part in parts if part.is_file())
        f1 = statistics.mean(one["test"] for one in facts)
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    if way == "http":
        *speed, memory = speed
    return [*speed, memory, disk / 1e6, f1]


def images_of(work, names):
    """Test images of all domains, in turn."""
    tests = [shards.read(newest(work, f"data-{name}-*") / Split.TEST) for name in names]
    return [sample.image for samples in zip(*tests, strict=False) for sample in samples]


def newest(work, pattern):
    found = [path for path in work.glob(pattern) if path.is_dir() and path.suffix != ".partial"]
    if not found:
        sys.exit(f"{work} holds no {pattern}: run make fuse TASK=detection first")
    return max(found, key=lambda path: path.stat().st_mtime)


async def timed(options, answer, images):
    """Images a second in batches, their milliseconds of CPU, and those of an image alone."""
    place = 0

    async def took(size):
        nonlocal place
        batch = [images[(place + n) % len(images)] for n in range(size)]
        place += size
        started, used = time.perf_counter(), time.process_time()
        await answer(batch)
        return time.perf_counter() - started, time.process_time() - used

    found = []
    for size in (options.batch, 1):
        for _ in range(3):
            await took(size)
        seconds, end = [], time.perf_counter() + options.seconds
        while time.perf_counter() < end or len(seconds) < 3:
            seconds.append(await took(size))
        found.append([statistics.median(times) for times in zip(*seconds, strict=True)])
    (batch, used), (alone, _) = found
    return options.batch / batch, 1e3 * used / options.batch, 1e3 * alone


def shelf(options, way, chosen):
    """One small model for each domain, asked one after the other; and their bytes on disk."""
    from ultralytics import YOLO

    folder, models = Path(tempfile.mkdtemp()), []
    for name in dict.fromkeys(chosen):
        weights = next(newest(options.work, f"teach-{name}-*").glob("*.pt"))
        shutil.copyfile(weights, folder / f"{name}.pt")
        size = YOLO(weights).overrides.get("imgsz", 96)
        if way == "onnx":
            YOLO(folder / f"{name}.pt").export(format="onnx", imgsz=size, dynamic=True)
    files = [folder / f"{name}.{'onnx' if way == 'onnx' else 'pt'}" for name in chosen]
    models = [YOLO(file, task="detect") for file in files]

    async def answer(batch):
        for model in models:
            model.predict(batch, imgsz=size, batch=len(batch), device=options.device, verbose=False)

    return answer, sum(file.stat().st_size for file in files)


def enlarged(bundle, manifest, chosen):
    """A copy of a bundle with as many heads as domains are chosen, and their names."""
    folder = Path(tempfile.mkdtemp()) / "bundle"
    shutil.copytree(bundle, folder)
    domains, names = manifest["domains"], []
    for number, name in enumerate(chosen):
        names.append(name if number < len(domains) else f"{name}_{number}")
        if names[-1] != name:
            head = f"heads/{names[-1]}.safetensors"
            shutil.copyfile(folder / domains[name]["head"], folder / head)
            manifest["files"][head] = manifest["files"][domains[name]["head"]]
            adapter = copied(folder, manifest, domains[name]["adapter"], number // PER_ADAPTER)
            domains[names[-1]] = domains[name] | {"head": head, "adapter": adapter}
            manifest["adapters"][adapter]["domains"].append(names[-1])
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder, names


async def served(options, folder, names, _, images):
    """The figures of `timed` for a server, and the memory of its processes, MB."""
    forms, kind = [], "multipart/form-data; boundary=x"
    for image in images:
        file = io.BytesIO()
        image.save(file, "PNG")
        form = (
            b'--x\r\ncontent-disposition: form-data; name="domains"\r\n\r\n%b\r\n--x\r\n'
            b'content-disposition: form-data; name="image"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
        )
        forms.append(http("/v1/vision", form % (",".join(names).encode(), file.getvalue()), kind))
    turn = itertools.count()
    flags = ("--image-cache-bytes", "0", "--no-prefix-cache", "--profile", "--dtype", options.dtype)
    flags += ("--device", options.device, "--capture", "eager", "--log-level", "warning")
    with Process(folder, *flags, cwd=folder.parent, start=whole) as server:
        process = psutil.Process(server.process.pid)

        async def client(end, seconds):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            while time.perf_counter() < end:
                began = time.perf_counter()
                status, _ = await exchange(reader, writer, forms[next(turn) % len(forms)])
                assert status == 200
                seconds.append(time.perf_counter() - began)
            writer.close()

        async def rate(clients, seconds):
            took, began, used = [], time.perf_counter(), cpu(process)
            await asyncio.gather(*(client(began + seconds, took) for _ in range(clients)))
            passed = time.perf_counter() - began
            return len(took) / passed, 1e3 * (cpu(process) - used) / len(took), took

        await rate(CLIENTS, 1)
        images_s, used, _ = await rate(CLIENTS, options.seconds)
        alone = (await rate(1, options.seconds))[2]
        memory = sum(one.memory_full_info().uss for one in family(process)) / 2**20
    return images_s, used, 1e3 * statistics.median(alone), memory


def family(process):
    return [process, *process.children(recursive=True)]


def cpu(process):
    """Seconds that a process and those below it have used."""
    return sum(sum(one.cpu_times()[:2]) for one in family(process))


async def fused(options, folder, names, way, images):
    """The figures of `timed` for an engine in this process."""
    settings = EngineSettings(
        device=options.device, dtype=options.dtype, image_cache_bytes=0, prefix_cache=False,
        capture="eager",
    )  # fmt: skip
    engine, number = await start_engine(follow_bundles(settings, [folder])), 0

    async def ask(request):
        async for output in engine.generate(request):
            assert output.error is None, output.error

    def requests(image):
        nonlocal number
        number += 1
        return [
            Request(f"{number}-{name}", model=name, images=[image], stream=False) for name in names
        ]

    async def answer(batch):
        asked = [requests(image) for image in batch]
        if way == "apart":
            for domain in zip(*asked, strict=True):
                await asyncio.gather(*map(ask, domain))
        else:
            await asyncio.gather(
                *(ask(dataclasses.replace(one, also=tuple(also))) for one, *also in asked)
            )

    try:
        await engine.load("bundle", folder)
        await engine.warm_up()
        speed = await timed(options, answer, images)
    finally:
        await engine.close()
    return speed


def copied(folder, manifest, name, number):
    """The name of a copy of an adapter in a bundle, which is made if it is not there yet."""
    copy = f"{name}-{number}" if number else name
    if copy not in manifest["adapters"]:
        old, new = manifest["adapters"][name]["path"], f"adapters/{copy}"
        shutil.copytree(folder / old, folder / new)
        manifest["adapters"][copy] = manifest["adapters"][name] | {"path": new, "domains": []}
        for file in (folder / new).iterdir():
            manifest["files"][f"{new}/{file.name}"] = manifest["files"][f"{old}/{file.name}"]
    return copy


if __name__ == "__main__":
    Image.init()
    main()
