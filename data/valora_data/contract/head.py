"""What every kind of vision task head has (VaLoRA §4.2.2). torch is imported where it computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from valora_data.contract.files import parse_json, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from valora_data.contract.results import HeadResult, Size


@dataclass(frozen=True, eq=False, kw_only=True)
class Head(ABC):
    """A trained head: a linear layer on last hidden states. Every kind of head is a subclass.

    A kind is registered by its name in `heads.HEAD_KINDS`. One class may stand for several kinds.

    Attributes:
        kind: Name of the kind.
        labels: Label set in the order of the outputs; empty where answers are no labels.
        weight: (outputs, inputs) float32.
        bias: (outputs,) float32.
        finds_boxes: Whether the results are boxes, which `min_score` can filter.
    """

    finds_boxes: ClassVar[bool] = False
    kind: str
    labels: tuple[str, ...] = ()
    weight: Tensor
    bias: Tensor

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

    # --- file format

    @classmethod
    @abstractmethod
    def parse(
        cls, kind: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor], width: int
    ) -> Self:
        """Build the head from the contents of its file.

        Args:
            kind: Kind of the head.
            metadata: Metadata of the file.
            tensors: Tensors of the file, float32 on the CPU.
            width: Size of the base model's hidden states.

        Raises:
            KeyError: A tensor or an entry of the metadata is missing.
            ValueError: Something does not fit; the message says what was expected.
        """

    @abstractmethod
    def metadata(self) -> dict[str, str]:
        """Metadata of the file, without `kind`."""

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the file."""
        return {"weight": self.weight, "bias": self.bias}

    def check(self, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
        """Compare the shapes of tensors with what they must be.

        Args:
            shapes: Each tensor and its expected shape, by name; None is not compared.

        Raises:
            ValueError: A shape is another one.
        """
        for name, (tensor, shape) in shapes.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                got = tuple(tensor.shape)
                raise ValueError(f"tensor {name}: expected shape {shape}, got {got}")

    # --- serving

    def configured(self, promise: Mapping[str, Any]) -> Self:
        """The head with what the bundle's manifest says of its domain.

        Args:
            promise: The domain's entry in the manifest.
        """
        return self

    def to(self, device: torch.device | str) -> Self:
        """The head with its weights on a device."""
        return replace(self, weight=self.weight.to(device), bias=self.bias.to(device))

    def misfit(self, visual: int, images: int) -> str | None:
        """Why the head cannot read a prompt, in one sentence; None if it can.

        Args:
            visual: Number of visual tokens in the prompt.
            images: Number of images in it.
        """
        if self.reads_visual and not visual:
            return f"a {self.kind} head reads visual tokens: send an image"
        return None

    @abstractmethod
    def inputs(self, last: Tensor, visual: Tensor, places: Tensor | None) -> Tensor:
        """What the linear layer acts on, for one prompt.

        Args:
            last: (1, width), hidden state of the last token that was kept.
            visual: (tokens, width), hidden states of the visual tokens; none unless
                `reads_visual`.
            places: (tokens,) int64, see `grid_pooling.places_of`; None unless `reads_places`.

        Returns:
            (rows, inputs) float32.
        """

    @abstractmethod
    def interpret(
        self, logits: Tensor, sizes: Sequence[Size], min_score: float | None = None
    ) -> HeadResult:
        """The answer that raw outputs stand for.

        Args:
            logits: (rows, outputs) float32 on the CPU: weight · inputs + bias.
            sizes: Width and height in pixels of each image.
            min_score: Confidence below which answers are dropped; the head's own threshold if
                None. Heads without a threshold ignore it.
        """


def parse_labels(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The label set in a head's metadata.

    Raises:
        KeyError: There is none.
        ValueError: It is empty or holds a label twice.
        TypeError: It is no list of strings.
    """
    labels = parse_json(metadata["labels"])
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise TypeError(f"labels: expected a list of names, got {shown(labels)}")
    if len(set(labels)) != len(labels) or not labels:
        raise ValueError(f"labels: expected different names, got {shown(labels)}")
    return tuple(labels)
