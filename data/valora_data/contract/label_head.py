"""Heads that choose one label for a whole prompt (VaLoRA §4.2.2)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from valora_data.contract.files import expect
from valora_data.contract.head import Head, check_shapes, parse_labels
from valora_data.contract.results import LabelResult, Size

MIN_TEMPERATURE = 1e-6  # temperature, so that every confidence stays finite
SIDE = 4  # rows and columns of the places of an image


class Pooling(StrEnum):
    """Which hidden states the linear layer of a label head acts on."""

    LAST = "last"
    VISUAL_MEAN = "visual_mean"
    ATTENTION = "attention"
    GRID = "grid"


def pooled_width(pooling: str, width: int) -> int:
    """Number of inputs of a linear layer behind a pooling of hidden states of this width."""
    return width * SIDE**2 if pooling == Pooling.GRID else width


def places_of(rows: int, columns: int, images: int = 1) -> Tensor:
    """The place, row by row, of each visual token of images: (images · rows · columns,) int64."""
    row = torch.arange(rows) * SIDE // rows
    column = torch.arange(columns) * SIDE // columns
    return (row[:, None] * SIDE + column).flatten().repeat(images)


def pool(
    pooling: str, last: Tensor, visual: Tensor, real: Tensor, places: Tensor | None,
    query: Tensor | None,
) -> Tensor:  # fmt: skip
    """Pool the hidden states of n prompts: (n, `pooled_width`) float32.

    `last` is (n, width); `visual` (n, tokens, width), padded where `real` is False; `places` (n,
    tokens) int64 as in `places_of`; `query` (width,) is the weighting of `Pooling.ATTENTION`.
    """
    if pooling == Pooling.LAST:
        return last.float()
    seen = visual.float()
    if pooling == Pooling.GRID:
        assert places is not None, "grid pooling needs the places of the visual tokens"
        weights = F.one_hot(places, SIDE**2).to(seen.dtype) * real[..., None]
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        return torch.einsum("ntp,ntw->npw", weights, seen).flatten(1)
    if pooling == Pooling.VISUAL_MEAN:
        return (seen * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    assert query is not None, "attention pooling needs a query"
    scores = seen @ query / math.sqrt(seen.shape[-1])
    weights = scores.masked_fill(~real, -math.inf).softmax(-1)
    return (weights[:, None] @ seen)[:, 0]


def confidences(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """Probabilities of (..., labels) logits, calibrated by a temperature (Guo et al. 2017)."""
    return (logits / temperature).softmax(-1)


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelHead(Head):
    """Chooses one label for a whole prompt."""

    pooling: Pooling
    query: Tensor | None = None  # (width,) float32, the weighting of `Pooling.ATTENTION`
    temperature: float = 1.0  # logits are divided by it before the softmax

    @property
    def reads_visual(self) -> bool:
        return self.pooling is not Pooling.LAST

    @property
    def reads_places(self) -> bool:
        return self.pooling is Pooling.GRID

    @classmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        labels, pooling = parse_labels(metadata), Pooling(metadata["pooling"])
        expect(len(labels) > 1, "labels", "2 or more", labels)
        temperature = tensors["temperature"].item() if "temperature" in tensors else 1.0
        warm = temperature >= MIN_TEMPERATURE
        expect(warm, "temperature", f"at least {MIN_TEMPERATURE}", temperature)
        inputs = pooled_width(pooling, width)
        check_shapes(tensors, weight=(len(labels), inputs), bias=(len(labels),))
        if pooling is Pooling.ATTENTION:
            check_shapes(tensors, query=(width,))
        return cls(
            kind=kind, labels=labels, weight=tensors["weight"].contiguous(), bias=tensors["bias"],
            pooling=pooling, temperature=temperature,
            query=tensors["query"] if pooling is Pooling.ATTENTION else None,
        )  # fmt: skip

    def metadata(self) -> dict[str, str]:
        return {"labels": json.dumps(self.labels), "pooling": str(self.pooling)}

    def tensors(self) -> dict[str, Tensor]:
        query = {} if self.query is None else {"query": self.query}
        return {**super().tensors(), "temperature": torch.tensor([self.temperature]), **query}

    def to(self, device: torch.device | str) -> Self:
        query = None if self.query is None else self.query.to(device)
        return replace(super().to(device), query=query)

    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        real = torch.ones(1, len(visual), dtype=torch.bool, device=visual.device)
        where = None if places is None else places[None]
        return pool(self.pooling, last, visual[None], real, where, self.query)

    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> LabelResult:
        shares = confidences(logits[0], self.temperature).tolist()
        found = dict(zip(self.labels, shares, strict=True))
        best, numbers = max(found, key=found.__getitem__), logits.numpy().copy()
        return LabelResult(kind=self.kind, label=best, confidences=found, logits=numbers)
