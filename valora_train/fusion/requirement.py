"""What a domain must reach: its contract, its requirement, and the bar that validation sets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from valora_train.settings import DomainSettings

ROUNDING = 1e-9
"""What sums of decimal fractions may be off by: 0.80 + 0.02 is a little more than 0.82."""


CONTRACT = "contract"
"""Key of a domain's contract, in bundles and in the settings of stages."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What an application asks of a domain, before its teacher's accuracy is known.

    Attributes:
        required: Accuracy that it must keep in any case; None where only the teacher counts.
        of_teacher: Share of its teacher's accuracy that it must keep as well, in (0, 1]; None
            where only `required` counts.
        largest: Largest value of the metric.
    """

    required: float | None
    of_teacher: float | None = None
    largest: float = 1.0

    def accuracy(self, teacher: float | None) -> float:
        """The accuracy to keep on a split: the larger of both figures.

        Args:
            teacher: The teacher's accuracy on the split; not used without `of_teacher`.
        """
        return max(self.required or 0.0, self._share(teacher))

    def requirement(
        self, name: str, margin: float, validation: float | None, test: float | None
    ) -> Requirement:
        """What the domain must reach.

        Args:
            name: Name of the domain, for messages.
            margin: Asked for on top on the validation split (`fusion.margin`).
            validation: The teacher's accuracy on the validation split, None if it is unknown.
            test: Its accuracy on the test split.

        Raises:
            SettingsError: If a share is asked of a teacher that reaches nothing, or whose accuracy
                is unknown.
        """
        if self.of_teacher is None:
            return Requirement(self.accuracy(None), margin, self.largest)
        remedy = (
            f"set domains.{name}.of_teacher=null with an accuracy of its own in "
            f"domains.{name}.required"
        )
        if validation is None:
            raise SettingsError(
                f"the accuracy of the teacher of domain {name} on validation is unknown, so that "
                f"{self.of_teacher:g} of it says nothing: label validation images, or {remedy}"
            )
        if not validation > 0.0:
            raise SettingsError(
                f"the teacher of domain {name} reaches {validation:.3f} on validation, so that "
                f"{self.of_teacher:g} of it asks for nothing: check the teacher, or {remedy}"
            )
        required, share = self.accuracy(validation), self._share(validation)
        promised = required if test is None else self.accuracy(test)
        asked = f"{share:.3f} = {self.of_teacher:g} × the teacher's {validation:.3f}"
        if self.required is None:
            return Requirement(required, margin, validation, asked, promised=promised)
        floor = Requirement(self.required, margin, self.largest)
        if share <= self.required:
            origin = f"{self.required:.3f}, above {asked}"
            return replace(floor, origin=origin, promised=promised)
        # A bar above what the teacher itself reaches would make no sense, so that its accuracy
        # limits the margin; what `required` alone asks for stays asked for.
        origin = f"{asked}, above {self.required:.3f}"
        return Requirement(required, margin, validation, origin, floor.bar, promised)

    def _share(self, teacher: float | None) -> float:
        return 0.0 if self.of_teacher is None or teacher is None else self.of_teacher * teacher

    def as_json(self) -> dict[str, float | None]:
        """The contract in a bundle."""
        return {"required": self.required, "of_teacher": self.of_teacher}


def dedicated_requirement(
    validation: float, test: float | None, share: float, margin: float
) -> Requirement:
    """What a domain must reach that must keep a share of what it reaches in its own adapter.

    Args:
        validation: Accuracy of the domain in an adapter of its own on the validation split.
        test: The same on the test split; None if it does not matter.
        share: The share (`fusion.of_dedicated`), in (0, 1].
        margin: Asked for on top on the validation split, but no more than the adapter reaches.
    """
    required = share * validation
    origin = f"{required:.3f} = {share:g} × the dedicated adapter's {validation:.3f}"
    return Requirement(
        required, margin, validation, origin, promised=None if test is None else share * test
    )


def contract_of(domain: DomainSettings) -> Contract:
    """The contract of a domain, as `Settings.chosen` completes it."""
    assert domain.task is not None, "`Settings.chosen` fills it in"
    return Contract(domain.required, domain.of_teacher, domain.task.spec.largest)


@dataclass(frozen=True, slots=True)
class Requirement:
    """The accuracy that a domain must keep.

    Attributes:
        required: Accuracy on the validation split, by the task's metric.
        margin: Asked for on top when a decision is made on the validation split. At most half of
            what lies between the requirement and `largest` is used, so that the bar can be reached
            and is still stricter than the requirement.
        largest: Largest value that can be asked for: that of the metric, or the teacher's accuracy
            where a share of it is required.
        origin: The requirement with its origin, e.g. ``0.777 = 0.85 × the teacher's 0.914``.
        least: Least value of the bar.
        promised: Accuracy on the test split; None for `required`. They differ where a share of the
            teacher's accuracy is asked for, because the teacher reaches another one on test.
    """

    required: float
    margin: float = 0.0
    largest: float = 1.0
    origin: str = ""
    least: float = -math.inf
    promised: float | None = None

    @property
    def bar(self) -> float:
        """Accuracy on the validation split from which the requirement counts as kept."""
        bar = min(self.required + self.margin, (self.required + self.largest) / 2)
        return max(bar, self.least)

    def met_by(self, accuracy: float) -> bool:
        """Whether an accuracy on the validation split reaches the bar; NaN does not."""
        return accuracy >= self.bar - ROUNDING

    def kept_from(self, alone: float | None, without: float | None = None) -> float:
        """Accuracy on the validation split from which a domain keeps what it must in an adapter.

        That is the bar. A domain that misses it even alone keeps what it reached there, less the
        margin, so that it may share an adapter although it is flagged.

        Args:
            alone: What the domain reached alone, if that missed the bar; otherwise None.
            without: What it reaches without LoRA, if it may take no adapter: it keeps that, too.
        """
        if alone is None:
            return self.bar - ROUNDING
        least = alone - self.margin
        return (least if without is None else max(least, without)) - ROUNDING

    def kept_by(self, facts: Mapping[str, Any]) -> bool:
        """Whether a measured domain keeps the promise.

        Args:
            facts: Its accuracies on validation (`val`) and test (`test`).
        """
        beyond: float = min(facts["val"] - self.required, facts["test"] - self.promise)
        return beyond >= -ROUNDING

    @property
    def promise(self) -> float:
        """Accuracy on the test split that the bundle promises."""
        return self.required if self.promised is None else self.promised

    @property
    def text(self) -> str:
        """The bar and where it comes from: ``0.820 (required 0.800 + margin 0.020)``."""
        origin = self.origin or format(self.required, ".3f")
        required = f"required {origin}{',' if ',' in origin else ''}"
        used = self.bar - self.required
        if max(abs(used), abs(self.margin)) < ROUNDING:
            return f"{self.bar:.3f} ({required.removesuffix(',')})"
        sign = "+" if used >= 0 else "−"
        cut = "" if self.margin <= used + ROUNDING else f", cut from {self.margin:.3f}"
        return f"{self.bar:.3f} ({required} {sign} margin {abs(used):.3f}{cut})"
