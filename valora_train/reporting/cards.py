"""The README of a bundle, with the metadata of Hugging Face's model cards."""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from rich.filesize import decimal

from valora_data.wording import plural
from valora_train.reporting import texts
from valora_train.reporting.licences import licence_lines

BARS = "pictures/accuracy-of-all-domains.png"  # no domain has a name with hyphens
# Hugging Face's names of our task types, and of our metrics; others keep their own.
HUB_TASKS = {
    "detection": "object-detection", "classification": "image-classification",
    "video": "video-classification", "vqa": "visual-question-answering",
    "caption": "image-to-text", "grounding": "zero-shot-object-detection",
    "counting": "image-classification", "context": "question-answering",
}  # fmt: skip
HUB_METRICS = {"f1@0.5": "f1", "top1": "accuracy", "vqa_score": "accuracy", "cider": "cider"}


def confusion_file(domain: str) -> str:
    """Place of a domain's confusion matrix in a bundle."""
    return f"pictures/{domain}-confusion.png"


def bundle_card(manifest: dict[str, Any]) -> str:
    """The README of a bundle, in markdown with the metadata of a model card."""
    domains, adapters = manifest["domains"], manifest["adapters"]
    packing = [
        (f"`{a['path']}`", a["rank"], decimal(a["bytes"]), ", ".join(a["domains"]))
        for a in adapters.values()
    ]
    if unpacked := [name for name, facts in domains.items() if facts["adapter"] is None]:
        packing.append(("none: the base model as it is", "", "", ", ".join(unpacked)))
    pictures = []
    for name, facts in domains.items():
        pictures.append(f"**{name}**\n\n![{name}](pictures/{name}.png)\n")
        if "confusion" in facts["accuracy"]:
            pictures.append(f"![{name}: truth and prediction]({confusion_file(name)})\n")
    decisions = [
        f"- **{n}**: {facts['reason']}" for n, facts in domains.items() if facts.get("reason")
    ]
    if manifest["rejected"]:
        decisions += ["", "Rejected attempts:", "", *manifest["rejected"]]
    licences = licence_lines(manifest["licenses"])
    base, lines, peft = manifest["base"]["id"], "\n".join, "."
    loader = manifest["base"].get("class", "AutoModelForImageTextToText")
    if adapters:
        tower = "import valora_data.models.lite_tower  # registers its vision tower\n"
        peft = f""", or load an adapter with PEFT:

```python
{tower if base in ("photo", "smol") else ""}from peft import PeftModel
from transformers import {loader}

base = {loader}.from_pretrained(...)  # weights: see bundle.json
model = PeftModel.from_pretrained(base, "{next(iter(adapters.values()))["path"]}")
```
"""
    return f"""\
---
base_model: {base}
library_name: peft
tags: [{", ".join(_tags(manifest))}]
---
# {manifest["name"]}, version {manifest["version"]}

{plural(len(domains), "domain")} in {plural(len(adapters), "LoRA adapter")} of `{base}` \
(strategy `{manifest["strategy"]}`, {plural(manifest["attempts"], "attempt")}).

{lines(texts.markdown_table(("adapter", "rank", "size", "domains"), packing))}

Decisions are made on validation, where a domain must reach its *target*: what is asked, plus the \
margin. *Required* counts on *test*, which no decision has used; its accuracy has its 95 % \
interval, whose lower end *at least* takes. *Without LoRA* is the frozen base model on test, with \
a head of its own or its written answers. Teachers are measured on test, too; images/s in batches \
of 32, from decoded images to answers.

{lines(texts.domain_table(domains, adapters, (*texts.REPORTED, *texts.BESIDE_OTHERS)))}

{texts.speed_line(manifest) or ""}

![accuracy of all domains]({BARS})

## Pictures
Images of the test split. True boxes are white, right predictions green, wrong ones red; the true \
answer stands in grey below a wrong one.

{lines(pictures)}

## Decisions

{lines(decisions)}

## Licences
As settings, model cards and data sets say. What a licence asks of adapters that were trained on \
data or on a teacher's answers is for their user to judge.

{lines(texts.markdown_table(("", "data", "teacher"), licences))}

## Use
Serve the bundle with `valora-serve`{peft}

The heads in `heads/` read the last hidden states of the domain's prompt; where a domain has no \
head, the model writes the answer. `bundle.json` lists the prompt, adapter and head of every \
domain; where the adapter is null, the base model answers without LoRA.
"""


def _tags(manifest: dict[str, Any]) -> list[str]:
    """What hubs list a bundle by; the class of a base model is named where it takes no images."""
    return ["valora", "lora", *([] if "class" in manifest["base"] else ["vision"])]


def with_metadata(card: str, manifest: dict[str, Any]) -> str:
    """A bundle's README with the metadata of model hubs, evaluation results included."""
    domains = manifest["domains"]
    tasks = {HUB_TASKS.get(facts.get("task") or "", "other") for facts in domains.values()}
    data = (manifest.get("lineage") or {}).get("data") or {}
    results = [
        one
        for name, facts in domains.items()
        for one in _results(name, facts, data.get(name) or {})
    ]
    metadata = ModelCardData(
        base_model=manifest["base"]["id"],
        library_name="peft",
        model_name=manifest["name"],
        pipeline_tag=tasks.pop() if len(tasks) == 1 and "other" not in tasks else None,
        tags=_tags(manifest),
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )
    text = re.sub(r"\A---\n.*?\n---\n", "", card, count=1, flags=re.DOTALL)
    return f"---\n{metadata.to_yaml().rstrip()}\n---\n{text}"


def _results(name: str, facts: dict[str, Any], data: dict[str, Any]) -> list[EvalResult]:
    """The accuracy of a domain on test, and its mAP if it was measured."""
    accuracy, metric = facts.get("accuracy") or {}, facts.get("metric") or "accuracy"
    shown = (facts.get("required"), accuracy.get("test_ci95"), accuracy.get("teacher"))
    extra = dict(zip(("required", "interval_95", "teacher"), shown, strict=True))
    extra = {key: value for key, value in extra.items() if value is not None}
    figures = [(HUB_METRICS.get(metric, metric), metric, accuracy.get("test"), extra),
               ("map", "mAP@0.5:0.95", accuracy.get("test_map"), {})]  # fmt: skip
    return [
        EvalResult(
            task_type=HUB_TASKS.get(facts.get("task") or "", "other"),
            task_name=name,
            dataset_type=str(data.get("labelled") or name),
            dataset_name=name,
            dataset_split="test",
            metric_type=kind,
            metric_name=shown,
            metric_value=round(float(value), 4),
            metric_args=more or None,
        )
        for kind, shown, value, more in figures
        if value is not None
    ]
