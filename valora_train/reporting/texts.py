"""Texts and tables for people: the same in MLflow, in a bundle's README and on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markdown import Markdown

from valora_data.contract.bundle import Bundle
from valora_data.wording import joined, plural
from valora_train.fusion.decision import Verdict

AttemptRecord = Mapping[str, Any]  # an entry of `fusion.decision.attempts_as_json`
Facts = Mapping[str, Any]  # the entry of a domain, or of an adapter, in a bundle's manifest

NOTE_LENGTH = 8000  # most characters of a description in MLflow


def accuracy_text(accuracy: float | None) -> str:
    """An accuracy with three decimals, or a dash where there is none."""
    return "–" if accuracy is None else f"{accuracy:.3f}"


def share_text(part: float, whole: float) -> str:
    """A share in percent, e.g. ``97 %``; a dash where the whole is nothing."""
    return f"{part / whole:.0%}".replace("%", " %") if whole > 0 else "–"


def adapter_texts(name: str | None, facts: Facts) -> list[str]:
    """An adapter in words: its name, rank and size, as far as they are known."""
    words = [name or "none"]
    words += [f"rank {facts['rank']}"] if "rank" in facts else []
    words += [decimal(facts["bytes"])] if "bytes" in facts else []
    return words


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(map(str, row))} |" for row in lines]


def attempt_page(record: AttemptRecord) -> str:
    """The description of an attempt in markdown: its first lines say all that was decided."""
    outcome = outcome_of(record)
    if not record["below"]:  # names of domains stay as they are
        outcome = outcome[:1].upper() + outcome[1:]
    verdict = verdict_of(record)
    lines = [f"**{verdict[0].upper()}{verdict[1:]}**: {tried(record)}.", "", f"{outcome}.", ""]
    lines += [f"{sentence}.", ""] if (sentence := consequences(record)) else []
    columns = ("domain", "in this attempt", "before", "after", "change", "must keep", "slack")
    return "\n".join(
        lines + markdown_table(columns, [_row(record, name) for name in record["before"]])
    )


def verdict_of(record: AttemptRecord) -> str:
    """The verdict, and which new domains were rolled back."""
    lost = [name for name in record["new"] if _left_out(record) and name not in record["kept"]]
    return f"{record['verdict']}, {joined(lost)} rolled back" if lost else str(record["verdict"])


def _left_out(record: AttemptRecord) -> bool:
    """Whether an adapter was committed without all new domains."""
    return bool(record.get("kept")) and not set(record["new"]) <= set(record["kept"])


def rejected_lines(attempts: Sequence[AttemptRecord]) -> list[str]:
    """A list in markdown of the attempts that were not committed, or not with all domains."""
    return [
        f"- **{one['name']}**, {verdict_of(one)}: "
        f"{'. '.join(filter(None, (outcome_of(one), consequences(one))))}."
        for one in attempts
        if "went" in one and (one["verdict"] != Verdict.COMMITTED or _left_out(one))
    ]


def tried(record: AttemptRecord) -> str:
    """What was tried: which domains, in which adapter, beside which others."""
    new = record["new"]
    text = f"tried {joined(new)}{' together' if len(new) > 1 else ''} in {record['adapter']}"
    if record["held"]:
        text += f" beside {joined(record['held'])}"
    elif record.get("dedicated"):
        text += " with its dedicated adapter: nothing was trained"
    else:
        text += ", a new adapter" + (" of its own" if len(new) == 1 else "")
    return f"{text}; {joined(record['moved'])} would move there" if record["moved"] else text


def outcome_of(record: AttemptRecord) -> str:
    """What fell below what, from which value and by how much; or what came closest to it."""
    if None in record["accuracy"].values():  # the training diverged
        return str(record["reason"])
    if record["below"]:
        return "; ".join(f"{name} {_change(record, name)}" for name in record["below"])
    closest = min(record["before"], key=lambda name: _slack(record, name))
    return (
        f"every domain keeps what it must; closest is {closest}, which {_change(record, closest)}"
    )


def consequences(record: AttemptRecord) -> str:
    """What became of the new domains; empty if they simply stay where they were tried."""
    sentences = []
    for name, fate in record["went"].items():
        if fate != f"is in {record['adapter']}":
            sentences.append(f"{name} {fate}")
        elif record["verdict"] == Verdict.UNREACHABLE:
            sentences.append(f"{name} keeps {record['adapter']}, flagged")
    return "; ".join(sentences)


def _slack(record: AttemptRecord, name: str) -> float:
    return float(record["accuracy"][name] - record["floor"][name])


def _change(record: AttemptRecord, name: str) -> str:
    """How a domain's accuracy changed, and how far it is from what it must keep."""
    before, after, slack = record["before"][name], record["accuracy"][name], _slack(record, name)
    if before is None:
        change = f"reached {after:.3f}"
    elif accuracy_text(before) == accuracy_text(after):
        change = f"stayed at {after:.3f}"
    else:
        where = "" if name in (*record["held"], *record["moved"]) else " without LoRA"
        verb = "fell" if after < before else "rose"
        change = f"{verb} from {before:.3f}{where} to {after:.3f}"
    gap = f"{abs(slack):.3f}"
    if 1e-6 <= abs(slack) < 0.0005:  # three decimals would be zeros
        gap = f"{abs(slack):.6f}".rstrip("0")
    return f"{change}, {gap} {'below' if slack < 0 else 'above'} {record['asked'][name]}"


