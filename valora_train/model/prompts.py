"""Examples, their encoded form, and the hidden states that heads and losses read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
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

    def split(self, counts: Sequence[int], tokens: Sequence[int]) -> list[HeadInputs]:
        """Split the batch into batches of `counts` rows, of at most `tokens` visual tokens each."""
        parts = (
            part.split(list(counts)) for part in (self.last, self.visual, self.real, self.places)
        )
        return [
            HeadInputs(last, visual[:, :most], real[:, :most], places[:, :most])
            for most, last, visual, real, places in zip(tokens, *parts, strict=True)
        ]

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
        read: Gives the head inputs of a part of a batch; None where nothing is a part of it.
    """

    hidden: Tensor
    visual: Tensor
    prompts: tuple[int, ...]
    lengths: tuple[int, ...]
    answers: Tensor
    places: tuple[Tensor, ...]
    read: Callable[[], HeadInputs] | None = None

    def split(self, counts: Sequence[int]) -> list[HiddenStates]:
        """Split the batch into batches of `counts` rows, whose head inputs are computed once."""
        counts = list(counts)
        ends = list(accumulate(counts))
        rows = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]

        @cache
        def read_all() -> list[HeadInputs]:
            tokens = [max(map(len, self.places[some]), default=0) for some in rows]
            return self.head_inputs().split(counts, tokens)

        def read(place: int) -> HeadInputs:
            return read_all()[place]

        whole = (self.hidden.split(counts), self.visual.split(counts), self.answers.split(counts))
        return [
            HiddenStates(
                hidden, visual, self.prompts[some], self.lengths[some], answers, self.places[some],
                partial(read, place),
            )
            for place, (some, hidden, visual, answers) in enumerate(zip(rows, *whole, strict=True))
        ]  # fmt: skip

    def head_inputs(self) -> HeadInputs:
        """Return the hidden states that heads read.

        How many visual tokens a row has is known on the CPU, so that a GPU is not waited for.
        """
        if self.read is not None:
            return self.read()
        device, width = self.hidden.device, self.hidden.shape[2]
        at = torch.tensor([prompt - 1 for prompt in self.prompts], device=device)
        last = self.hidden[torch.arange(len(at), device=device), at]
        counts = [len(one) for one in self.places]
        most = max(counts)
        # The first in a stable order of places without and with a visual token.
        order = (~self.visual).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
        visual = self.hidden.gather(1, order[..., None].expand(-1, -1, width))
        real = torch.arange(most, device=device) < torch.tensor(counts, device=device)[:, None]
        if min(counts) < most:
            visual = visual.masked_fill(~real[..., None], 0)
        places = pad_sequence(list(self.places), batch_first=True).to(device)
        return HeadInputs(last, visual, real, places)

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
