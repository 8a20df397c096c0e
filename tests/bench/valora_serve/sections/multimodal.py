"""VaLoRA's workloads with pictures through the vision tower (§6, Figures 14 and 16)."""

from __future__ import annotations

from itertools import product

import numpy as np

from tests.bench.valora_serve.harness import FEW, metrics, skewed, table
from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.sections.peft_batches import PeftBatches
from tests.bench.valora_serve.serve_models import add_head

ADAPTERS = 16
LIMIT = 1.0
"""Seconds in which a chunk of a second of video must be answered to keep up."""
ENOUGH = 0.95
"""Share of the chunks that must be."""


def bursty(rate, seconds, cv, seed):
    """Arrivals with Gamma gaps of a coefficient of variation, as in Azure's traces of inference."""
    gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / rate, int(4 * rate * seconds) + 32)
    times = np.cumsum(gaps)
    return times[times < seconds]


def questions(bench, pictures, names, rate, share=0.6):
    """Questions about new pictures, most to one adapter, and the seconds at which they arrive."""
    times = bursty(rate, bench.arguments.window, 2.0, 3)
    chosen = skewed(len(times), ADAPTERS, share, 4)
    asked = [
        pictures.prepared(i, names[chosen[i]], [i], words=32, output=bench.arguments.answer)
        for i in range(len(times))
    ]
    return asked, times


def retrieval(bench):
    """Visual retrieval: a question about a new picture, answered by the LM head."""
    arguments = bench.arguments
    names = bench.start("cost", ADAPTERS, **FEW)
    bench.warm(names)
    pictures = Pictures.of(bench)
    rates = arguments.picture_rates
    rows, workloads = [], {rate: questions(bench, pictures, names, rate) for rate in rates}
    for policy, (rate, (asked, times)) in product(arguments.policies, workloads.items()):
        if not rows:
            bench.drive(asked[:8])
        bench.policy(policy)
        m = metrics(*bench.drive(asked, times), arguments.slo)
        rows.append([policy, rate, m["atl"], m["ttft"], m["between"], m["p99"]])
        print(rows[-1], flush=True)
    if arguments.beside_peft:
        bench.stop()
        rows += _retrieval_by_peft(PeftBatches(bench, names), workloads)
    table(f"Visual retrieval, {bench.base}: a new picture of 640 × 480 each, 60 % on one adapter",
          ["policy, or PEFT", "requests/s", "average token latency, ms", "mean TTFT, ms",
           "mean inter-token, ms", "p99 latency, ms"], rows)  # fmt: skip


def _retrieval_by_peft(peft, workloads):
    """Rows of the table of `retrieval` for PEFT's batches."""
    rows = []
    for rate, (asked, times) in workloads.items():
        if not rows:
            peft.answer(asked[:2], 2)
        latency = list(peft.drive(asked, times).values())
        tokens = sum(len(one.prompt.ids) + one.request.sampling.max_tokens for one in asked)
        worst = 1e3 * float(np.quantile(latency, 0.99))
        rows.append(["PEFT", rate, 1e3 * sum(latency) / tokens, None, None, worst])
        print(rows[-1], flush=True)
    peft.close()
    return rows


def chunks(bench, pictures, targets, streams):
    """Chunks of so many streams, and the seconds at which they arrive."""
    arguments = bench.arguments
    times, asked = [], []
    for second, stream in product(range(round(arguments.window)), range(streams)):
        number = len(asked)
        which = [number * arguments.frames + i for i in range(arguments.frames)]
        name = targets[stream % len(targets)]
        asked.append(
            pictures.prepared(number, name, which, words=16, output=arguments.label_tokens)
        )
        times.append(second + stream / streams)
    return asked, times


def _most(keeps_up, most):
    """Most streams that keep up, up to `most`, within an eighth."""
    low, high = 0, 1
    while high <= most and keeps_up(high):
        low, high = high, min(2 * high, most + 1)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def _in_real_time(bench, pictures, targets, lasts):
    """Streams that are answered in real time, and the median latency of their chunks in ms.

    Args:
        bench: The bench.
        pictures: Frames of the streams.
        targets: Models that the streams ask, in turn.
        lasts: Answers chunks that arrive at some seconds, and returns the seconds that each took.
    """
    medians = {0: None}

    def keeps_up(streams):
        asked, times = chunks(bench, pictures, targets, streams)
        latency = lasts(asked, times)
        share = sum(seconds <= LIMIT for seconds in latency) / len(asked)
        medians[streams] = 1e3 * float(np.median(latency)) if latency else None
        print(targets[0], streams, share, medians[streams], flush=True)
        return share >= ENOUGH

    most = _most(keeps_up, bench.arguments.most_streams)
    return most, medians[most]


def video(bench):
    """Video analytics: how many streams of 30 frames a second one GPU answers in real time.

    Each second, a stream sends a chunk of `--frames` of its 30 frames. In real time means that 95 %
    of the chunks are answered within a second. Answers are a class, by a head or as the LM head's
    tokens. VaLoRA's requests (§6.3) have 6 frames of 256 tokens, and answers of 5 to 10: `--base
    qwen2.5-vl-7b --frame-size 448 448`.
    """
    arguments = bench.arguments
    names = bench.start("cost", ADAPTERS, **FEW)
    bench.warm(names)
    pictures = Pictures.of(bench, tuple(arguments.frame_size))
    labels = tuple(f"action {i}" for i in range(101))
    for i, name in enumerate(names):
        add_head(bench.engine, f"actions-{i}", name, labels, seed=i)
    rows, within = [], arguments.window + LIMIT
    for policy, by in product(arguments.video_policies, ("head", "LM head")):
        bench.policy(policy)
        targets = [f"actions-{i}" for i in range(ADAPTERS)] if by == "head" else names

        def lasts(asked, times):
            bench.drive(asked, times, within=within)
            return list(bench.lasts.values())

        bench.drive([pictures.prepared(i, names[i], range(arguments.frames)) for i in range(2)])
        rows.append([policy, by, *_in_real_time(bench, pictures, targets, lasts)])
    if arguments.beside_peft:
        # A small engine prepares the requests.
        names = bench.start("slora", ADAPTERS, **(FEW | {"pages": 64, "graphs": False}))
        peft, frames = PeftBatches(bench, names), range(arguments.frames)
        peft.answer([pictures.prepared(i, names[i], frames, output=2) for i in range(2)], 2)

        def by_peft(asked, times):
            return list(peft.drive(asked, times, within).values())

        rows.append(["PEFT", "LM head", *_in_real_time(bench, pictures, names, by_peft)])
        peft.close()
    table(f"Streams in real time, {bench.base}: {arguments.frames} of 30 frames in each second",
          ["policy, or PEFT", "answered by", "streams", "median latency of a chunk, ms"],
          rows)  # fmt: skip
