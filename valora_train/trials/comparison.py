"""Ways to serve the domains of a task, side by side: what is trained, and what each one costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from valora_train.trials.oracle import HEAD_ONLY, JOINT
from valora_train.trials.store import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from valora_train.settings import CompareSettings, FusionSettings
    from valora_train.trials.inputs import TrialInputs

    Run = Callable[[Sequence[Trial]], list[dict[str, Any]]]

MERGE = "merge"
EWC = "ewc"
FUSION = "fusion"
PAPER = "paper"
DIGITS = 6
"""Decimals of a requirement, which names the trials."""


@dataclass(frozen=True)
class Contender:
    """What one way of serving the domains reaches with one seed.

    Attributes:
        name: The way, e.g. ``dedicated adapters`` or ``rehearsal at 95 %``.
        seed: The seed.
        adapters: Number of adapters.
        worst: The least share, over domains, of its dedicated adapter's accuracy on test.
        mean: The mean of these shares.
        attempts: Trainings of an adapter.
        minutes: Minutes of training and measuring, on one process.
        kept: Domains that keep their requirement on test; None where nothing is required.
        device: Where it was trained, e.g. ``cpu``; of several ``cpu, cuda``.
    """

    name: str
    seed: int
    adapters: int
    worst: float
    mean: float
    attempts: int
    minutes: float
    kept: int | None = None
    device: str = ""


def run_comparison(inputs: TrialInputs, run: Run) -> list[dict[str, Any]]:
    """Train all that a comparison needs: fusions follow what dedicated adapters reach.

    Args:
        inputs: Settings, domains and samples.
        run: Runs trials and returns their results, in order.
    """
    names, settings = list(inputs.domains), inputs.settings
    results = run(first_trials(names, settings.compare))
    largest = {name: inputs.domain(name).domain().task.spec.largest for name in names}
    more = fusion_trials(names, results, settings.compare, settings.fusion, largest)
    return results + (run(more) if more else [])


def first_trials(domains: Sequence[str], settings: CompareSettings) -> list[Trial]:
    """The trials that depend on no requirement.

    Args:
        domains: Names of the domains, in order.
        settings: Seeds, and what is compared.
    """
    names = tuple(domains)
    ordered = tuple(sorted(names))  # as in an oracle, which shares these trials
    return [
        trial
        for seed in settings.seeds
        for trial in (
            *(Trial(JOINT, (name,), seed) for name in ordered),
            *(Trial(HEAD_ONLY, (name,), seed) for name in ordered),
            Trial(JOINT, ordered, seed),
            *([Trial(MERGE, names, seed)] if settings.merge else []),
            *(Trial(EWC, names, seed, {"strength": value}) for value in settings.ewc),
        )
    ]


def fusion_trials(
    domains: Sequence[str],
    results: Iterable[Mapping[str, Any]],
    settings: CompareSettings,
    fusion: FusionSettings,
    largest: Mapping[str, float],
) -> list[Trial]:
    """The fusions: every strategy at every share, for every seed.

    Args:
        domains: Names of the domains, in order.
        results: Results of `first_trials`.
        settings: Seeds, strategies and shares.
        fusion: Order of the domains, and whether they may take no adapter.
        largest: Largest value of each domain's metric.
    """
    dedicated = dedicated_accuracy(results)
    trials = []
    for seed in settings.seeds:
        for share in settings.shares:
            required = {
                name: (
                    round(share * dedicated[seed][name]["val"], DIGITS),
                    0.0,
                    largest[name],
                )
                for name in domains
            }
            for strategy in settings.strategies:
                options = {
                    "strategy": strategy,
                    "order": "random" if strategy == PAPER else fusion.order,
                    "head_only": fusion.head_only and strategy != PAPER,
                }
                more = {
                    "fusion": options, "required": required, "share": share, "dedicated": True,
                }  # fmt: skip
                trials.append(Trial(FUSION, tuple(domains), seed, more))
    return trials


def dedicated_accuracy(
    results: Iterable[Mapping[str, Any]],
) -> dict[int, dict[str, dict[str, float]]]:
    """What each domain reaches in an adapter of its own (`val`, `test`), by seed and domain."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in results:
        if row["method"] == JOINT and len(row["domains"]) == 1:
            (name,) = row["domains"]
            reached = row["accuracy"][name]
            found.setdefault(row["seed"], {})[name] = {
                split: reached[split] or 0.0 for split in ("val", "test")
            }
    return found


def contenders(results: Sequence[Mapping[str, Any]]) -> list[Contender]:
    """Every way of serving the domains, for every seed.

    Args:
        results: Results of `first_trials` and `fusion_trials`.
    """
    dedicated = dedicated_accuracy(results)
    found = []
    for seed, alone in dedicated.items():
        rows = [row for row in results if row["seed"] == seed]
        single = [row for row in rows if row["method"] == JOINT and len(row["domains"]) == 1]
        without = [row for row in rows if row["method"] == HEAD_ONLY]
        for name, parts, adapters in (
            ("dedicated adapters", single, len(single)),
            ("without LoRA", without, 0),
        ):
            accuracy = {key: value for row in parts for key, value in row["accuracy"].items()}
            seconds = sum(row["seconds"] for row in parts)
            one = _contender(name, seed, adapters, accuracy, alone, adapters, seconds)
            found.append(replace(one, device=_devices(parts)))
        for row in rows:
            found += [replace(one, device=_devices([row])) for one in _of_row(row, alone)]
    return found


def _devices(rows: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(sorted({str(row.get("device", "")) for row in rows}))


def _of_row(row: Mapping[str, Any], alone: Mapping[str, Mapping[str, float]]) -> list[Contender]:
    method, seed, seconds = row["method"], row["seed"], row["seconds"]
    if method == MERGE:
        return [
            _contender(
                f"merged: {way}", seed, 1, one["accuracy"], alone, row["attempts"], one["seconds"]
            )
            for way, one in row.get("variants", {}).items()
        ]
    if method == JOINT and len(row["domains"]) == len(alone) > 1:
        name = "one joint adapter"
    elif method == EWC:
        name = f"EWC, strength {row['options']['strength']:g}"
    elif method == FUSION:
        name = f"{row['options']['fusion']['strategy']} at {row['options']['share']:.0%}"
    else:
        return []
    return [
        _contender(
            name, seed, len(row["adapters"]), row["accuracy"], alone, row["attempts"], seconds,
            row["options"].get("share"),
        )
    ]  # fmt: skip


def _contender(
    name: str,
    seed: int,
    adapters: int,
    accuracy: Mapping[str, Mapping[str, Any]],
    alone: Mapping[str, Mapping[str, float]],
    attempts: int,
    seconds: float,
    share: float | None = None,
) -> Contender:
    shares = [
        (accuracy[domain]["test"] or 0.0) / reached["test"]
        for domain, reached in alone.items()
        if reached["test"] > 0
    ]
    kept = None if share is None else sum(one >= share for one in shares)
    worst, mean = min(shares, default=0.0), fmean(shares or [0.0])
    return Contender(name, seed, adapters, worst, mean, attempts, seconds / 60, kept)


def pareto(rows: Sequence[tuple[float, float]]) -> list[int]:
    """Which of some (adapters, worst share) no other beats: fewer adapters, or a larger share.

    Returns:
        Their places, by rising number of adapters.
    """
    front: list[int] = []
    for place in sorted(range(len(rows)), key=lambda at: (rows[at][0], -rows[at][1])):
        if not front or rows[place][1] > rows[front[-1]][1]:
            front.append(place)
    return front
