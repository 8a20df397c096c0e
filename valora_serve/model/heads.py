"""Runs vision task heads on last hidden states (VaLoRA §4.2.2).

Heads of any kinds and sizes are computed in one batch, in float32. What a kind of head reads and
what its outputs mean is defined in `valora_data.contract.heads`.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from valora_data.contract.head import Head
from valora_data.contract.results import HeadResult
from valora_serve.errors import NonFiniteError, RequestError, ServeError
from valora_serve.model.finite import finite_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingResult(HeadResult):
    """An embedding; `logits` holds it."""

    def image_fields(self, number: int) -> dict[str, Any]:
        """Nothing: embeddings are no answers to a prompt."""
        return {}

    def text(self, sizes: Sequence[tuple[int, int]]) -> str:
        """Nothing: embeddings are no answers to a prompt."""
        return ""

    def golden(self) -> None:
        """Nothing: no bundle holds embeddings."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingHead(Head):
    """Returns the last hidden state of the prompt's last token; it has no parameters."""

    kind: str = "embedding"
    weight: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0))
    bias: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def reads_visual(self) -> bool:
        """Whether it reads the hidden states of the visual tokens: no."""
        return False

    @classmethod
    def parse(
        cls,
        kind: str,
        metadata: Mapping[str, str],
        tensors: Mapping[str, torch.Tensor],
        width: int,
    ) -> EmbeddingHead:
        """Return the head, which no file describes."""
        return cls()

    def metadata(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def inputs(
        self, last: torch.Tensor, visual: torch.Tensor, places: torch.Tensor | None
    ) -> torch.Tensor:
        """[1, width] float32, the hidden state of the last token."""
        return last.float()

    def interpret(
        self,
        logits: torch.Tensor,
        sizes: Sequence[tuple[int, int]],
        min_score: float | None = None,
    ) -> EmbeddingResult:
        """Return the hidden state as it is."""
        return EmbeddingResult(kind=self.kind, logits=logits.numpy().copy())


EMBEDDING = EmbeddingHead()
"""The head of all requests for embeddings."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MemoryHead(EmbeddingHead):
    """Returns the last hidden states of the queries with which a document's prompt ends.

    Attributes:
        tokens: Number of queries.
    """

    tokens: int

    @property
    def last_tokens(self) -> int:
        """Number of queries."""
        return self.tokens


@dataclass(frozen=True, slots=True, eq=False)
class HeadRequest:
    """The input of a head for one request.

    Attributes:
        head: The head, on the device of `hidden`.
        hidden: [tokens, width] last hidden states, after the final norm; the last row is that of
            the prompt's last token. For a head that reads only this token, [1, width] is enough.
        visual: [tokens] bool, which of them are visual tokens; may be on the CPU. None for none.
        sizes: Width and height in pixels of each image, in their order.
        min_score: Confidence below which answers are dropped; the head's own threshold if None.
        places: [visual tokens] int64 on the CPU, see `contract.label_head.places_of`; only for
            heads that read places.
    """

    head: Head
    hidden: torch.Tensor
    visual: torch.Tensor | None = None
    sizes: Sequence[tuple[int, int]] = ()
    min_score: float | None = None
    places: torch.Tensor | None = None

    def check(self) -> None:
        """Check that the head can read this input.

        Raises:
            RequestError: It cannot.
        """
        visual = 0 if self.visual is None else int(self.visual.sum())
        check_visual(self.head, visual, len(self.sizes))


def check_visual(head: Head, visual: int, images: int) -> None:
    """Check that a head can read a prompt, before anything is computed.

    Args:
        head: The head.
        visual: Number of visual tokens in the prompt.
        images: Number of images in it.

    Raises:
        RequestError: It cannot.
    """
    misfit = head.misfit(visual, images)
    if misfit is not None:
        raise RequestError(misfit)


class HeadLogits:
    """Logits of a batch of heads, while they are copied to the host.

    Args:
        inputs: The batch.
        errors: For each input the reason why it cannot be answered, or None.
        logits: [elements] float32 on the host, the parts of all inputs one after the other; the
            copy into it may still be running. Each row has one more element than the head has
            outputs: 0, or NaN if what the head read is not finite.
        shapes: (rows, outputs + 1) of each input's part.
        copied: Event that is recorded after the copy; None if the copy is done.
    """

    def __init__(
        self,
        inputs: Sequence[HeadRequest],
        errors: Sequence[ServeError | None],
        logits: torch.Tensor,
        shapes: Sequence[tuple[int, int]],
        copied: torch.cuda.Event | None,
    ) -> None:
        self._inputs = inputs
        self._errors = errors
        self._logits = logits
        self._shapes = shapes
        self._copied = copied

    @property
    def ready(self) -> bool:
        """Whether `read` would return without waiting."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> list[HeadResult | ServeError]:
        """Wait for the logits and interpret them on the host: a result or an error each.

        An input whose hidden states, logits or result are not finite gets a `NonFiniteError`.
        """
        if self._copied is not None:
            self._copied.synchronize()
        results: list[HeadResult | ServeError] = []
        start = 0
        for item, error, shape in zip(self._inputs, self._errors, self._shapes, strict=True):
            stop = start + shape[0] * shape[1]
            if error is None:
                results.append(_interpret(item, self._logits[start:stop].view(shape)))
            else:
                results.append(error)
            start = stop
        return results


def _interpret(item: HeadRequest, raw: torch.Tensor) -> HeadResult | ServeError:
    """Return what the logits of one input mean, or why they mean nothing."""
    broken = NonFiniteError("the head's outputs are not finite")
    if not bool(raw.isfinite().all()):
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


class HeadSet:
    """Runs heads of any kinds and sizes in one batch."""

    def launch(self, inputs: Sequence[HeadRequest]) -> HeadLogits:
        """Compute the logits of a batch without waiting for the device.

        There is one matrix product for each distinct head, and one copy to the host. An input
        that cannot be answered gets an error of its own.
        """
        errors: list[ServeError | None] = []
        rows: list[torch.Tensor] = []
        members: dict[int, list[int]] = {}
        for number, item in enumerate(inputs):
            error: ServeError | None = None
            read = item.hidden[:0].float()
            try:
                item.check()
                read = _rows(item)
            except RequestError as wrong:
                error = wrong
            except Exception as wrong:  # a head of another package must not end the engine
                log.exception("pooling for a %s head", item.head.kind)
                error = ServeError(f"the {item.head.kind} head failed: {wrong}")
            errors.append(error)
            rows.append(read)
            if error is None:
                members.setdefault(id(item.head), []).append(number)
        parts = [torch.empty(0) for _ in inputs]
        for numbers in members.values():
            head = inputs[numbers[0]].head
            together = torch.cat([rows[number] for number in numbers])
            raw = together  # of a head without parameters
            if head.weight.numel():
                raw = torch.addmm(head.bias, together, head.weight.T)
            flags = torch.where(finite_rows(together), 0.0, math.nan)
            raw = torch.cat([raw, flags[:, None]], dim=1)
            for number, part in zip(
                numbers, raw.split([len(rows[number]) for number in numbers]), strict=True
            ):
                parts[number] = part
        shapes = [
            (len(part), part.shape[1]) if error is None else (0, 0)
            for part, error in zip(parts, errors, strict=True)
        ]
        answered = [
            part.reshape(-1) for part, error in zip(parts, errors, strict=True) if not error
        ]
        flat = torch.cat(answered) if answered else torch.empty(0)
        copied = None
        if flat.is_cuda:
            host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            flat = host
        return HeadLogits(inputs, errors, flat, shapes, copied)

    def run(self, inputs: Sequence[HeadRequest]) -> list[HeadResult | ServeError]:
        """Answer a batch: a result, or an error that concerns only its own input."""
        return self.launch(inputs).read()


def _rows(item: HeadRequest) -> torch.Tensor:
    """[rows, inputs] float32 that the head's linear layer acts on."""
    hidden = item.hidden
    visual = hidden[:0]
    if item.head.reads_visual:
        assert item.visual is not None
        # The indices are computed on the host: a mask on the device would need a synchronisation.
        mask = item.visual.cpu()
        visual = hidden
        if not bool(mask.all()):
            visual = hidden[_on_device(torch.nonzero(mask).flatten(), hidden)]
    places = None if item.places is None else _on_device(item.places, hidden)
    last = hidden[-item.head.last_tokens :]
    return item.head.inputs(last, visual, places if item.head.reads_places else None)


def _on_device(indices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy indices to the device of a tensor without waiting."""
    indices = indices.pin_memory() if like.is_cuda else indices
    return indices.to(like.device, non_blocking=True)
