"""What became of attempts, in the same words everywhere: tried, fell below, by how much, went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_train.fusion.decision import Verdict
from valora_train.reporting.text import accuracy_text, joined, markdown_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Told = Mapping[str, Any]
    """An entry of `fusion.history.History.told`."""


def attempt_page(told: Told) -> str:
    """The description of an attempt in markdown: its first lines say all that was decided."""
    lines = [
        f"**{verdict_of(told).capitalize()}**: {tried(told)}.",
        "",
        f"{_sentence(outcome_of(told), told)}.",
        *(["", f"{sentence}."] if (sentence := went(told)) else []),
        "",
        *markdown_table(
            ("domain", "in this attempt", "before", "after", "change", "must keep", "slack"),
            [_row(told, name) for name in told["before"]],
        ),
    ]
    return "\n".join(lines)


def _sentence(text: str, told: Told) -> str:
    """Text that begins a sentence; names of domains stay as they are."""
    return text if told["below"] else text[:1].upper() + text[1:]


def verdict_of(told: Told) -> str:
    """The verdict, and whether new domains were left out."""
    return f"{told['verdict']} in part" if left_out(told) else str(told["verdict"])


def attempt_line(told: Told) -> str:
    """An attempt in one line of a list in markdown."""
    sentences = [outcome_of(told), went(told)]
    return f"- **{told['name']}**, {verdict_of(told)}: {'. '.join(filter(None, sentences))}."


def rejected_lines(attempts: Sequence[Told]) -> list[str]:
    """A list in markdown of the attempts that were not committed, or not with all domains."""
    return [
        attempt_line(told)
        for told in attempts
        if "went" in told and (told["verdict"] != Verdict.COMMITTED or left_out(told))
    ]


def tried(told: Told) -> str:
    """What was tried: which domains, in which adapter, beside which others."""
    new, moved = told["new"], told["moved"]
    parts = [f"tried {joined(new)}"]
    if len(new) > 1:
        parts.append("together")
    parts.append(f"in {told['adapter']}")
    if told["held"]:
        parts.append(f"beside {joined(told['held'])}")
    elif told.get("dedicated"):
        parts.append("with its dedicated adapter: nothing was trained")
    else:
        parts[-1] += ", a new adapter" + (" of its own" if len(new) == 1 else "")
    text = " ".join(parts)
    if moved:
        text += f"; {joined(moved)} would leave the adapter" + ("s" if len(moved) > 1 else "")
        text += " that held " + ("them" if len(moved) > 1 else "it")
    return text


def outcome_of(told: Told) -> str:
    """What fell below what, from which value and by how much; or what came closest to it."""
    if None in told["accuracy"].values():
        return str(told["reason"])
    if told["below"]:
        return "; ".join(f"{name} {_change(told, name)}" for name in told["below"])
    closest = min(told["before"], key=lambda name: _slack(told, name))
    return f"every domain keeps what it must; closest is {closest}, which {_change(told, closest)}"


def went(told: Told) -> str:
    """What became of the new domains; empty if they simply stay where they were tried."""
    sentences = []
    for name, fate in told["went"].items():
        if fate != f"is in {told['adapter']}":
            sentences.append(f"{name} {fate}")
        elif told["verdict"] == Verdict.UNREACHABLE:
            sentences.append(f"{name} keeps {told['adapter']}, flagged")
    return "; ".join(sentences)


def left_out(told: Told) -> list[str]:
    """New domains that a committed adapter does not hold."""
    return [name for name in told["new"] if told["kept"] and name not in told["kept"]]


def _slack(told: Told, name: str) -> float:
    return float(told["accuracy"][name] - told["floor"][name])


def _change(told: Told, name: str) -> str:
    """How a domain's accuracy changed, and how far it is from what it must keep."""
    before, after, slack = told["before"][name], told["accuracy"][name], _slack(told, name)
    where = "" if name in told["held"] or name in told["moved"] else " without LoRA"
    if before is None:
        moved = f"reached {after:.3f}"
    elif accuracy_text(before) == accuracy_text(after):
        moved = f"stayed at {after:.3f}"
    else:
        verb = "fell" if after < before else "rose"
        moved = f"{verb} from {before:.3f}{where} to {after:.3f}"
    return f"{moved}, {_gap(slack)} {'below' if slack < 0 else 'above'} {told['asked'][name]}"


def _gap(slack: float) -> str:
    """A distance with three decimals, or more where these would be zeros."""
    size = abs(slack)
    return f"{size:.3f}" if size >= 0.0005 or size < 1e-6 else f"{size:.6f}".rstrip("0")


def _row(told: Told, name: str) -> list[str]:
    before, after = told["before"][name], told["accuracy"][name]
    if name in told["held"]:
        part = "held"
    elif name in told["moved"]:
        part = "moved here"
    else:
        part = "new"
    both = before is not None and after is not None
    return [
        f"**{name}**" if name in told["below"] else name,
        part,
        accuracy_text(before),
        accuracy_text(after),
        f"{after - before:+.3f}" if both else "–",
        accuracy_text(told["floor"][name]),
        "–" if after is None else f"{_slack(told, name):+.3f}",
    ]
