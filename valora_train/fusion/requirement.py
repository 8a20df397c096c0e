"""What a domain must reach: its requirement, and the bar that decisions on validation set."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING = 1e-9
"""What sums of decimal fractions may be off by: 0.80 + 0.02 is a little more than 0.82."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """The accuracy that a domain must keep.

    Attributes:
        required: Accuracy on the task's metric.
        margin: Asked for on top when a decision is made on the validation split. At most half of
            what lies between the requirement and the largest value of the metric is used, so that
            the bar can be reached and is still stricter than the requirement.
        largest: Largest value of the metric.
        origin: Where a relative requirement comes from, e.g. ``0.85 × the teacher's 0.914``.
    """

    required: float
    margin: float = 0.0
    largest: float = 1.0
    origin: str = ""

    @property
    def bar(self) -> float:
        """Accuracy on the validation split from which the requirement counts as kept."""
        return min(self.required + self.margin, (self.required + self.largest) / 2)

    def met_by(self, accuracy: float) -> bool:
        """Whether an accuracy on the validation split reaches the bar; NaN does not."""
        return accuracy >= self.bar - ROUNDING

    def kept_from(self, alone: float | None) -> float:
        """Accuracy on the validation split from which a domain keeps what it must in an adapter.

        That is the bar. A domain that misses it even alone keeps what it reached there, less the
        margin, so that it may share an adapter although it is flagged.

        Args:
            alone: What the domain reached alone, if that missed the bar; otherwise None.
        """
        return (self.bar if alone is None else alone - self.margin) - ROUNDING

    @property
    def text(self) -> str:
        """The bar and where it comes from: ``0.820 (required 0.800 + margin 0.020)``."""
        required = f"required {self.origin or format(self.required, '.3f')}"
        used = self.bar - self.required
        if max(abs(used), abs(self.margin)) < ROUNDING:
            return f"{self.bar:.3f} ({required})"
        sign = "+" if used >= 0 else "−"
        cut = "" if self.margin <= used + ROUNDING else f", cut from {self.margin:.3f}"
        return f"{self.bar:.3f} ({required} {sign} margin {abs(used):.3f}{cut})"
