"""End-to-end measurements of the runtime on a LLaVA-1.5-7B shape with random weights.

`python -m tests.bench.valora_serve.bench_serve [SECTION …]` runs the named sections (all by
default), prints a table for each and, with `--out`, writes every figure as JSON. Random
weights cost what trained ones do. `bench_peers` measures other servers beside this engine.

Average token latency is Σ end-to-end latency over Σ (input + image + output) tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch

from tests.bench.valora_serve.harness import (
    POLICIES,
    Bench,
    found,
    metrics,
    poisson,
    skewed,
    table,
)
from tests.bench.valora_serve.pictures import SIZE
from tests.bench.valora_serve.sections.ablation import PARTS, ablation
from tests.bench.valora_serve.sections.domains import domains
from tests.bench.valora_serve.sections.multimodal import retrieval, video
from tests.bench.valora_serve.sections.packed import packed
from tests.bench.valora_serve.sections.populations import populations
from tests.bench.valora_serve.sections.slo import slo
from tests.bench.valora_serve.sections.starving import starving
from tests.bench.valora_serve.sections.switching import switching
from tests.bench.valora_serve.sections.systems import SYSTEMS, systems
from tests.bench.valora_serve.sections.tower import tower
from tests.bench.valora_serve.serve_models import (
    BASES,
    TARGETS,
    add_head,
    llava_7b,
    modules_of,
)
from valora_serve.errors import SettingsError
from valora_serve.workloads.cli import MEASURED
from valora_serve.workloads.cli import SYSTEMS as OPERATORS


def physical(bench):
    """Bandwidth and matrix rate of this machine, measured now."""
    device = bench.device
    if device.type == "cpu":
        return 1e11, 1e11
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def seconds(function):
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    bandwidth = 2 * source.numel() / seconds(lambda: target.copy_(source))
    rate = 2 * 8192**3 / seconds(lambda: x @ x)
    return bandwidth, rate


def decode_ms(bench, names, batch, active, steps=(1, 128), length=32):
    """(T128 − T1) / 127 of requests with so many input tokens."""
    times = []
    for output in steps:
        best = []
        for repeat in range(3 if output > 1 else 5):
            requests = [
                bench.request(
                    1000 * repeat + i, length, output, names[i % active] if active else None
                )
                for i in range(batch)
            ]
            best.append(bench.drive(requests)[1])
        times.append(statistics.median(best))
    return 1e3 * (times[1] - times[0]) / (steps[1] - steps[0])


def decode(bench):
    """Decode steps beside the time of reading the weights once."""
    bandwidth, rate = physical(bench)
    text = bench.model.model.language_model
    weights = bench.model.lm_head.weight.nbytes + sum(
        w.nbytes for g in bench.lmm.linears.groups.values() if g.spec.part == "text"
        for w in g.weights
    )  # fmt: skip
    weights += sum(p.nbytes for p in text.parameters() if p is not text.embed_tokens.weight)
    floor = 1e3 * weights / bandwidth
    sizes = bench.arguments.batches
    bench.start("slora")
    bench.warm([])
    bare = {n: decode_ms(bench, [], n, 0) for n in sizes}
    names = bench.start("slora", 16)
    bench.warm(names)
    idle = {n: decode_ms(bench, names, n, 0) for n in sizes}
    one = {n: decode_ms(bench, names, n, 1) for n in sizes}
    many = {n: decode_ms(bench, names, n, min(n, 16)) for n in sizes}
    merged = dict.fromkeys(sizes)
    if bench.lmm.mergeable:
        bench.start("merge_only", 16)
        merged = {n: decode_ms(bench, names, n, 1) / bare[n] for n in sizes}
    rows = []
    for n in sizes:
        rows.append([n, bare[n], bare[n] / floor, idle[n] / bare[n], merged[n], one[n],
                     many[n], many[n] / bare[n]])  # fmt: skip
    print(f"bandwidth {bandwidth / 1e12:.2f} TB/s, matrix rate {rate / 1e12:.0f} TFLOP/s, "
          f"weights {weights / 1e9:.2f} GB: {floor:.2f} ms")  # fmt: skip
    table(f"Decode step, ms (rank 64 on {bench.adapted})",
          ["batch", "bare", "of reading the weights", "idle LoRA / bare", "merged / bare",
           "1 adapter", "16 adapters", "16 / bare"],
          rows)  # fmt: skip


def backends(bench):
    """Decode steps and prefill by attention backend, each beside the first one's."""
    lengths, rows, first = (32, 2048), [], {}
    for backend in bench.arguments.backends:
        try:
            names = bench.start("slora", 16, attention=backend)
        except SettingsError as error:
            print(f"{backend}: {error}", flush=True)
            continue
        bench.warm(names)
        for n, length in product(bench.arguments.batches, lengths):
            bare = decode_ms(bench, names, n, 0, length=length)
            many = decode_ms(bench, names, n, min(n, 16), length=length)
            base = first.setdefault((n, length), (bare, many))
            rows.append([backend, f"{n} × {length}", bare, base[0] / bare, many, base[1] / many])
            print(rows[-1], flush=True)
        for count, length in ((1, 256), (1, 2048), (4, 1024)):
            requests = [bench.request(i, length, 1, names[i]) for i in range(count)]
            ms = 1e3 * min(bench.drive(requests)[1] for _ in range(4))
            base = first.setdefault(("prefill", count, length), ms)
            rows.append([backend, f"prefill {count} × {length}", None, None, ms, base / ms])
    table(f"Attention backends: a decode step, ms (rank 64 on {bench.adapted})",
          ["backend", "requests × input tokens", "no adapter", "speed of the first",
           "16 adapters", "speed of the first"], rows)  # fmt: skip


