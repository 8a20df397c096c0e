"""Examples, their encoded form, and the hidden states that heads and losses read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Self

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

Size = tuple[int, int]  # width and height in pixels


@dataclass(frozen=True, slots=True)
class Example:
    """One question about images, with the answer to learn."""

    question: str  # text of the turn; it precedes the images
    images: tuple[Image, ...]  # or frames of a video, in order; none where it is about text
    video: bool = False  # whether the images are the frames of one video
    context: bool = False  # whether it is about a context, which stands before it
    # The text to learn, given the size of the first image as the encoder sees it; None for heads.
    answer: Callable[[Size], str] | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as the language model takes it."""

    ids: Tensor  # (length,) int64 on the CPU: of the prompt, then of the answer to learn
    visual: Tensor  # (length,) bool on the CPU, whether a token is visual
    prompt: int  # tokens of the prompt
    seen: Size  # of the first image as the encoder sees it
    grid: tuple[int, int]  # rows and columns of visual tokens of the first image
    cells: Tensor  # (cells,) int64 on the CPU, the tokens that heads read, row by row of the grids
    places: Tensor  # (cells,) int64 on the CPU, see `contract.label_head.places_of`
    pixels: Mapping[str, Tensor] = field(default_factory=dict)  # arguments of the vision encoder
    features: Tensor | None = None  # (visual tokens, width), kept instead of pixels
    deep: tuple[Tensor, ...] = ()  # the same for each of the first layers (Qwen3-VL)
    positions: Tensor | None = None  # (3, length) int64, rotary; None where they are the indices

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Size of pixels or features in memory."""
        kept = [*self.pixels.values(), *self.deep]
        kept += [] if self.features is None else [self.features]
        return sum(tensor.nbytes for tensor in kept)

    @property
    def end(self) -> int:
        """Position of the token that follows."""
        return self.length if self.positions is None else int(self.positions[:, -1].max()) + 1


def alike(keys: Iterable[Hashable], most: int | None = None) -> list[list[int]]:
    """Places of equal keys, at most `most` of them together."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        groups[key].append(place)
    return [
        places[start : start + (most or len(places))]
        for places in groups.values()
        for start in range(0, len(places), most or len(places))
    ]


@dataclass(frozen=True)
class Rows:
    """Tensors with a row for each sample."""

    def to(self, device: torch.device | str) -> Self:
        """Return the same on a device."""
        return type(self)(*(getattr(self, part.name).to(device) for part in fields(self)))

    def __getitem__(self, rows: Tensor) -> Self:
        parts = [getattr(self, part.name) for part in fields(self)]
        return type(self)(*(part[rows.to(part.device)] for part in parts))


@dataclass(frozen=True)
class HeadInputs(Rows):
    """The hidden states that heads read, after the final norm."""

    last: Tensor  # (n, width), of the last token of each prompt
    visual: Tensor  # (n, tokens, width), of the visual tokens, padded with zeros
    real: Tensor  # (n, tokens) bool, False for padding
    places: Tensor  # (n, tokens) int64, place of each visual token in its image

    @classmethod
    def cat(cls, parts: Sequence[HeadInputs]) -> HeadInputs:
        """Concatenate batches."""
        most = max(part.visual.shape[1] for part in parts)

        def padded(tensor: Tensor) -> Tensor:
            return F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, most - tensor.shape[1]))

        last, *others = zip(*((p.last, p.visual, p.real, p.places) for p in parts), strict=True)
        return cls(torch.cat(last), *(torch.cat(list(map(padded, one))) for one in others))


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of a batch that was padded on the right."""

    hidden: Tensor  # (n, length, width), after the final norm
    prompts: tuple[int, ...]  # tokens of each prompt
    lengths: tuple[int, ...]  # tokens of each prompt and answer
    answers: Tensor  # (n, length) int64 token ids; those behind the prompts are answers
    cells: tuple[Tensor, ...]  # see `Encoded.cells`
    places: tuple[Tensor, ...]  # see `Encoded.places`

    @classmethod
    def of(cls, batch: Sequence[Encoded], hidden: Tensor, ids: Tensor) -> HiddenStates:
        """Describe the hidden states of a batch, padded as `ids` are."""
        prompts, lengths = [item.prompt for item in batch], [item.length for item in batch]
        cells, places = zip(*((item.cells, item.places) for item in batch), strict=True)
        return cls(hidden, tuple(prompts), tuple(lengths), ids, cells, places)

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """Split the batch into batches of `counts` rows."""
        rows = [slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]
        return [
            HiddenStates(
                hidden, self.prompts[some], self.lengths[some], self.answers[some],
                self.cells[some], self.places[some],
            )
            for some, hidden in zip(rows, self.hidden.split(list(counts)), strict=True)
        ]  # fmt: skip

    def head_inputs(self) -> HeadInputs:
        """Return the hidden states that heads read."""
        device, width = self.hidden.device, self.hidden.shape[2]
        at = torch.tensor([prompt - 1 for prompt in self.prompts], device=device)
        last = self.hidden[torch.arange(len(at), device=device), at]
        counts = [len(one) for one in self.places]  # on the CPU: a GPU is not waited for
        most = max(counts)
        cells = pad_sequence(list(self.cells), batch_first=True).to(device)
        visual = self.hidden.gather(1, cells[..., None].expand(-1, -1, width))
        real = torch.arange(most, device=device) < torch.tensor(counts, device=device)[:, None]
        if min(counts) < most:
            visual = visual.masked_fill(~real[..., None], 0)
        places = pad_sequence(list(self.places), batch_first=True).to(device)
        return HeadInputs(last, visual, real, places)

    def answer_pairs(self) -> tuple[Tensor, Tensor]:
        """Return the hidden state before each answer token, (tokens, width), and the tokens."""
        places = torch.arange(self.hidden.shape[1], device=self.hidden.device)
        start = torch.tensor(self.prompts, device=places.device)[:, None]
        end = torch.tensor(self.lengths, device=places.device)[:, None]
        answer = (places >= start) & (places < end)
        return self.hidden[answer.roll(-1, dims=1)], self.answers[answer]
