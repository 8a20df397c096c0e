"""A request on its way through the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from valora_serve.orchestrator.decision import RequestView

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Generator, Tensor

    from valora_data.contract.heads import Head
    from valora_serve.memory.block_manager import Span
    from valora_serve.model.detokenizer import Detokenizer
    from valora_serve.model.lmm import Prompt, VisualFeatures
    from valora_serve.types import Finish, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """What the engine knows of a request.

    Attributes:
        request: What was asked.
        prompt: Ready tokens and pixels.
        adapter: Name of the adapter that acts, None for the base model.
        head: The head that answers, None to generate.
        view: What the policies see of it.
        ids: Prompt and generated tokens, as far as the host knows them.
        prompt_tokens: How many of them are the prompt.
        salt: Of the prefix cache.
        spans: Images in the prompt, for the prefix cache.
        vision: Content hash of what of the adapter changes how images are encoded.
        text: Turns tokens into text.
        generator: Randomness of its own.
        max_new: Tokens to generate at most.
        arrival: When it came, monotonic seconds.
        place: Among the running requests, None while it waits.
        computed: Tokens whose keys and values are in the cache, those of the running step
            included.
        pending: Tokens that the device has chosen and the host has not seen yet.
        chosen: Whether its last token lies at its place on the device.
        cached: Prompt tokens that the prefix cache had.
        features: Encoded images by number, kept while the prompt is computed.
        hidden: What its head reads, as it comes.
        started: When it was first computed.
        first_token: When its first token was there.
        finish: Why it ended.
        preemptions: How often it lost its memory.
    """

    request: Request
    prompt: Prompt
    adapter: str | None
    head: Head | None
    view: RequestView
    ids: list[int]
    prompt_tokens: int
    salt: bytes
    spans: list[Span]
    vision: bytes
    text: Detokenizer
    generator: Generator | None
    max_new: int
    arrival: float
    place: int | None = None
    computed: int = 0
    pending: int = 0
    chosen: bool = False
    cached: int = 0
    features: dict[int, VisualFeatures] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)
    started: float | None = None
    first_token: float | None = None
    finish: Finish | None = None
    preemptions: int = 0

    @property
    def id(self) -> str:
        """Of the request."""
        return self.request.id

    @property
    def length(self) -> int:
        """Tokens, those included that only the device knows."""
        return len(self.ids) + self.pending

    @property
    def generated(self) -> int:
        """Tokens generated, those included that only the device knows."""
        return self.length - self.prompt_tokens

    @property
    def left(self) -> int:
        """Tokens still to be computed before the next one can be chosen."""
        return self.length - self.computed

    def positions(self, start: int, end: int) -> NDArray[np.int64]:
        """[3, rows] positions of tokens `start` to `end`, also of generated ones."""
        assert self.prompt.positions is not None
        known = self.prompt.positions[:, start:end]
        first = start + known.shape[1]
        rest = np.arange(first, end)[None] + self.prompt.delta
        return np.concatenate([known, np.repeat(rest, 3, axis=0)], axis=1)

    def visuals(
        self, start: int, end: int
    ) -> list[tuple[NDArray[np.int64], VisualFeatures, NDArray[np.int64]]]:
        """Visual rows among tokens `start` to `end`: where, of what, and which of its rows."""
        found = []
        for number, visual in enumerate(self.prompt.visuals):
            which = np.flatnonzero((visual.at >= start) & (visual.at < end))
            if which.size:
                found.append((visual.at[which] - start, self.features[number], which))
        return found

    def kept(self, start: int, end: int) -> NDArray[np.int64]:
        """Rows among tokens `start` to `end` that the head reads."""
        assert self.head is not None
        if not self.head.reads_visual:
            last = self.prompt_tokens - 1
            return np.array([last - start] if start <= last < end else [], np.int64)
        at = np.concatenate([visual.at for visual in self.prompt.visuals])
        return at[(at >= start) & (at < end)] - start