def prefill(bench):
    """Prompt tokens a second as a share of the matrix rate."""
    _, rate = physical(bench)
    weights = sum(w.numel() for g in bench.lmm.linears.groups.values()
                  if g.spec.part == "text" for w in g.weights)  # fmt: skip
    rows = []
    for adapters in (16, 0):  # an engine with 16 may be there already
        names = bench.start("slora", adapters)
        bench.warm(names)
        for count, length in ((1, 256), (1, 1024), (4, 1024), (8, 1024), (16, 512)):
            times = []
            for repeat in range(4):
                requests = [
                    bench.request(100 * repeat + i, length, 1, names[i] if names else None)
                    for i in range(count)
                ]
                times.append(bench.drive(requests)[1])
            seconds = min(times)
            flops = 2 * weights * count * length
            flops += 2 * 2 * bench.lmm.layers * bench.lmm.width * count * length * length / 2
            rows.append([adapters, f"{count} × {length}", 1e3 * seconds,
                         count * length / seconds, flops / seconds / rate])  # fmt: skip
    rows.sort(key=lambda row: row[0])
    table(
        f"Prefill (rank 64 on {bench.adapted})",
        ["adapters", "prompts", "ms", "tokens/s", "of the matrix rate"],
        rows,
    )


def throughput(bench):
    """S-LoRA's Table 3 workload: 400 requests at once, lengths uniform in [8, 512] both ways."""
    g = np.random.default_rng(0)
    inputs, outputs = g.integers(8, 513, 400), g.integers(8, 513, 400)
    count = bench.arguments.requests
    rows = []
    cases = [("no LoRA", 0, (8,)), ("S1 n=5", 5, (8,)), ("S1 n=100", 100, (8,)),
             ("S2 n=5", 5, (64, 32, 16, 8)), ("S2 n=100", 100, (64, 32, 16, 8))]  # fmt: skip
    for name, n, ranks in cases:
        names = bench.start(bench.arguments.policy, n, ranks)
        bench.warm(names)
        chosen = np.random.default_rng(1).integers(0, max(n, 1), 400)
        requests = [
            bench.request(i, int(inputs[i]), int(outputs[i]), names[chosen[i]] if n else None)
            for i in range(count)
        ]
        bench.drive(requests[:128])
        done, wall = bench.drive(requests)
        m = metrics(done, wall)
        rows.append([name, m["requests"], m["output"]])
    table(f"Throughput, 400 requests at once (on {bench.adapted})",
          ["adapters", "requests/s", "output tokens/s"], rows)  # fmt: skip


