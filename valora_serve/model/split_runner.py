"""The runner of a rank of a tensor-parallel group: the ranks' parts of images and tokens meet."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from valora_serve.model.prompt import Visual, VisualFeatures
from valora_serve.model.runner import ModelRunner
from valora_serve.model.sampler import TokenChoice, sample
from valora_serve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from valora_serve.model.lmm import VisualRows
    from valora_serve.model.preparation import Preparation
    from valora_serve.model.work import Work
    from valora_serve.parallel.group import Group


class SplitRunner(ModelRunner):
    """The runner of one rank; all make the same calls. Rank 0 alone has images and chances."""

    def __init__(self, group: Group, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._group = group

    def compile_together(
        self, wanted: Sequence[Preparation], patience: float | None = None
    ) -> None:
        """Do nothing: split linears compute with all ranks only, in the same order."""

    def _sample(self, logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
        greedy = all(choice.is_argmax for choice in choices)  # the logits are everywhere the same
        if greedy or self._group.rank == 0:
            tokens = sample(logits, choices)
        else:
            tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        if not greedy:
            self._group.broadcast(tokens)
        return tokens

    def _visual_rows(self, works: Sequence[Work], starts: NDArray[np.int32]) -> VisualRows | None:
        found = super()._visual_rows(works, starts)
        if found is not None:
            for part in (found.embeddings, *found.deep):
                self._group.broadcast(part)
        return found

    def encode(self, visuals: Sequence[Visual], adapters: Sequence[int]) -> list[VisualFeatures]:
        """Encode images or videos, which are dealt out to the ranks; rank 0 returns them all."""
        group = self._group
        if len(visuals) < group.size:  # one image is not worth sending its pixels
            return super().encode(visuals, adapters) if group.rank == 0 else []
        shares = deal([math.prod(_pixels(visual).shape) for visual in visuals], group.size)
        own = visuals[shares[group.rank]]
        if group.rank:
            flat = self._empty(sum(_pixels(visual).numel() for visual in own))
            group.receive(flat, 0)
            for visual, part in zip(
                own, flat.split([_pixels(visual).numel() for visual in own]), strict=True
            ):
                name = next(iter(visual.tensors))
                visual.tensors[name] = part.view(visual.tensors[name].shape)
        for rank, share in enumerate(shares[1:] if group.rank == 0 else (), start=1):
            flat = torch.cat([_pixels(visual).reshape(-1) for visual in visuals[share]])
            group.send(flat.to(self._device, self._lmm.dtype), rank)
        error: Exception | None = None
        try:
            found = super().encode(own, adapters[shares[group.rank]])
        except Exception as wrong:  # noqa: BLE001 - all ranks must hear of it
            error = wrong
        if not group.least(int(error is None)):
            if group.rank == 0:
                raise error or RuntimeError("another GPU could not encode its images")
            return []
        layers = 1 + len(found[0].deep)
        if group.rank:
            for parts in zip(*((one.embeddings, *one.deep) for one in found), strict=True):
                group.send(torch.cat(parts).to(self._lmm.dtype), 0)
        for rank, share in enumerate(shares[1:] if group.rank == 0 else (), start=1):
            counts = [len(visual.at) for visual in visuals[share]]
            whole = [self._empty(sum(counts), self._lmm.width) for _ in range(layers)]
            for layer in whole:
                group.receive(layer, rank)
            each = zip(*(layer.split(counts) for layer in whole), strict=True)
            found += [VisualFeatures(one[0], one[1:]) for one in each]
        return found

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._lmm.dtype, device=self._device)


def _pixels(visual: Visual) -> Tensor:
    return next(iter(visual.tensors.values()))


def deal(weights: Sequence[int], size: int) -> list[slice]:
    """Deal items out in runs of about equal weight, at least one each."""
    ends = np.cumsum(weights)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, size) / size) + 1
    found, start = [], 0
    for left, cut in zip(range(size - 1, -1, -1), [*cuts.tolist(), len(weights)], strict=True):
        stop = min(max(cut, start + 1), len(weights) - left)
        found.append(slice(start, stop))
        start = stop
    return found


# ---------------------------------------------------------------------- what workers get to see

GREEDY = TokenChoice(SamplingParams(temperature=0.0))
DRAWN = TokenChoice(SamplingParams(temperature=1.0))


def _choice(greedy: bool) -> TokenChoice:
    return GREEDY if greedy else DRAWN


def _blank(shape: Sequence[int], layers: int, dtype: torch.dtype, device: str) -> VisualFeatures:
    """Features that rank 0 fills."""
    part = torch.zeros(tuple(shape), dtype=dtype, device=device)
    return VisualFeatures(part, (part,) * layers)


def _seen(pixels: tuple[str, Sequence[int]], others: dict[str, Any], at: NDArray[np.int64]) -> Any:
    """An image whose pixels rank 0 sends."""
    tensors = {pixels[0]: torch.empty(tuple(pixels[1]), device="meta")}
    tensors |= {name: torch.from_numpy(values) for name, values in others.items()}
    return SimpleNamespace(tensors=tensors, at=at)


def _form_of_features(one: VisualFeatures) -> tuple[Any, ...]:
    part = one.embeddings
    return _blank, (tuple(part.shape), len(one.deep), part.dtype, part.device.type)


def _form_of_visual(one: Visual) -> tuple[Any, ...]:
    (name, pixels), *others = one.tensors.items()
    return _seen, ((name, tuple(pixels.shape)), {n: v.numpy() for n, v in others}, one.at)


FORMS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    TokenChoice: lambda one: (_choice, (one.is_argmax,)),
    VisualFeatures: _form_of_features,
    Visual: _form_of_visual,
}
"""In which form the arguments of calls are sent: what rank 0 alone needs is left out."""
