"""What a domain must reach: its requirement, and the target that validation sets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from valora_data.wording import plural
from valora_train.errors import SettingsError
from valora_train.settings import DomainSettings

ROUNDING = 1e-9  # sums of decimal fractions may be off: 0.80 + 0.02 is a little more than 0.82
CONTRACT = "contract"  # key of a domain's contract, in bundles and in the settings of stages
ENOUGH = 50  # samples of a split from which one of them weighs less than the usual margin
NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile
REMEDY = "source.counts, source.fractions, or a larger split"


@dataclass(frozen=True, slots=True)
class Requirement:
    """The accuracy that a domain must keep."""

    required: float  # on the validation split, by the task's metric
    margin: float = 0.0  # asked for on top when a decision is made on the validation split
    largest: float = 1.0  # that can be asked for: the metric's, or the accuracy that is shared
    origin: str = ""  # the requirement in words, e.g. ``0.777 = 0.85 × the teacher's 0.914``
    least: float = -math.inf  # value of the target
    on_test: float | None = None  # on test, where the teacher reaches another accuracy

    @property
    def target(self) -> float:
        """Accuracy on validation to reach: above it by the margin, or half of what is left."""
        target = min(self.required + self.margin, (self.required + self.largest) / 2)
        return max(target, self.least)

    def met_by(self, accuracy: float) -> bool:
        """Whether an accuracy on the validation split reaches the target; NaN does not."""
        return accuracy >= self.target - ROUNDING

    def kept_from(self, alone: float | None, without: float | None = None) -> float:
        """Accuracy on validation from which a domain keeps what it must in an adapter."""
        if alone is None:
            return self.target - ROUNDING
        least = alone - self.margin  # so that a flagged domain may share an adapter
        return (least if without is None else max(least, without)) - ROUNDING

    def kept_by(self, facts: Mapping[str, Any]) -> bool:
        """Whether a domain keeps it, by its accuracies on validation (`val`) and test (`test`)."""
        beyond: float = min(facts["val"] - self.required, facts["test"] - self.required_on_test)
        return beyond >= -ROUNDING

    @property
    def required_on_test(self) -> float:
        """Accuracy that the bundle reports as required on test."""
        return self.required if self.on_test is None else self.on_test

    @property
    def text(self) -> str:
        """The target and where it comes from: ``0.820 (required 0.800 + margin 0.020)``."""
        origin = self.origin or format(self.required, ".3f")
        required = f"required {origin}{',' if ',' in origin else ''}"
        used = self.target - self.required
        if max(abs(used), abs(self.margin)) < ROUNDING:
            return f"{self.target:.3f} ({required.removesuffix(',')})"
        sign = "+" if used >= 0 else "−"
        cut = "" if self.margin <= used + ROUNDING else f", cut from {self.margin:.3f}"
        return f"{self.target:.3f} ({required} {sign} margin {abs(used):.3f}{cut})"


def contract_requirement(
    domain: DomainSettings, margin: float, validation: float | None, test: float | None
) -> Requirement:
    """What a contract asks on each split: the larger of both figures."""
    assert domain.task is not None, "`Settings.chosen` fills it in"
    least, of_teacher = domain.required or 0.0, domain.of_teacher
    plain = Requirement(least, margin, domain.task.spec.largest)
    if of_teacher is None:
        return plain
    if validation is None or not validation > 0.0:
        reaches = "an unknown accuracy" if validation is None else f"{validation:.3f}"
        name = domain.name
        raise SettingsError(
            f"the teacher of domain {name} reaches {reaches} on validation, so that "
            f"{of_teacher:g} of it asks for nothing: check the teacher and the labels of "
            f"validation, or set domains.{name}.of_teacher=null with an accuracy of its own in "
            f"domains.{name}.required"
        )
    share = of_teacher * validation
    on_test = max(least, share if test is None else of_teacher * test)
    asked = f"{share:.3f} = {of_teacher:g} × the teacher's {validation:.3f}"
    if domain.required is None:
        return Requirement(share, margin, validation, asked, on_test=on_test)
    if share <= least:
        return replace(plain, origin=f"{least:.3f}, above {asked}", on_test=on_test)
    # A target above what the teacher itself reaches would make no sense, so that its accuracy
    # limits the margin; what `required` alone asks for stays asked for.
    return Requirement(
        share, margin, validation, f"{asked}, above {least:.3f}", plain.target, on_test
    )


def dedicated_requirement(
    validation: float, test: float | None, share: float, margin: float
) -> Requirement:
    """What a domain must reach that must keep a share of what its own adapter reaches."""
    required, on_test = share * validation, None if test is None else share * test
    origin = f"{required:.3f} = {share:g} × the dedicated adapter's {validation:.3f}"
    return Requirement(required, margin, validation, origin, on_test=on_test)


def few_samples(
    domain: DomainSettings, validation: int, test: int, share: float | None, margin: float
) -> list[str]:
    """Warnings about splits that are too small to decide, or to confirm."""
    if validation < 2:
        raise SettingsError(
            f"domain {domain.name} has {validation} validation sample, which can decide nothing: "
            f"give it more ({REMEDY})"
        )
    assert domain.task is not None, "`Settings.chosen` fills it in"
    asked, messages = share or domain.required or domain.of_teacher or 1.0, []
    for split, count, does in (("validation", validation, "decide"), ("test", test, "confirm")):
        if count >= ENOUGH:
            continue
        text = f"{domain.name}: {plural(count, f'{split} sample')} can {does} little of what is "
        text += "asked for"
        if domain.task.spec.largest == 1.0:  # CIDEr is no share of the samples
            low, high = wilson_interval(asked, count)
            text += f": at {asked:.3f} the 95 % interval is {low:.2f} to {high:.2f}, "
            text += f"{high - low:.2f} wide"
            if split == "validation":
                text += f", and one sample weighs {1 / count:.3f} (margin {margin:g})"
        messages.append(f"{text}; give it at least {ENOUGH}, better 300 ({REMEDY})")
    return messages


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was counted on `count` samples."""
    z = NORMAL_95**2 / max(count, 1)
    centre = (share + z / 2) / (1 + z)
    half = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return max(0.0, centre - half), min(1.0, centre + half)


def weak_teacher(
    domain: str, requirement: Requirement, alone: float, teacher: float | None
) -> str | None:
    """A warning about a teacher that teaches little, where the head alone reaches `alone`."""
    if teacher is None:
        return None
    if alone > teacher:
        met = requirement.met_by(alone)
        so = "what is asked for is met without LoRA" if met else "it has nothing to teach"
        return (
            f"{domain}: the teacher reaches {teacher:.3f} on validation, less than the {alone:.3f} "
            f"without LoRA, so that {so}: check the teacher (its data and options), or learn from "
            f"labels (domains.{domain}.teacher=labels)"
        )
    if requirement.target > teacher:
        return (
            f"{domain}: {requirement.text} is asked for, more than the {teacher:.3f} that its "
            "teacher reaches on validation: expect it to be out of reach, or improve the teacher"
        )
    return None