def skew(bench):
    """Average token latency by skewness and policy: VaLoRA's visual retrieval (256 in, 200 out)."""
    policies, shares = bench.arguments.policies, bench.arguments.shares
    found_here = {}
    for policy in policies:
        options = {"decision_trace": bench.trace(policy)} if bench.arguments.traces else {}
        names = bench.start(policy, 16, **options)
        bench.warm(names)
        for rate, share in product(bench.arguments.rate, shares):
            times = poisson(rate, bench.arguments.seconds, 5)
            chosen = skewed(len(times), 16, share, 6)
            requests = [bench.request(i, 256, 200, names[chosen[i]]) for i in range(len(times))]
            before = bench.engine.stats().switches
            m = metrics(*bench.drive(requests, times), bench.arguments.slo)
            found_here[policy, rate, share] = m
            print(policy, rate, share, {k: round(v, 3) for k, v in m.items()},
                  "switches", bench.engine.stats().switches - before, flush=True)  # fmt: skip
    for name, key in (("Average token latency, ms", "atl"), ("SLO attainment", "slo")):
        table(f"{name}, by share of one adapter",
              ["requests/s", "policy", *(f"{s:.0%}" for s in shares)],
              [[f"{rate:g}", p, *(found_here[p, rate, s][key] for s in shares)]
               for rate, p in product(bench.arguments.rate, policies)])  # fmt: skip


def adapters(bench):
    """Throughput by number of adapters, uniformly popular (S-LoRA's α = 1), from host memory.

    At most 512 of them lie on the device: as many as there are requests in a step.
    """
    rows = []
    total, rate = bench.arguments.requests, bench.arguments.rate[0]
    times = poisson(rate, bench.arguments.seconds, 9)
    alike = np.random.default_rng(7)  # the same lengths whatever the number
    lengths = alike.integers(8, 513, (max(total, len(times)), 2))
    for n in bench.arguments.counts:
        names = bench.start("slora", n, (8,), slots=512, max_adapters=512)
        bench.warm(names[:64])
        chosen = np.random.default_rng(8).integers(0, n, len(lengths))
        requests = [
            bench.request(i, *map(int, lengths[i]), names[chosen[i]]) for i in range(len(lengths))
        ]
        bench.drive([replace(r, model=names[i % 5]) for i, r in enumerate(requests[:128])])
        burst = metrics(*bench.drive(requests[:total]))
        steady = metrics(*bench.drive(requests[: len(times)], times))
        first = rows[0][2] if rows else burst["requests"]
        distinct = len(set(chosen[:total].tolist()))
        rows.append([n, distinct, burst["requests"], burst["requests"] / first,
                     burst["ttft"], steady["requests"], steady["atl"], steady["ttft"]])  # fmt: skip
        print(rows[-1], flush=True)
    table(f"Throughput by number of adapters (rank 8): {total} at once, and {rate:g} a second",
          ["adapters", "of them asked for", "requests/s at once", "of the first", "mean TTFT, ms",
           "requests/s", "average token latency, ms", "mean TTFT, ms"], rows)  # fmt: skip


def switch(bench):
    """A mode switch with running requests, from decision to the weights being there."""
    names = bench.start("valora", 16)
    bench.warm(names)
    engine = bench.engine
    for i in range(32):
        engine.add(engine.prepare(bench.request(i, 64, 400, names[i % 4])))
    for _ in range(12):
        engine.step()
    resident = sorted(engine.adapters.resident)
    rows = []
    for label, source, target in (
        ("pristine → merged", None, resident[0]),
        ("merged → other merged", resident[0], resident[1]),
        ("merged → pristine", resident[1], None),
    ):
        times = []
        for _ in range(20):
            for _ in range(2):
                engine.step()  # the policy may switch by itself in these
            engine.merge_state.switch(engine.merge_state.mode, source)
            bench.synchronize()
            start = time.perf_counter()
            engine.merge_state.switch(engine.merge_state.mode, target)
            bench.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        rows.append([label, statistics.median(times), max(times)])
    table("Mode switch with 32 running requests, ms", ["switch", "median", "most"], rows)
    for i in range(32):
        engine.cancel(str(i))
    while engine.busy:
        engine.step()


