"""The baselines of S-LoRA's Table 3: a merged copy for each adapter, and no unified memory."""

from __future__ import annotations

import numpy as np
import torch

from tests.bench.valora_serve.harness import metrics, table


def packed(bench):
    """Throughput beside engines that each hold a merged copy, and beside a fixed adapter pool.

    Copies share the GPU in turns, each with its part of the memory that the weights leave; merged
    weights cost what the base model's do, so one engine without LoRA stands for each of them.
    """
    arguments = bench.arguments
    count = min(arguments.requests, 200)
    lengths = np.random.default_rng(0).integers(8, 513, (count, 2))
    lengths = np.minimum(lengths, [[512, arguments.answer * 8]])
    rows = []
    for n in (5, 100):
        chosen = np.random.default_rng(1).integers(0, n, count)
        sizes = [tuple(map(int, pair)) for pair in lengths]
        names = bench.start("slora", n, (64, 32, 16, 8))
        bench.warm(names)
        asked = [bench.request(i, *sizes[i], names[chosen[i]]) for i in range(count)]
        ours = metrics(*bench.drive(asked))["requests"]
        page, item, memory, share = sizes_of(bench.engine, names)
        names = bench.start("slora", n, (64, 32, 16, 8), adapter_share=share)
        bench.warm(names)
        fixed = metrics(*bench.drive(asked))["requests"]
        weights = sum(p.nbytes for p in bench.model.parameters())
        left = (memory - (n - 1) * weights) // n
        copies = None
        pages = left // (page.elements * item)
        if pages * page.block_size > 2 * lengths.max():
            bench.start("slora", pages=int(pages))
            bench.warm([])
            groups = [np.flatnonzero(chosen == mine).tolist() for mine in range(n)]
            seconds = sum(
                bench.drive([bench.request(i, *sizes[i], None) for i in group])[1]
                for group in groups
            )
            copies = count / seconds
        rows.append([n, ours, fixed, fixed / ours, copies or "no memory",
                     ours / copies if copies else None])  # fmt: skip
        print(rows[-1], flush=True)
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    table(f"Throughput, {count} requests at once, ranks 64, 32, 16, 8: requests/s",
          ["adapters", "unified memory", "fixed pool", "fixed / unified",
           "a merged copy each", "unified / copies"], rows)  # fmt: skip


def sizes_of(engine, names):
    """Shape of a page, bytes of an element, bytes of all pages, and the share for all slots.

    No reference to the engine is left, so that its memory is free before the next one starts.
    """
    adapters, memory = engine.adapters, engine.memory
    keys = [engine.registry.key(engine.store.resolve(name).adapter) for name in names[:4]]
    item = memory.storage.element_size()
    share = min(0.9, memory.slots * max(adapters[key].page_count for key in keys) / memory.pages)
    return memory.page, item, memory.pages * memory.page.elements * item, share
