"""What a fusion promises of each domain, beside its own adapter and its teacher: a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_train.reporting.text import accuracy_text, bytes_text, share_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Facts = Mapping[str, Any]
    """The entry of a domain, or of an adapter, in a bundle's manifest."""


def domain_table(
    domains: Mapping[str, Facts], adapters: Mapping[str, Facts], columns: Sequence[str]
) -> tuple[list[str], list[list[str]]]:
    """The lines of domains, without columns that have nothing to say of any domain.

    Args:
        domains: Entry of each domain in the manifest.
        adapters: Entry of each adapter in the manifest.
        columns: Titles of columns, in `COLUMNS`.

    Returns:
        The titles of the columns that are left, and one row of texts for each domain.
    """
    cells = {
        title: [COLUMNS[title](name, facts, adapters) for name, facts in domains.items()]
        for title in columns
    }
    kept = {title: texts for title, texts in cells.items() if any(text != "–" for text in texts)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def by_adapter(
    domains: Mapping[str, Facts], adapters: Mapping[str, Facts]
) -> dict[str, Mapping[str, Any]]:
    """Domains in the order of their adapters, those without one last."""
    order = {name: place for place, name in enumerate([*adapters, None])}
    names = sorted(domains, key=lambda name: order.get(domains[name].get("adapter"), 0))
    return {name: domains[name] for name in names}


def _adapter(_: str, facts: Facts, adapters: Mapping[str, Facts]) -> str:
    name = facts["adapter"]
    if name is None:
        return "none"
    known = adapters.get(name, {})
    more = [f"rank {known['rank']}"] if "rank" in known else []
    more += [bytes_text(known["bytes"])] if "bytes" in known else []
    return f"{name} ({', '.join(more)})" if more else str(name)


def _test(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
    accuracy = facts["accuracy"]
    low, high = accuracy["test_ci95"]
    missed = "" if facts["status"] == "met" else ", missed"
    return f"{accuracy['test']:.3f} ({low:.3f}–{high:.3f}){missed}"


def _slack(facts: Facts) -> str:
    """How far validation is above the bar."""
    bar, reached = facts.get("bar"), facts["accuracy"].get("val")
    return "–" if bar is None or reached is None else f"{reached - bar:+.3f}"


def _share(ours: str, teachers: str) -> Callable[..., str]:
    """A metric of ours, with its share of the teacher's."""

    def text(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
        one, other = facts["accuracy"].get(ours), facts["accuracy"].get(teachers)
        if one is None or other is None:
            return accuracy_text(one if ours != "test" else None)
        if ours == "test":
            return f"{share_text(one, other)} of {other:.3f}"
        return f"{one:.3f}, {share_text(one, other)} of {other:.3f}"

    return text


def _of_dedicated(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
    """The share of what an adapter of its own reaches on test, and the lower bound of it."""
    share = (facts.get("contract") or {}).get("of_dedicated")
    if not share or not facts["required"]:
        return "–"
    accuracy, alone = facts["accuracy"], facts["required"] / share
    low = accuracy["test_ci95"][0] / alone
    return f"{share_text(accuracy['test'], alone)} of {alone:.3f}, at least {100 * low:.1f} %"


def _calibration(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
    ours, other = (facts["accuracy"].get(key) for key in ("test_ece", "teacher_ece"))
    return _beside(accuracy_text(ours), None if other is None else accuracy_text(other))


def _speed(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
    speed = facts.get("speed")
    if not speed:
        return "–"
    teacher = speed.get("teacher")
    if not teacher:
        return _beside(_per_second(speed), None)
    place = "" if teacher["machine"] == speed["machine"] else f" on {teacher['machine']}"
    return _beside(_per_second(speed), _per_second(teacher) + place)


def _per_second(speed: Facts) -> str:
    rate = speed["images_per_second"]
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _others(_: str, facts: Facts, __: Mapping[str, Facts]) -> str:
    """Metrics of the test split that have no column, e.g. ``within_one 0.98 (teacher 0.97)``."""
    accuracy = facts["accuracy"]
    known = ("test", "test_ci95", "test_map", "test_ece")
    texts = []
    for key, value in accuracy.items():
        if key.startswith("test_") and key not in known:
            name = key.removeprefix("test_")
            other = accuracy.get(f"teacher_{name}")
            ours = f"{name} {value:.3f}"
            texts.append(_beside(ours, None if other is None else accuracy_text(other)))
    return ", ".join(texts) or "–"


def _beside(ours: str, teachers: str | None) -> str:
    return ours if teachers is None else f"{ours} (teacher {teachers})"


COLUMNS: Mapping[str, Callable[[str, Facts, Mapping[str, Facts]], str]] = {
    "domain": lambda name, _, __: name,
    "metric": lambda _, facts, __: facts["metric"],
    "adapter": _adapter,
    "required": lambda _, facts, __: accuracy_text(facts["required"]),
    "bar": lambda _, facts, __: accuracy_text(facts.get("bar")),
    "slack": lambda _, facts, __: _slack(facts),
    "validation": lambda _, facts, __: accuracy_text(facts["accuracy"].get("val")),
    "test (95 %)": _test,
    "without LoRA": lambda _, facts, __: accuracy_text(facts["accuracy"]["head_only"]),
    "of its own adapter": _of_dedicated,
    "of the teacher": _share("test", "teacher"),
    "mAP": _share("test_map", "teacher_map"),
    "calibration error": _calibration,
    "images/s": _speed,
    "other metrics": _others,
}
"""What each column says of a domain."""

PROMISES = (
    "domain", "metric", "adapter", "bar", "validation", "required", "test (95 %)", "without LoRA",
)  # fmt: skip
"""Columns of what a domain must reach and reaches."""

PACKING = (
    "adapter", "domain", "metric", "bar", "validation", "slack", "required", "test (95 %)",
    "without LoRA",
)  # fmt: skip
"""Columns of the packing: the domains of each adapter, and how far they are above their bars."""

BESIDE_OTHERS = (
    "of its own adapter", "of the teacher", "mAP", "calibration error", "images/s", "other metrics",
)  # fmt: skip
"""Columns that compare a domain with an adapter of its own, and with its teacher."""

EXPLANATION = (
    "Decisions are made on validation, where a domain must reach its *bar*: what is asked, plus "
    "the margin. *Required* is promised of *test*, which no decision has used; its accuracy has "
    "its 95 % interval, whose lower end *at least* takes. "
    "*Without LoRA* is the frozen base model on test, with a head of its own or its written "
    "answers. Teachers are measured on test, too; images/s in batches of 32, from decoded images "
    "to answers."
)
"""What the columns mean, for people."""