def kernels(bench):
    """Profile the kernels of a decode step."""
    from torch.profiler import ProfilerActivity, profile

    names = bench.start("slora", 16)
    bench.warm(names)
    rows = []
    for batch, active in ((1, 0), (32, 0), (32, 16)):
        for i in range(batch):
            name = names[i % active] if active else None
            bench.engine.add(bench.engine.prepare(bench.request(i, 64, 300, name)))
        for _ in range(20):
            bench.engine.step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            bench.engine.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / 50
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(5):
                bench.engine.step()
            torch.cuda.synchronize()
        events = sorted(seen.key_averages(), key=lambda e: -e.device_time_total)
        busy = sum(e.device_time_total for e in events) / 5e3
        rows.append([batch, active, "step, wall clock", None, 1e3 * wall])
        rows.append([batch, active, "kernels together", None, busy])
        for e in events[:16]:
            rows.append([batch, active, e.key[:60], e.count / 5, e.device_time_total / 5e3])
        for i in range(batch):
            bench.engine.cancel(str(i))
        while bench.engine.busy:
            bench.engine.step()
    table("A decode step by kernel", ["batch", "adapters", "kernel", "times", "ms"], rows)


def merging(bench):
    """S-LoRA's Figure 9: merged weights, one adapter after the other, beside unmerged batches."""
    count, length, rows = 128, 256, []
    names = bench.start("slora", 5, max_requests=count)
    bench.warm(names)
    for adapters, policy in product((1, 2, 5), ("merge_only", "unmerge_only", "cost")):
        bench.policy(policy)
        asked = [bench.request(i, length, 64, names[i % adapters]) for i in range(count)]
        m = metrics(*bench.drive(asked))
        rows.append([adapters, policy, m["requests"], m["ttft"]])
        print(rows[-1], flush=True)
    table(f"Merged and unmerged, {count} requests at once (rank 64 on {bench.adapted})",
          ["adapters", "policy", "requests/s", "mean TTFT, ms"], rows)  # fmt: skip


def heads(bench):
    """An answer by a head, beside the first token and the whole answer of the same prompt."""
    names = bench.start("slora", 16)
    bench.warm(names)
    labels = tuple(f"action {i}" for i in range(101))
    add_head(bench.engine, "actions", names[1], labels)
    rows = []
    for rate in (None, 2, 6):
        times = None if rate is None else poisson(rate, bench.arguments.seconds, 8)
        count = 12 if times is None else len(times)
        latency = {}
        cases = (("head", "actions", 0), ("first token", names[1], 1),
                 ("5 tokens", names[1], 5), ("10 tokens", names[1], 10))  # fmt: skip
        for label, name, output in cases:
            requests = [bench.request(50 * i, 6 * 256, max(output, 1), name) for i in range(count)]
            requests = [replace(r, id=str(i)) for i, r in enumerate(requests)]
            if times is None:  # one after the other
                done = [bench.drive([request])[0][0] for request in requests]
            else:
                done = bench.drive(requests, times)[0]
            latency[label] = 1e3 * statistics.median(
                o.times.finished - o.times.arrival for o in done
            )
        rows.append(["one at a time" if rate is None else f"{rate}/s", *latency.values(),
                     latency["head"] / latency["first token"],
                     1 - latency["head"] / latency["5 tokens"],
                     1 - latency["head"] / latency["10 tokens"]])  # fmt: skip
    table("Video understanding, 6 × 256 input tokens: median latency, ms",
          ["requests", "head", "first token", "LM head, 5 tokens", "LM head, 10 tokens",
           "head / first token", "saved of 5", "saved of 10"], rows)  # fmt: skip


