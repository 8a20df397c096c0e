"""Runs vision task heads of any kinds on hidden states, in one float32 batch (VaLoRA §4.2.2)."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from valora_data.contract.head import Head
from valora_data.contract.results import HeadResult
from valora_serve.errors import NonFiniteError, ServeError
from valora_serve.model.attention.base import to_device, to_host

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult(HeadResult):
    """An embedding; `logits` holds it. It is no answer to a prompt, and in no bundle."""

    def image_fields(self, number: int) -> dict[str, Any]:
        return {}

    def text(self, sizes: Sequence[tuple[int, int]]) -> str:
        return ""

    def golden(self) -> None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingHead(Head):
    """Returns the last hidden states of a prompt's last tokens; it has no parameters."""

    kind: str = "embedding"
    weight: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    bias: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    last_tokens: int = 1
    reads_visual: ClassVar[bool] = False

    @classmethod
    def parse(cls, *_: Any, **__: Any) -> EmbeddingHead:
        return cls()

    def metadata(self) -> dict[str, str]:
        return {}

    def inputs(
        self, last: torch.Tensor, visual: torch.Tensor, places: torch.Tensor | None
    ) -> torch.Tensor:
        return last.float()

    def interpret(self, logits: torch.Tensor, *_: Any, **__: Any) -> EmbeddingResult:
        return EmbeddingResult(kind=self.kind, logits=logits.numpy().copy())


EMBEDDING = EmbeddingHead()


@dataclass(frozen=True, slots=True, eq=False)
class HeadRequest:
    """The input of a head for one request."""

    head: Head  # on the device of `hidden`
    # [tokens, width] last hidden states, after the final norm: of all visual tokens for a head that
    # reads these, else at least of the last ones that it reads.
    hidden: torch.Tensor
    sizes: Sequence[tuple[int, int]] = ()  # width and height in pixels of each image
    min_score: float | None = None  # below which answers are dropped; None: the head's own
    # [visual tokens] int64 on the CPU, see `label_head.places_of`; only for heads that read places.
    places: torch.Tensor | None = None


def _interpret(item: HeadRequest, raw: torch.Tensor) -> HeadResult | ServeError:
    broken = NonFiniteError("the head's outputs are not finite")
    # A hidden state whose squares overflow in a norm becomes zero: see `sampler.finite_rows`.
    numbers = raw.numpy()
    if not (np.isfinite(numbers).all() and (numbers[:, -1] > 0).all()):
        return broken
    try:
        result = item.head.interpret(raw[:, :-1].contiguous(), item.sizes, item.min_score)
        fields = result.prompt_fields(item.sizes)
    except Exception as error:  # a head of another package must not end the engine
        log.exception("interpreting the outputs of a %s head", item.head.kind)
        return ServeError(f"the {item.head.kind} head failed: {error}")
    try:
        json.dumps(fields, allow_nan=False, default=repr)
    except ValueError:
        return broken
    return result


def launch_heads(inputs: Sequence[HeadRequest]) -> Callable[[], list[HeadResult | ServeError]]:
    """Enqueue one matrix product for each distinct head; returns what waits for the results.

    These are errors where an input fails, a `NonFiniteError` if its outputs are not finite.
    """
    errors: list[ServeError | None] = [None] * len(inputs)
    floats: dict[int, torch.Tensor] = {}  # hidden states by id: several heads may read a pass
    spans: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # of what heads read, likewise
    rows: dict[int, torch.Tensor] = {}
    members: dict[int, list[int]] = {}
    for number, item in enumerate(inputs):
        try:
            if id(item.hidden) not in floats:
                floats[id(item.hidden)] = item.hidden.float()
            rows[number] = _rows(item, floats[id(item.hidden)])
            members.setdefault(id(item.head), []).append(number)
        except Exception as wrong:  # a head of another package must not end the engine
            log.exception("pooling for a %s head", item.head.kind)
            errors[number] = ServeError(f"the {item.head.kind} head failed: {wrong}")
    parts = [torch.empty(0, 0)] * len(inputs)
    for numbers in members.values():
        head = inputs[numbers[0]].head
        first, *others = (rows[number] for number in numbers)
        together = torch.cat([first, *others]) if others else first
        raw = together  # of a head without parameters
        if head.weight.numel():
            raw = torch.addmm(head.bias, together, head.weight.T)
        if id(together) not in spans:
            low, high = torch.aminmax(together, dim=1, keepdim=True)  # NaN if any value is
            spans[id(together)] = together, high - low
        # One more element of each row: how far apart the values are that the head read.
        raw = torch.cat([raw, spans[id(together)][1]], dim=1)
        counts = [len(rows[number]) for number in numbers]
        for number, part in zip(numbers, raw.split(counts), strict=True):
            parts[number] = part
    answered = [parts[number].reshape(-1) for number in sorted(rows)]
    flat, copied = to_host(torch.cat(answered) if answered else torch.empty(0))
    shapes = [part.shape for part in parts]

    def read() -> list[HeadResult | ServeError]:
        if copied is not None:
            copied.synchronize()
        found = flat.split([shape.numel() for shape in shapes])
        return [
            error or _interpret(item, part.view(shape))
            for item, error, part, shape in zip(inputs, errors, found, shapes, strict=True)
        ]

    return read


def _rows(item: HeadRequest, hidden: torch.Tensor) -> torch.Tensor:
    """[rows, inputs] float32 that the head's linear layer acts on."""
    visual = hidden if item.head.reads_visual else hidden[:0]
    places = None if item.places is None else to_device(item.places.numpy(), hidden.device)
    last = hidden[-item.head.last_tokens :]
    found = item.head.inputs(last, visual, places if item.head.reads_places else None).float()
    width = item.head.weight.shape[-1]
    if width and found.shape[1:] != (width,):
        raise ValueError(f"its inputs are {[*found.shape]}, of width {width} expected")
    return found
