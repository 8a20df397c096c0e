"""The README of a bundle: what it holds, how accurate it is, how it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from valora_data.wording import plural
from valora_train.reporting.domain_table import (
    BESIDE_OTHERS,
    EXPLANATION,
    PROMISES,
    domain_table,
)
from valora_train.reporting.text import accuracy_text, bytes_text, markdown_table

BARS = "pictures/accuracy-of-all-domains.png"
"""Picture of `pictures.accuracy_bars` in a bundle; no domain has a name with hyphens."""

CLASS_METRICS = ("precision", "recall", "f1")
MAX_ROWS = 30

if TYPE_CHECKING:
    from collections.abc import Mapping


def bundle_card(manifest: dict[str, Any]) -> str:
    """The README of a bundle, in markdown with the metadata of a model card.

    Args:
        manifest: Content of `bundle.json`.
    """
    lines = [
        "---",
        f"base_model: {manifest['base']['id']}",
        "library_name: peft",
        "tags: [valora, lora, vision]",
        "---",
        f"# {manifest['name']}, version {manifest['version']}",
        "",
        f"{plural(len(manifest['domains']), 'domain')} in "
        f"{plural(len(manifest['adapters']), 'LoRA adapter')} of "
        f"`{manifest['base']['id']}` (strategy `{manifest['strategy']}`, "
        f"{plural(manifest['attempts'], 'attempt')}).",
        "",
        "| adapter | rank | size | domains |",
        "|---|---|---|---|",
    ]
    for facts in manifest["adapters"].values():
        size = bytes_text(facts["bytes"]) if "bytes" in facts else "–"
        domains = ", ".join(facts["domains"])
        lines.append(f"| `{facts['path']}` | {facts['rank']} | {size} | {domains} |")
    unpacked = [name for name, facts in manifest["domains"].items() if facts["adapter"] is None]
    if unpacked:
        lines.append(f"| none: the base model as it is | | | {', '.join(unpacked)} |")
    lines += [
        "",
        EXPLANATION,
        "",
        *markdown_table(
            *domain_table(manifest["domains"], manifest["adapters"], (*PROMISES, *BESIDE_OTHERS))
        ),
        "",
        f"![accuracy of all domains]({BARS})",
        "",
        *_classes(manifest["domains"]),
        "## Pictures",
        "Images of the test split. True boxes are white, right predictions green, wrong ones red; "
        "the true answer stands in grey below a wrong one.",
        "",
    ]
    for name, facts in manifest["domains"].items():
        lines.append(f"**{name}**\n\n![{name}](pictures/{name}.png)\n")
        if "confusion" in facts["accuracy"]:
            lines.append(f"![{name}: truth and prediction]({confusion_file(name)})\n")
    lines += ["## Decisions", ""]
    lines += [
        f"- **{name}**: {facts['reason']}"
        for name, facts in manifest["domains"].items()
        if facts.get("reason")
    ]
    if rejected := manifest.get("rejected"):
        lines += ["", "Rejected attempts:", "", *rejected]
    lines += ["", "## Use", *_usage(manifest)]
    return "\n".join(lines)


def _usage(manifest: dict[str, Any]) -> list[str]:
    """How the bundle is served, and loaded without VaLoRA."""
    paths = [facts["path"] for facts in manifest["adapters"].values()]
    how = (
        "Serve the bundle with `valora-serve`, or load an adapter with PEFT:"
        if paths
        else "Serve the bundle with `valora-serve`. No domain needs an adapter; the base model "
        "loads with transformers:"
    )
    code = [
        *(["from peft import PeftModel"] if paths else []),
        "from transformers import AutoModelForImageTextToText",
        "",
        "base = AutoModelForImageTextToText.from_pretrained(...)  # weights: see bundle.json",
        *([f'model = PeftModel.from_pretrained(base, "{paths[0]}")'] if paths else []),
    ]
    return [
        how,
        "",
        "```python",
        *code,
        "```",
        "",
        "The heads in `heads/` read the last hidden states of the domain's prompt; where a domain "
        "has no head, the model writes the answer. `bundle.json` lists the prompt, adapter and "
        "head of every domain; where the adapter is null, the base model answers without LoRA.",
        "",
    ]


def confusion_file(domain: str) -> str:
    """Place of a domain's confusion matrix in a bundle."""
    return f"pictures/{domain}-confusion.png"


def _classes(domains: Mapping[str, Any]) -> list[str]:
    """The section about single classes, of the domains that have several."""
    several = {
        name: facts["accuracy"]["per_class"]
        for name, facts in domains.items()
        if len(facts["accuracy"].get("per_class", ())) > 1
    }
    if not several:
        return []
    rows = []
    for name, figures in several.items():
        worst = sorted(figures.items(), key=lambda item: item[1]["f1"])[:MAX_ROWS]
        rows += [
            (name, label, str(one["support"]), *(f"{one[key]:.3f}" for key in CLASS_METRICS),
             accuracy_text(one.get("ap")))
            for label, one in worst
        ]  # fmt: skip
    columns = ("domain", "class", "truths", *CLASS_METRICS, "AP")
    return [
        "## Classes",
        f"On the test split; of each domain the {MAX_ROWS} classes with the lowest F1 at most.",
        "",
        *markdown_table(columns, rows),
        "",
    ]
