"""Examples, their encoded form, and the hidden states that heads and losses read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from PIL.Image import Image

    Size = tuple[int, int]
    """Width and height in pixels."""


@dataclass(frozen=True, slots=True)
class Example:
    """One question about images, with the answer to learn.

    Attributes:
        question: Text of the turn; it precedes the images.
        images: Images, or frames of a video, in order; none for a question about a context, of
            which only the tail is encoded (see `valora_data.contract.contexts`).
        video: Whether the images are the frames of one video.
        answer: Returns the text to learn, given the size of the first image as the encoder sees
            it; None if a head answers.
    """

    question: str
    images: tuple[Image, ...]
    video: bool = False
    answer: Callable[[Size], str] | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as the language model takes it.

    Attributes:
        ids: (length,) int64 on the CPU: token ids of the prompt, then of the answer to learn.
        visual: (length,) bool on the CPU, whether a token is visual.
        prompt: Number of tokens of the prompt.
        pixels: Arguments of the vision encoder by name; empty if `features` are kept.
        features: (visual tokens, width), encoded images; None if they are encoded each time.
        deep: For each of the first layers to whose outputs features are added (Qwen3-VL), the
            same shape as `features`.
        positions: (3, length) int64, rotary positions in time, height and width; None if a
            token's position is its index.
        seen: Width and height of the first image as the encoder sees it, in pixels.
        grid: Rows and columns of visual tokens of the first image.
        places: (visual tokens,) int64 on the CPU, see `contract.grid_pooling.places_of`.
    """

    ids: Tensor
    visual: Tensor
    prompt: int
    seen: Size
    grid: tuple[int, int]
    places: Tensor
    pixels: Mapping[str, Tensor] = field(default_factory=dict)
    features: Tensor | None = None
    deep: tuple[Tensor, ...] = ()
    positions: Tensor | None = None

    @property
    def length(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Size of pixels or features in memory."""
        kept = [*self.pixels.values(), *self.deep]
        kept += [] if self.features is None else [self.features]
        return sum(tensor.nelement() * tensor.element_size() for tensor in kept)

    @property
    def last(self) -> int | None:
        """Position of the last token; None if a token's position is its index."""
        return None if self.positions is None else int(self.positions[:, -1].max())


@dataclass(frozen=True)
class HeadInputs:
    """The hidden states that heads read, after the final norm.

    Attributes:
        last: (n, width), hidden state of the last token of each prompt.
        visual: (n, tokens, width), hidden states of the visual tokens, padded with zeros.
        real: (n, tokens) bool, False for padding.
        places: (n, tokens) int64, place of each visual token in its image.
    """

    last: Tensor
    visual: Tensor
    real: Tensor
    places: Tensor

    @classmethod
    def cat(cls, parts: Sequence[HeadInputs]) -> HeadInputs:
        """Concatenate batches."""
        most = max(part.visual.shape[1] for part in parts)

        def padded(part: Tensor) -> Tensor:
            short = most - part.shape[1]
            if not short:
                return part
            return torch.cat([part, part.new_zeros(len(part), short, *part.shape[2:])], dim=1)

        return cls(
            torch.cat([part.last for part in parts]),
            torch.cat([padded(part.visual) for part in parts]),
            torch.cat([padded(part.real) for part in parts]),
            torch.cat([padded(part.places) for part in parts]),
        )

    def __getitem__(self, rows: Tensor) -> HeadInputs:
        return HeadInputs(self.last[rows], self.visual[rows], self.real[rows], self.places[rows])

    def to(self, device: torch.device | str) -> HeadInputs:
        """Return the same on a device."""
        parts = (self.last, self.visual, self.real, self.places)
        return HeadInputs(*(part.to(device) for part in parts))

    @property
    def bytes(self) -> int:
        """Size in memory."""
        parts = (self.last, self.visual, self.real, self.places)
        return sum(part.nelement() * part.element_size() for part in parts)


@dataclass(frozen=True)
class HiddenStates:
    """Last hidden states of a batch that was padded on the right.

    Attributes:
        hidden: (n, length, width), hidden states after the final norm.
        visual: (n, length) bool, whether a token is visual.
        prompts: Number of tokens of each prompt.
        lengths: Number of tokens of each prompt and answer.
        answers: (n, length) int64 token ids; those behind the prompts are answers.
        places: For each row (visual tokens,) int64 on the CPU, see `Encoded.places`.
    """

    hidden: Tensor
    visual: Tensor
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    answers: Tensor
    places: tuple[Tensor, ...]

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """Split the batch into batches of `counts` rows."""
        parts, start = [], 0
        for count in counts:
            rows = slice(start, start + count)
            parts.append(
                HiddenStates(
                    self.hidden[rows],
                    self.visual[rows],
                    self.prompts[rows],
                    self.lengths[rows],
                    self.answers[rows],
                    self.places[rows],
                )
            )
            start += count
        return parts

    def head_inputs(self) -> HeadInputs:
        """Return the hidden states that heads read."""
        n, _, width = self.hidden.shape
        rows = torch.arange(n, device=self.hidden.device)
        at = torch.tensor([prompt - 1 for prompt in self.prompts], device=self.hidden.device)
        last = self.hidden[rows, at]
        counts = self.visual.sum(1)
        most = int(counts.max())
        real = torch.arange(most, device=self.hidden.device) < counts[:, None]
        places = pad_sequence(list(self.places), batch_first=True).to(self.hidden.device)
        if bool(real.all()):
            return HeadInputs(last, self.hidden[self.visual].view(n, most, width), real, places)
        seen = self.hidden[self.visual].split(counts.tolist())
        return HeadInputs(last, pad_sequence(list(seen), batch_first=True), real, places)

    def answer_pairs(self) -> tuple[Tensor, Tensor]:
        """Return the answer tokens of all rows with the hidden states that predict them.

        Returns:
            (tokens, width), the hidden state before each answer token, and (tokens,) int64, the
            answer tokens.
        """
        places = torch.arange(self.hidden.shape[1], device=self.hidden.device)
        start = torch.tensor(self.prompts, device=places.device)[:, None]
        end = torch.tensor(self.lengths, device=places.device)[:, None]
        answer = (places >= start) & (places < end)
        before = answer.roll(-1, dims=1)
        return self.hidden[before], self.answers[answer]