def _row(record: AttemptRecord, name: str) -> list[str]:
    before, after = record["before"][name], record["accuracy"][name]
    part = "held" if name in record["held"] else "moved here" if name in record["moved"] else "new"
    both = before is not None and after is not None
    return [
        f"**{name}**" if name in record["below"] else name,
        part,
        accuracy_text(before),
        accuracy_text(after),
        f"{after - before:+.3f}" if both else "–",
        accuracy_text(record["floor"][name]),
        "–" if after is None else f"{_slack(record, name):+.3f}",
    ]


# --- domains --------------------------------------------------------------------------------------

# Columns: what a domain must reach and reaches, and what compares it with others.
REPORTED = (
    "domain", "metric", "adapter", "target", "validation", "slack", "required", "test (95 %)",
    "without LoRA",
)  # fmt: skip
BESIDE_OTHERS = (
    "measured by", "of its own adapter", "of the teacher", "mAP", "calibration error", "images/s",
    "other metrics",
)  # fmt: skip


def domain_table(
    domains: Mapping[str, Facts], adapters: Mapping[str, Facts], columns: Sequence[str]
) -> list[str]:
    """A markdown table with a line for each domain, without columns that say nothing of any."""
    rows = [_cells(name, facts, adapters) for name, facts in domains.items()]
    kept = [column for column in columns if any(row[column] != "–" for row in rows)]
    lines = markdown_table(kept, ([row[column] for column in kept] for row in rows))
    return [] if kept == ["domain"] else lines


def _cells(name: str, facts: Facts, adapters: Mapping[str, Facts]) -> dict[str, str]:
    """What each column says of a domain."""
    accuracy = facts["accuracy"]
    test, (low, high), target = accuracy["test"], accuracy["test_ci95"], facts.get("bar")
    adapter, *more = adapter_texts(facts["adapter"], adapters.get(facts["adapter"], {}))

    def of(key: str, other: str, whole: float | None) -> str:
        share = "" if whole is None else f"{share_text(accuracy[key], whole)} of {whole:.3f}"
        return ", ".join(filter(None, (other, share))) or "–"

    def beside_teacher(key: str, what: str = "") -> str:
        ours, other = accuracy.get(f"test_{key}"), accuracy.get(f"teacher_{key}")
        return f"{what}{accuracy_text(ours)}" + (f" (teacher {other:.3f})" if other else "")

    # What its own adapter reaches on test follows from the share of it that is required.
    share = (facts.get("contract") or {}).get("of_dedicated")
    alone = facts["required"] / share if share else 0.0
    speed = facts.get("speed") or {}
    rates = [f"{one['images_per_second']:{',.0f' if one['images_per_second'] >= 100 else '.3g'}}"
             for one in (speed, speed.get("teacher")) if one]  # fmt: skip
    if rates[1:]:
        there = speed["teacher"]["machine"]
        rates[1] = f"(teacher {rates[1]}{'' if there == speed['machine'] else f' on {there}'})"
    others = [
        beside_teacher(key.removeprefix("test_"), f"{key.removeprefix('test_')} ")
        for key in accuracy
        if key.startswith("test_") and key not in ("test_ci95", "test_map", "test_ece")
    ]
    return {
        "domain": name,
        "metric": facts["metric"],
        "adapter": f"{adapter} ({', '.join(more)})" if more else adapter,
        "target": accuracy_text(target),
        "validation": accuracy_text(accuracy.get("val")),
        "slack": (
            "–" if None in (target, accuracy.get("val")) else f"{accuracy['val'] - target:+.3f}"
        ),
        "required": accuracy_text(facts["required"]),
        "test (95 %)": f"{test:.3f} ({low:.3f}–{high:.3f})"
        + ("" if facts["status"] == "met" else ", missed"),
        "without LoRA": accuracy_text(accuracy["head_only"]),
        "measured by": facts.get("measured_by") or "–",
        "of its own adapter": f"{share_text(test, alone)} of {alone:.3f}, at least "
        f"{100 * low / alone:.1f} %" if alone else "–",
        "of the teacher": of("test", "", accuracy["teacher"]),
        "mAP": of("test_map", f"{accuracy['test_map']:.3f}", accuracy.get("teacher_map"))
        if "test_map" in accuracy else "–",
        "calibration error": beside_teacher("ece"),
        "images/s": " ".join(rates) or "–",
        "other metrics": ", ".join(others) or "–",
    }  # fmt: skip


