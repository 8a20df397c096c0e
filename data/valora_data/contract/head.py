"""What every kind of vision task head has (VaLoRA §4.2.2)."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from valora_data.contract.files import expect, parse_json
from valora_data.contract.results import HeadResult, Size


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """A trained linear layer on last hidden states; kinds are registered in `heads.HEAD_KINDS`."""

    finds_boxes: ClassVar[bool] = False  # whether results are boxes, which `min_score` can filter
    kind: str
    labels: tuple[str, ...] = ()  # in the order of the outputs; none where answers are no labels
    weight: Tensor  # (outputs, inputs) float32
    bias: Tensor  # (outputs,) float32

    @property
    def reads_visual(self) -> bool:
        """Whether it reads the hidden states of the visual tokens, not only the last token's."""
        return True

    @property
    def last_tokens(self) -> int:
        """Number of tokens at the end of the prompt that it reads, unless it reads visual ones."""
        return 1

    @property
    def reads_places(self) -> bool:
        """Whether it needs to know where in its image each visual token lies."""
        return False

    @classmethod
    @abstractmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from a file (float32 on the CPU) for hidden states of a `width`.

        A `KeyError` names what is missing, a `ValueError` says what does not fit.
        """

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, without `kind`."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file."""
        return {"weight": self.weight, "bias": self.bias}

    def configured(self, promise: Mapping[str, Any]) -> Self:
        """The head with what the domain's entry in the manifest says."""
        return self

    def to(self, device: torch.device | str) -> Self:
        """The head with its weights on a device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def misfit(self, visual: int, images: int) -> str | None:
        """Why a prompt of so many visual tokens and images cannot be read, None if it can."""
        if self.reads_visual and not visual:
            return f"a {self.kind} head reads visual tokens: send an image"
        return None

    @abstractmethod
    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        """What the linear layer acts on, for one prompt: (rows, inputs) float32.

        `last` (1, width) and `visual` (tokens, width) are hidden states, the latter only if
        `reads_visual`; `places` (tokens,) int64 as `label_head.places_of`, if `reads_places`.
        """

    @abstractmethod
    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> HeadResult:
        """The answer that raw outputs (rows, outputs), float32 on the CPU, stand for.

        `sizes` are those of the images in pixels; `min_score` replaces the head's own threshold.
        """


def check_shapes(tensors: Mapping[str, Tensor], **shapes: tuple[int, ...]) -> None:
    """Compare tensors with the shapes that they must have."""
    for name, shape in shapes.items():
        got = tuple(tensors[name].shape)
        expect(got == shape, f"tensor {name}", f"shape {shape}", got)


def parse_labels(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The label set in a head's metadata: different names, at least one."""
    labels = parse_json(metadata["labels"])
    named = isinstance(labels, list) and labels and all(isinstance(one, str) for one in labels)
    expect(named and len(set(labels)) == len(labels), "labels", "different names", labels)
    return tuple(labels)
