"""What a runner prepares once, so that no step waits for it: graphs and compiled kernels."""

from __future__ import annotations

from typing import NamedTuple

# Graphs of decode steps, of steps with prompts, of those beside which many rows decode, and of the
# encoding of images; and compiled kernels.
DECODE, PROMPT, CROWDED, VISION, KERNELS = "decode", "prompt", "crowded", "vision", "kernels"
# Rows of the steps that most servers compute first, and numbers of images, or of windows of an
# image (32 hold 640 × 480 pixels).
LIKELY = {DECODE: (1, 8, 32), PROMPT: (64, 256, 1024), VISION: (1, 4, 32)}
MIXTURE = 2  # LoRA terms per row in mixture mode, which needs several adapters with requests


class Preparation(NamedTuple):
    """Something that is prepared once."""

    kind: str
    size: int  # rows of a graph, or images; rows with an adapter for kernels, 0: of a whole step
    terms: int  # LoRA terms per row

    @property
    def likely(self) -> bool:
        """Whether most servers need it soon."""
        return self.size in LIKELY.get(self.kind, ())

    def order(self, largest: int) -> tuple[bool, bool, bool, int]:
        """Order of captures: the largest of a kind first, in whose memory smaller ones fit."""
        return self.size != largest, not self.likely, self.terms == MIXTURE, self.size