def by_adapter(domains: Mapping[str, Facts], adapters: Iterable[str]) -> dict[str, Facts]:
    """Domains in the order of their adapters, those without one last."""
    order = {name: place for place, name in enumerate([*adapters, None])}
    names = sorted(domains, key=lambda name: order.get(domains[name].get("adapter"), 0))
    return {name: domains[name] for name in names}


def fusion_page(result: Mapping[str, Any], run_id: str) -> str:
    """The description of a fusion (`fusion.json`): the packing, and what it was chosen over."""
    adapters, attempts = result.get("adapters", {}), result["attempts"]
    speed = result.get("speed", {})
    domains = by_adapter(
        {name: facts | {"speed": speed.get(name)} for name, facts in result["domains"].items()},
        adapters,
    )
    met = sum(facts["status"] == "met" for facts in domains.values())
    counts = Counter("committed in part" if _left_out(a) else a["verdict"] for a in attempts)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    head = (
        f"**{plural(len(domains), 'domain')} in {plural(len(result['packing']), 'adapter')}** "
        f"after {plural(len(attempts), 'attempt')}{f' ({verdicts})' if verdicts else ''}, strategy "
        f"`{result['strategy']}`; {met} of {len(domains)} at their requirement on test."
    )
    rejected = rejected_lines(attempts)
    alone = [
        f"- **{name}**: {facts['reason']}"
        for name, facts in domains.items()
        if facts["adapter"] is None and facts.get("reason")
    ]
    lines = [head, "", *domain_table(domains, adapters, REPORTED), ""]
    lines += [f"![accuracy](get-artifact?path=accuracy.png&run_uuid={run_id})", ""]
    lines += [*domain_table(domains, adapters, ("domain", *BESIDE_OTHERS)), ""]
    lines += ["**Without an adapter**", "", *alone, ""] if alone else []
    lines += ["**Rejected**", "", *rejected] if rejected else []
    text, end = "\n".join(lines), "\n\n… more: see the runs of the attempts"
    if len(text) <= NOTE_LENGTH:
        return text
    return text[: NOTE_LENGTH - len(end)].rpartition("\n")[0] + end


def speed_line(manifest: Mapping[str, Any]) -> str | None:
    """How fast all domains answer about one image, beside the small models; None if not known."""
    if not (speed := manifest.get("speed")):
        return None
    text = f"All {speed['domains']} domains of an image: {speed['images_per_second']:.3g} images/s"
    where = speed["machine"]
    if other := speed.get("teacher"):
        text += f"; their small models one after the other: {other['images_per_second']:.3g}"
        where += f", small models on {other['machine']}" * (other["machine"] != where)
    return f"{text} ({where})."


def print_summary(bundle: Bundle, console: Console, seconds: float, link: str | None) -> None:
    """Print what a bundle reports, how long the whole run took, and a link to its fusion."""
    domains, adapters, manifest = bundle.domains, bundle.adapters, bundle.manifest
    lines = [f"**{bundle.name}, version {bundle.version}**", ""]
    lines += [*domain_table(domains, adapters, REPORTED), ""]
    lines += [*domain_table(domains, adapters, ("domain", *BESIDE_OTHERS)), ""]
    if line := speed_line(manifest):
        lines += [line, ""]
    if manifest.get("rejected"):
        lines += ["**Rejected attempts**", "", *manifest["rejected"]]
    console.print(Markdown("\n".join(lines)))
    met = sum(facts["status"] == "met" for facts in domains.values())
    text = (
        f"{met} of {plural(len(domains), 'domain')} at their requirement on test, in "
        f"{plural(len(adapters), 'adapter')} after {plural(manifest['attempts'], 'attempt')} "
        f"({seconds:.0f} s).\nBundle: {bundle.folder}/README.md"
    )
    text += f"\nEvery step: {link}\n(after `make ui`, or `mlflow ui`)" if link else ""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
