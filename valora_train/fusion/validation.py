"""What decisions rest on: how far an accuracy on the validation split can be off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from valora_data.wording import plural
from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from valora_train.fusion.requirement import Contract, Requirement

ENOUGH = 50
"""Validation samples from which one of them weighs less than the usual margin."""
REMEDY = "source.counts, source.fractions, or a larger split"
NORMAL_95 = 1.959963984540054  # two-sided 95 % quantile


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share that was counted.

    Args:
        share: The share, in [0, 1].
        count: Number of samples, at least 1.
    """
    z = NORMAL_95**2 / count
    centre = (share + z / 2) / (1 + z)
    half = math.sqrt(share * (1 - share) * z + z * z / 4) / (1 + z)
    return max(0.0, centre - half), min(1.0, centre + half)


def few_test_samples(domain: str, count: int, contract: Contract) -> str | None:
    """What to tell of a test split that is too small to promise on; None if it is not.

    Args:
        domain: Name of the domain.
        count: Number of its test samples.
        contract: What it must keep.
    """
    if count >= ENOUGH:
        return None
    text = f"{domain}: {plural(count, 'test sample')} can confirm little of what a bundle promises"
    return f"{text}{_interval(count, contract)}; give it at least {ENOUGH}, better 300 ({REMEDY})"


def _interval(count: int, contract: Contract) -> str:
    """Words about the interval of an accuracy as required, where it is a share of the samples."""
    if contract.largest != 1.0:
        return ""
    asked = contract.required or contract.of_teacher or 1.0
    low, high = wilson_interval(asked, count)
    return f": at {asked:.3f} the 95 % interval is {low:.2f} to {high:.2f}, {high - low:.2f} wide"


def few_samples(domain: str, count: int, contract: Contract, margin: float) -> str | None:
    """What to tell of a validation split that is too small to decide on; None if it is not.

    Args:
        domain: Name of the domain.
        count: Number of its validation samples.
        contract: What it must keep.
        margin: Asked for on top when decisions are made (`fusion.margin`).

    Raises:
        SettingsError: If there is one sample, which can decide nothing.
    """
    if count < 2:
        raise SettingsError(
            f"domain {domain} has {count} validation sample, which can decide nothing: give it "
            f"more ({REMEDY})"
        )
    if count >= ENOUGH:
        return None
    text = f"{domain}: {count} validation samples are too few to decide on"
    if interval := _interval(count, contract):
        text += f"{interval}, and one sample weighs {1 / count:.3f} (margin {margin:g})"
    return f"{text}; give it at least {ENOUGH}, better 300 ({REMEDY})"


def weak_teacher(
    domain: str, requirement: Requirement, alone: float, teacher: float | None
) -> str | None:
    """What to tell of a teacher that has little to teach; None if it is better than the head alone.

    Args:
        domain: Name of the domain.
        requirement: What it must reach.
        alone: Its accuracy on validation without LoRA.
        teacher: The teacher's accuracy on validation; None where there is no teacher.
    """
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
    if requirement.bar > teacher:
        return (
            f"{domain}: {requirement.text} is asked for, more than the {teacher:.3f} that its "
            "teacher reaches on validation: expect it to be out of reach, or improve the teacher"
        )
    return None