def peft(bench):
    """PEFT's mixed batches in transformers' generate, on the same requests."""
    from peft import LoraConfig, get_peft_model

    arguments = bench.arguments
    g = np.random.default_rng(0)
    count = min(arguments.requests, 64)
    inputs, outputs = g.integers(8, 513, count), g.integers(8, 513, count)
    rows = []
    for n in (5, 100):
        names = bench.start("slora", n, (8,))
        bench.warm(names)
        chosen = np.random.default_rng(1).integers(0, n, count)
        requests = [
            bench.request(i, int(inputs[i]), int(outputs[i]), names[chosen[i]])
            for i in range(count)
        ]
        ours = bench.drive(requests)[1]
        bench.stop()
        model = llava_7b(bench.device, arguments.layers or 32, arguments.width or 4096)
        config = LoraConfig(
            r=8, lora_alpha=8, target_modules=modules_of(bench.lmm.targets, bench.targets)[0]
        )
        wrapped = get_peft_model(model, config, adapter_name="a0")
        for i in range(1, n):
            wrapped.add_adapter(f"a{i}", config)
        wrapped.to(bench.device, bench.lmm.dtype).eval()
        batch = min(32, count)
        ids = torch.full((batch, int(inputs[:batch].max())), 2, device=bench.device)
        mask = torch.zeros_like(ids)
        for row in range(batch):
            prompt = torch.tensor(requests[row].token_ids, device=bench.device)
            ids[row, -len(prompt) :] = prompt
            mask[row, -len(prompt) :] = 1
        given = {
            "input_ids": ids, "attention_mask": mask, "do_sample": False,
            "adapter_names": [f"a{c}" for c in chosen[:batch]],
        }  # fmt: skip
        warm, first, step = peft_times(bench, wrapped, given)
        # A static batch goes on to its longest answer.
        seconds = first + step * (int(outputs[:batch].max()) - 1)
        theirs = batch / seconds
        rows.append([n, count / ours, warm, first, 1e3 * step, theirs, count / ours / theirs])
        del model, wrapped
        gc.collect()
    table("PEFT and transformers, batches of 32",
          ["adapters", "ours, requests/s", "PEFT: first call of 2 tokens, s", "prefill, s",
           "decode step, ms", "requests/s", "ours / PEFT"], rows)  # fmt: skip


def peft_times(bench, wrapped, given):
    """Seconds of PEFT's first call, of a warm prefill with its first token, and of a decode step.

    The first call, of two tokens, compiles and allocates; it counts in no rate.
    """

    def seconds(tokens):
        start = time.monotonic()
        with torch.inference_mode():
            wrapped.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens)
        bench.synchronize()
        return time.monotonic() - start

    steps = bench.arguments.peft_steps
    warm = seconds(2)
    first = statistics.median(seconds(1) for _ in range(3))
    return warm, first, (seconds(1 + steps) - first) / steps


def startup(bench):
    """Seconds of a start with 100 adapters by phase, and until the first token; weights are there.

    Drawing random adapters is not counted. The first line is a cold start if the caches of torch,
    Triton and FlashInfer are empty.
    """
    rows = []
    for capture in bench.arguments.captures:
        bench.stop()
        names = bench.start(bench.arguments.policy, 100, (16,), capture=capture)
        ready = bench.ready
        first = bench.drive([bench.request(0, 256, 1, names[0])])[1]
        start_up = bench.engine.start_up
        left = len(start_up.left)
        waited = ", ".join(f"{name} {spent:.1f}" for name, spent in start_up.seconds.items())
        print(f"{capture}: ready after {ready:.1f} s ({waited})", flush=True)
        began = time.monotonic()
        while bench.engine.prepare_next() or bench.engine.runner.provisional:
            if not start_up.left:  # attention is still being compiled
                time.sleep(0.1)
        bench.synchronize()
        rest = time.monotonic() - began
        print(f"{capture}: all prepared, and attention compiled, {rest:.1f} s later", flush=True)
        phases = ", ".join(f"{name} {spent:.1f}" for name, spent in start_up.seconds.items())
        rows.append([capture, ready, 1e3 * first, left, rest, phases])
    table("Start with 100 adapters of rank 16, s",
          ["capture", "ready after", "first request, ms", "left for later", "which took",
           "phases, in the end"], rows)  # fmt: skip


def costs(bench):
    """Measure the costs of each operator, and write them where `valora-sim` has an H200's."""
    if bench.device.type == "cpu":
        raise SystemExit("costs: those that ship are an H200's, and this is a CPU: name a GPU")
    for name in ("ours", "dlora", "slora", "punica"):
        with tempfile.TemporaryDirectory() as folder:
            bench.lmm.linears.by_matrix = name == "dlora"
            bench.start("valora", 16, profile=True, cost_folder=folder, **SYSTEMS[name][0])
            file = bench.engine.cost.save(Path(folder))
            print(shutil.copy(file, MEASURED / f"{OPERATORS[name][1]}.json"), flush=True)
    bench.lmm.linears.by_matrix = False


