"""VaLoRA's workloads with pictures through the vision tower (§6, Figures 14 and 16)."""

from __future__ import annotations

from itertools import product

import numpy as np

from tests.bench.valora_serve.harness import FEW, metrics, skewed, table
from tests.bench.valora_serve.pictures import Pictures
from tests.bench.valora_serve.serve_models import add_head

ADAPTERS = 16
LIMIT = 1.0
"""Seconds in which a chunk of a second of video must be answered to keep up."""
LABEL_TOKENS = 5
"""Tokens of the name of a class, which the LM head generates."""
ENOUGH = 0.95
"""Share of the chunks that must be."""


def bursty(rate, seconds, cv, seed):
    """Arrivals with Gamma gaps of a coefficient of variation, as in Azure's traces of inference."""
    gaps = np.random.default_rng(seed).gamma(1 / cv**2, cv**2 / rate, int(4 * rate * seconds) + 32)
    times = np.cumsum(gaps)
    return times[times < seconds]


def _pictures(bench):
    found = bench.pictures = getattr(bench, "pictures", None) or Pictures(bench, 24)
    return found


def retrieval(bench):
    """Visual retrieval: a question about a new picture, answered by the LM head."""
    arguments = bench.arguments
    names = bench.start("cost", ADAPTERS, **FEW)
    bench.warm(names)
    pictures = _pictures(bench)
    rows = []
    for policy, rate in product(arguments.policies, arguments.picture_rates):
        times = bursty(rate, arguments.window, 2.0, 3)
        chosen = skewed(len(times), ADAPTERS, 0.6, 4)
        asked = [
            pictures.prepared(i, names[chosen[i]], [i], words=32, output=arguments.answer)
            for i in range(len(times))
        ]
        if not rows:
            bench.drive(asked[:8])
        bench.policy(policy)
        m = metrics(*bench.drive(asked, times), arguments.slo)
        rows.append([policy, rate, m["atl"], m["ttft"], m["between"], m["p99"]])
        print(rows[-1], flush=True)
    table(f"Visual retrieval, {bench.base}: a new picture of 640 × 480 each, 60 % on one adapter",
          ["policy", "requests/s", "average token latency, ms", "mean TTFT, ms",
           "mean inter-token, ms", "p99 latency, ms"], rows)  # fmt: skip


def _streamed(bench, pictures, targets, streams):
    """Share of the chunks of so many streams that are answered in time, and their median in ms."""
    arguments = bench.arguments
    times, asked = [], []
    for second, stream in product(range(round(arguments.window)), range(streams)):
        number = len(asked)
        which = [number * arguments.frames + i for i in range(arguments.frames)]
        name = targets[stream % len(targets)]
        asked.append(pictures.prepared(number, name, which, words=16, output=LABEL_TOKENS))
        times.append(second + stream / streams)
    bench.drive(asked, times, within=arguments.window + LIMIT)
    latency = list(bench.lasts.values())
    median = 1e3 * float(np.median(latency)) if latency else None
    return sum(seconds <= LIMIT for seconds in latency) / len(asked), median


def video(bench):
    """Video analytics: how many streams of 30 frames a second one GPU answers in real time.

    Each second, a stream sends a chunk of `--frames` of its 30 frames. In real time means that 95 %
    of the chunks are answered within a second. Answers are a class, by a head or as the LM head's
    tokens.
    """
    arguments = bench.arguments
    names = bench.start("cost", ADAPTERS, **FEW)
    bench.warm(names)
    pictures = _pictures(bench)
    labels = tuple(f"action {i}" for i in range(101))
    for i, name in enumerate(names):
        add_head(bench.engine, f"actions-{i}", name, labels, seed=i)
    rows = []
    for policy, by in product(arguments.video_policies, ("head", "LM head")):
        bench.policy(policy)
        targets = [f"actions-{i}" for i in range(ADAPTERS)] if by == "head" else names
        medians = {0: None}

        def keeps_up(streams, targets=targets, medians=medians):
            """Whether so many streams are answered in real time."""
            share, medians[streams] = _streamed(bench, pictures, targets, streams)
            print(targets[0], streams, share, medians[streams], flush=True)
            return share >= ENOUGH

        bench.drive([pictures.prepared(i, names[i], range(arguments.frames)) for i in range(2)])
        low, high = 0, 1
        while high <= arguments.most_streams and keeps_up(high):
            low, high = high, min(2 * high, arguments.most_streams + 1)
        while high - low > max(1, low // 8):
            middle = (low + high) // 2
            low, high = (middle, high) if keeps_up(middle) else (low, middle)
        rows.append([policy, by, low, medians[low]])
    table(f"Streams in real time, {bench.base}: {arguments.frames} of 30 frames in each second",
          ["policy", "answered by", "streams", "median latency of a chunk, ms"], rows)  # fmt: skip
