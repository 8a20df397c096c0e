"""What a runner prepares once, so that no step waits for it: graphs and compiled kernels."""

from __future__ import annotations

from typing import NamedTuple

DECODE, PROMPT, CROWDED = "decode", "prompt", "crowded"
VISION, KERNELS = "vision", "kernels"
"""Kinds of preparations: graphs of decode steps, of steps with prompts, of those beside which many
rows decode, and of the encoding of images; and compiled kernels."""

LIKELY = {
    DECODE: (1, 8, 32), PROMPT: (64, 256, 1024), CROWDED: (), VISION: (1, 4, 32), KERNELS: (),
}  # fmt: skip
"""Rows of the steps that most servers compute first, and numbers of images, or of windows of an
image (32 hold 640 × 480 pixels)."""

MIXTURE = 2
"""LoRA terms per row in mixture mode, which needs several adapters with requests."""


class Preparation(NamedTuple):
    """Something that is prepared once.

    Attributes:
        kind: Kind of it.
        size: Rows of a graph, or images; rows with an adapter for kernels, 0 for those of a whole
            step.
        terms: LoRA terms per row.
    """

    kind: str
    size: int
    terms: int

    @property
    def likely(self) -> bool:
        """Whether most servers need it soon."""
        return self.size in LIKELY[self.kind]

    def order(self, largest: int) -> tuple[bool, bool, bool, int]:
        """Order in which graphs are captured.

        The largest come first: they hold every step until smaller ones do, and those that follow
        fit into their memory.

        Args:
            largest: Largest size of the kind.
        """
        return self.size != largest, not self.likely, self.terms == MIXTURE, self.size
