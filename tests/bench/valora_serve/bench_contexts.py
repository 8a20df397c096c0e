"""Documents as contexts beside documents in the prompt, and adapters at decoding only.

`python -m tests.bench.valora_serve.bench_contexts [documents] [decode_only]` prints a table for
each section and, with `--out`, writes the figures as JSON. Model, documents and prefixes have
random content, which costs what true content does; the prefixes of documents repeat after
`DISTINCT` in host memory, but each is loaded, placed and evicted for itself.

`documents`: `--documents` of `--document-tokens`, asked `--requests` questions that all arrive at
once; the popularity of documents is Zipf's (exponent 1). The cases:

- prefix: `--memory` tokens stand for a document, for all of them;
- in the prompt, warm cache: documents that fit into the device's memory together, each read before;
- in the prompt, Zipf: all documents, with a prefix cache that evicts the least recently used;
- in the prompt, no cache.

`decode_only`: `--adapters` adapters answer requests whose prompts begin with the same
`--document-tokens` tokens, with LoRA on all tokens and at decoding only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tests.bench.valora_serve.harness import Bench, found, metrics, table
from valora_data.contract.contexts import PREFIX
from valora_serve.catalogue.contexts import Context
from valora_serve.catalogue.store import ResolvedModel, Staged
from valora_serve.types import Request, SamplingParams, ServedModel

DISTINCT = 4
"""Prefixes with numbers of their own."""


def add_contexts(engine, count, tokens, position):
    """Register contexts with prefixes of so many tokens; returns their names."""
    page = engine.memory.page
    shape = (page.layers, page.kv_heads, tokens, page.head_dim)
    generator = torch.Generator().manual_seed(0)
    made = [
        engine.memory.pack_prefix(
            f"distinct-{number}",
            str(number),
            *(torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(2)),
        )
        for number in range(min(DISTINCT, count))
    ]
    targets, prefixes = [], {}
    for number in range(count):
        name = f"document-{number}"
        content = hashlib.sha256(name.encode()).hexdigest()
        like = made[number % len(made)]
        prefixes[content] = replace(like, content=content)
        context = Context(
            name, PREFIX, tokens, position, content, like.bytes, position, file=Path(name)
        )
        model = ServedModel(name, "domain", name, engine.lmm.base, form=PREFIX)
        targets.append(ResolvedModel(model, context=context))
    engine.registry.register((Staged(None, (*targets,), {}, Path("documents")), {}, {}, prefixes))
    engine.bench_buffers = made  # pinned as long as the engine lives
    return [target.model.name for target in targets]


def zipf(count, things, seed):
    """Which thing each of `count` requests asks for: the i-th with a probability like 1/(i + 1)."""
    weights = 1 / np.arange(1, things + 1)
    return np.random.default_rng(seed).choice(things, count, p=weights / weights.sum())


def tokens_of(seed, count):
    """Random token ids."""
    return np.random.default_rng(seed).integers(3, 32000, count).tolist()


def asked(bench, number, name, prompt):
    """A question with its own random words behind a prompt."""
    arguments = bench.arguments
    sampling = SamplingParams(max_tokens=arguments.output, ignore_eos=True)
    words = tokens_of(10**6 + number, arguments.question)
    return Request(str(number), name, token_ids=[*prompt, *words], sampling=sampling)


def documents(bench):
    """A thousand documents: as prefixes, and in the prompt."""
    a = bench.arguments
    rows = []
    page_bytes = None

    def row(case, documents, tokens, done, wall, count):
        m, stats = metrics(done, wall), bench.engine.stats()
        rows.append([case, documents, tokens, tokens * page_bytes / 1e6, count, m["requests"],
                     m["ttft"], m["p99"], stats.context_loads])  # fmt: skip
        print(rows[-1], flush=True)

    options = {"max_requests": a.running, "host_bytes": 1 << 50}
    chosen = zipf(a.requests, a.documents, 5)
    bench.start("cost", **options)
    page = bench.engine.memory.page
    page_bytes = page.elements * bench.engine.memory.storage.element_size() / page.block_size
    names = add_contexts(bench.engine, a.documents, a.memory, a.document_tokens)
    bench.warm([])
    bench.drive([asked(bench, i, names[i], []) for i in range(min(8, len(names)))])
    requests = [asked(bench, i, names[chosen[i]], []) for i in range(a.requests)]
    row("prefix", a.documents, a.memory, *bench.drive(requests), a.requests)

    capacity = bench.engine.memory.pages * page.block_size
    fitting = max(1, int(0.7 * capacity) // (a.document_tokens + a.question + a.output))
    fitting = min(fitting, a.documents)
    bench.start("cost", prefix_cache=True, **options)
    texts = [tokens_of(number, a.document_tokens) for number in range(fitting)]
    bench.drive([asked(bench, 10**7 + i, None, text) for i, text in enumerate(texts)])
    warm = zipf(a.requests, fitting, 6)
    requests = [asked(bench, i, None, texts[warm[i]]) for i in range(a.requests)]
    row("in the prompt, warm cache", fitting, a.document_tokens, *bench.drive(requests), a.requests)

    few = min(a.prompt_requests, a.requests)
    bench.start("cost", prefix_cache=True, **options)
    warmed = zipf(few, a.documents, 7)
    made = {int(n): tokens_of(int(n), a.document_tokens) for n in {*warmed, *chosen[:few]}}
    bench.drive([asked(bench, 10**7 + i, None, made[n]) for i, n in enumerate(warmed)])
    requests = [asked(bench, i, None, made[chosen[i]]) for i in range(few)]
    row("in the prompt, Zipf", a.documents, a.document_tokens, *bench.drive(requests), few)

    bench.start("cost", **options)
    bench.warm([])
    row("in the prompt, no cache", a.documents, a.document_tokens, *bench.drive(requests), few)
    title = (f"{a.documents} documents of {a.document_tokens} tokens; questions of {a.question} "
             f"tokens, answers of {a.output}")  # fmt: skip
    table(title, ["document", "documents", "tokens each", "MB each", "requests", "requests/s",
                  "mean TTFT, ms", "p99 latency, ms", "prefixes loaded"], rows)  # fmt: skip


def decode_only(bench):
    """Adapters that share the base model's prefix cache, beside those that cannot."""
    a = bench.arguments
    shared = tokens_of(1, a.document_tokens)
    rows = []
    for late in (False, True):
        names = bench.start("cost", a.adapters, (16,), prefix_cache=True, slots=a.adapters,
                            max_requests=a.running, max_adapters=a.adapters + late)  # fmt: skip
        if late:
            for target in bench.engine.store._named.values():
                object.__setattr__(target.model, "decode_only", True)
        bench.warm(names)
        bench.drive([asked(bench, 10**7, None, shared)])  # the base model has read it
        count = min(a.prompt_requests, a.requests)
        requests = [asked(bench, i, names[i % len(names)], shared) for i in range(count)]
        before = bench.engine.stats()
        done, wall = bench.drive(requests)
        m, after = metrics(done, wall), bench.engine.stats()
        hits = after.prefix_hits - before.prefix_hits
        rows.append(["at decoding only" if late else "on all tokens", m["requests"], m["ttft"],
                     hits / (after.prefix_queries - before.prefix_queries)])  # fmt: skip
        print(rows[-1], flush=True)
    title = f"{a.adapters} adapters, prompts with the same first {a.document_tokens} tokens"
    table(title, ["LoRA", "requests/s", "mean TTFT, ms", "prefix cache hits"], rows)


SECTIONS = {f.__name__: f for f in (documents, decode_only)}


def main():
    """Run the sections."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--prompt-graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--costs", default="/tmp/valora-costs")
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--document-tokens", type=int, default=8000)
    parser.add_argument("--memory", type=int, default=256, help="tokens of a prefix")
    parser.add_argument("--question", type=int, default=64)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--prompt-requests", type=int, default=64,
                        help="requests of the cases that read documents")  # fmt: skip
    parser.add_argument("--running", type=int, default=128, help="most requests at a time")
    parser.add_argument("--adapters", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.context = max(4096, arguments.document_tokens + arguments.question + 2048)
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