SECTIONS = {
    f.__name__: f
    for f in (
        costs,
        startup,
        decode,
        backends,
        kernels,
        prefill,
        throughput,
        skew,
        adapters,
        switch,
        heads,
        domains,
        merging,
        peft,
        ablation,
        switching,
        starving,
        populations,
        packed,
        slo,
        retrieval,
        video,
        tower,
        systems,
    )
}


def options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--base", default="llava-7b", choices=BASES, help="shape of the model")
    parser.add_argument("--layers", type=int, help="of another number of layers")
    parser.add_argument("--width", type=int, help="of another width")
    parser.add_argument("--vision", action=argparse.BooleanOptionalAction, default=True,
                        help="a whole vision tower, or two layers of it")  # fmt: skip
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--quantize", default="none", choices=("none", "fp8", "nf4_packed"))
    parser.add_argument("--backends", nargs="+", default=["flashinfer", "triton"],
                        help="attention backends of `backends`")  # fmt: skip
    parser.add_argument("--targets", default="attention", choices=TARGETS,
                        help="linears that adapters change")  # fmt: skip
    parser.add_argument("--captures", nargs="+", default=["lazy", "eager"],
                        choices=("lazy", "eager"), help="of `startup`")  # fmt: skip
    parser.add_argument("--prompt-graphs", action=argparse.BooleanOptionalAction, default=True,
                        help="capture steps with prompts, too")  # fmt: skip
    parser.add_argument("--costs", default="/tmp/valora-costs")
    parser.add_argument("--policy", default="cost", help="of the throughput section")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", nargs="+", type=float, default=[10, 32],
                        help="of `skew`; the first of `adapters`, too")  # fmt: skip
    parser.add_argument("--shares", nargs="+", type=float, default=[0.2, 0.4, 0.6, 0.8, 0.9])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--slo", type=float, default=6.0, help="seconds to the first token")
    parser.add_argument("--counts", nargs="+", type=int, default=[5, 100, 2000])
    parser.add_argument("--peft-steps", type=int, default=48, help="decode steps that are timed")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS,
                        help="what `ablation` takes away, one at a time")  # fmt: skip
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--window", type=float, default=5,
                        help="seconds of arrivals, from `ablation` on")  # fmt: skip
    parser.add_argument("--answer", type=int, default=64,
                        help="output tokens, from `ablation` on")  # fmt: skip
    parser.add_argument("--overload", nargs="+", type=float, default=[16, 32, 48, 64],
                        help="requests a second of `slo`")  # fmt: skip
    parser.add_argument("--limit", type=float, default=1.5,
                        help="seconds to the first token of `slo`")  # fmt: skip
    parser.add_argument("--picture-rates", nargs="+", type=float, default=[4, 10],
                        help="requests a second of `retrieval`")  # fmt: skip
    parser.add_argument("--frames", type=int, default=6, help="frames of a second of `video`")
    parser.add_argument("--frame-size", nargs=2, type=int, default=SIZE,
                        help="width and height of these frames, in pixels")  # fmt: skip
    parser.add_argument("--label-tokens", type=int, default=5,
                        help="of a class's name, which the LM head writes in `video`")  # fmt: skip
    parser.add_argument("--video-policies", nargs="+", default=["cost"])
    parser.add_argument("--most-streams", type=int, default=128)
    parser.add_argument("--beside-peft", action=argparse.BooleanOptionalAction, default=True,
                        help="measure PEFT in `retrieval` and `video`, too")  # fmt: skip
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", action="store_true", help="keep the decisions of `skew`")
    return parser


def main(given=None):
    """Run the sections."""
    arguments = options().parse_args(given)
    bench = Bench(arguments)
    for name in arguments.sections or SECTIONS:
        start = time.monotonic()
        SECTIONS[name](bench)
        print(f"[{name}: {time.monotonic() - start:.0f} s]", flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(found, indent=1))
    bench.stop()


if __name__ == "__main__":
    main()
