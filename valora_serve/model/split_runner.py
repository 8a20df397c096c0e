"""The runner of a rank of a tensor-parallel group, and what other ranks get to see of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from valora_serve.model.lmm import VisualRows
from valora_serve.model.prompt import VisualFeatures
from valora_serve.model.runner import ModelRunner
from valora_serve.model.sampler import TokenChoice, sample
from valora_serve.parallel.group import Group
from valora_serve.types import SamplingParams


class SplitRunner(ModelRunner):
    """The runner of a rank; all make the same steps. Images and chance are those of rank 0."""

    def __init__(self, group: Group, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._group = group

    def compile_together(self, *_: Any, **__: Any) -> None:
        """Nothing: split linears compute with all ranks only, in the same order."""

    def _sample(self, logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
        if all(choice.is_argmax for choice in choices):  # the logits are everywhere the same
            return sample(logits, choices)
        tokens = torch.zeros(len(logits), dtype=torch.int64, device=self._device)
        if self._group.rank == 0:
            tokens = sample(logits, choices)
        self._group.broadcast(tokens)
        return tokens

    def _visual_rows(self, *arguments: Any) -> VisualRows | None:
        found = super()._visual_rows(*arguments)
        if found is not None:
            for part in (found.embeddings, *found.deep):
                self._group.broadcast(part)
        return found


CHOICES = [TokenChoice(SamplingParams(temperature=1.0 - greedy)) for greedy in (False, True)]


def _choice(greedy: bool) -> TokenChoice:
    return CHOICES[greedy]


def _blank(shape: Sequence[int], dtype: torch.dtype, device: str, layers: int) -> VisualFeatures:
    part = torch.zeros(shape, dtype=dtype, device=device)
    return VisualFeatures(part, (part,) * layers)


def _form_of_features(one: VisualFeatures) -> tuple[Any, ...]:
    part = one.embeddings
    return _blank, (part.shape, part.dtype, part.device.type, len(one.deep))


# How a step is pickled: what rank 0 alone needs, or sends through the group, is left out.
FORMS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    TokenChoice: lambda one: (_choice, (one.is_argmax,)),
    VisualFeatures: _form_of_features,
}
