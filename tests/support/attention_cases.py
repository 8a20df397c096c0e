"""Sequences over paged keys and values, and what attention must give for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.registry import make_backend


class Case:
    """Sequences with random keys and values, some of them in the cache already.

    Pages are handed out in a random order, and memory that no sequence has written is NaN.

    Args:
        shares: For each sequence, its number of tokens in the cache and in this step.
        heads: Number of query heads, and of heads of keys and values.
        block_size: Tokens per page.
        seed: Seed of values and pages.
        spare: Pages in every table beyond those needed.
        width: Width of a head.
        dtype: Type of keys, values and queries.
        device: Device of all of them.
        after: A case whose cache this one overwrites, if its steps follow each other; it says
            block size, width, dtype and device.
        blocks: First tokens of each sequence's images whose tokens see each other, and those
            behind their last ones.
    """

    def __init__(
        self,
        shares,
        *,
        heads=(4, 4),
        block_size=4,
        seed=0,
        spare=0,
        width=8,
        dtype=torch.float32,
        device="cpu",
        after=None,
        blocks=None,
    ):
        if after is not None:
            like = after.storage
            block_size, width, dtype, device = (
                after.cache.block_size, like.shape[-1], like.dtype, str(like.device)
            )  # fmt: skip
        draw = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        lengths = [before + now for before, now in shares]
        needed = [-(-length // block_size) + spare for length in lengths]
        pages = sum(needed) + 3 if after is None else len(after.storage)
        order = draw.permutation(pages).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        shape = (pages, 2, 2, block_size, heads[1], width)
        storage = torch.empty(shape, dtype=dtype, device=device) if after is None else after.storage
        self.storage = storage.fill_(torch.nan)
        layers = [(storage[:, layer, 0], storage[:, layer, 1]) for layer in range(2)]
        self.cache = KVCache(layers, block_size, heads[0])
        counts = [now for _, now in shares]
        self.rows = Rows(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            np.array(lengths, np.int32),
            self.tables,
        )
        self.shares = shares
        self.blocks = blocks or [()] * len(shares)
        if blocks is not None:
            ends = [self.end(row, at) for row, (before, now) in enumerate(shares)
                    for at in range(before, before + now)]  # fmt: skip
            self.rows = replace(self.rows, seen=np.array(ends, np.int32))

        def random(length, count):
            drawn = torch.randn(length, count, width, generator=generator)
            return drawn.to(dtype).to(device)

        # [layer][sequence]
        self.query = [[random(now, heads[0]) for now in counts] for _ in "ab"]
        self.key = [[random(length, heads[1]) for length in lengths] for _ in "ab"]
        self.value = [[random(length, heads[1]) for length in lengths] for _ in "ab"]
        for layer, (keys, values) in enumerate(layers):
            for row, (before, _) in enumerate(shares):
                for at in range(before):
                    place = self.tables[row][at // block_size], at % block_size
                    keys[place] = self.key[layer][row][at]
                    values[place] = self.value[layer][row][at]

    def end(self, row, at):
        """Return how many tokens of its sequence a token sees."""
        own = (stop for start, stop in self.blocks[row] if start <= at < stop)
        return next(own, at + 1)

    def written(self):
        """Pages, and places in them, of all tokens."""
        return {
            (table[at // self.cache.block_size], at % self.cache.block_size)
            for table, (before, now) in zip(self.tables, self.shares, strict=True)
            for at in range(before + now)
        }

    def run(self, backend, layer, scale):
        """Output of a backend: [rows, heads, width]."""
        return self.run_plan(make_backend(backend, self.cache).plan(self.rows), layer, scale)

    def run_plan(self, plan, layer, scale, padding=0):
        """Output of a plan for the rows of the step, and so many that pad it."""
        key, value = (
            torch.cat([part[before:] for part, (before, _) in zip(parts, self.shares, strict=True)])
            for parts in (self.key[layer], self.value[layer])
        )
        parts = (torch.cat(self.query[layer]), key, value)
        padded = [F.pad(part, (0, 0, 0, 0, 0, padding), value=torch.nan) for part in parts]
        # As transformers' modules give them: heads before rows in memory.
        strided = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in padded]
        return plan.run(layer, strided[0], strided[1], strided[2], scale)

    def expected(self, layer, scale):
        """Output by the formula: [rows, heads, width]."""
        rows = []
        for row, (before, now) in enumerate(self.shares):
            group = self.query[layer][row].shape[1] // self.key[layer][row].shape[1]
            key = self.key[layer][row].double().repeat_interleave(group, 1)
            value = self.value[layer][row].double().repeat_interleave(group, 1)
            for at in range(now):
                seen = self.end(row, before + at)
                query = self.query[layer][row][at].double()
                scores = torch.einsum("hd,khd->hk", query, key[:seen]) * scale
                rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[:seen]))
        return torch.stack(rows).float()


def image_case(seed, **options):
    """Random parts of prompts with images, none of which begins or ends within an image."""
    draw, shares, blocks = np.random.default_rng(seed), [], []
    for number in range(4):
        length = int(draw.integers(30, 150))
        cuts = np.sort(draw.choice(np.arange(1, length), 4, replace=False)).tolist()
        blocks.append([(cuts[0], cuts[1]), (cuts[2], cuts[3])] if number else [])
        ends = [at for at in range(length + 1)
                if not any(start < at < stop for start, stop in blocks[-1])]  # fmt: skip
        first, end = np.sort(draw.choice(ends, 2, replace=False)).tolist()
        shares.append((first, end - first))
    return Case(shares, blocks=blocks, seed=seed, **options)
