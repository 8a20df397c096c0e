"""Metadata of a bundle for model hubs: the YAML at the top of its README, with evaluation results.

The form is Hugging Face's model card (`model-index`), which its pages show as results.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

HUB_TASKS = {
    "detection": "object-detection", "classification": "image-classification",
    "video": "video-classification", "vqa": "visual-question-answering",
    "caption": "image-to-text", "grounding": "zero-shot-object-detection",
    "counting": "image-classification", "context": "question-answering",
}  # fmt: skip
"""Hugging Face's names of our task types; others are `other`."""
HUB_METRICS = {"f1@0.5": "f1", "top1": "accuracy", "vqa_score": "accuracy", "cider": "cider"}
"""Hugging Face's names of our metrics; others keep their own."""
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


def card_data(manifest: dict[str, Any]) -> ModelCardData:
    """The metadata of a bundle.

    Args:
        manifest: Content of `bundle.json`.
    """
    from huggingface_hub import ModelCardData

    tasks = {HUB_TASKS.get(facts.get("task") or "", "other") for facts in _domains(manifest)}
    results = [result for facts in _named(manifest) for result in _results(manifest, *facts)]
    return ModelCardData(
        base_model=manifest["base"]["id"],
        library_name="peft",
        model_name=manifest["name"],
        pipeline_tag=tasks.pop() if len(tasks) == 1 and "other" not in tasks else None,
        tags=["valora", "lora", "vision"],
        metrics=sorted({result.metric_type for result in results}) or None,
        eval_results=results or None,
    )


def with_metadata(card: str, manifest: dict[str, Any]) -> str:
    """A bundle's README with this metadata in the place of what it has.

    Args:
        card: The README.
        manifest: Content of `bundle.json`.
    """
    text = _FRONT.sub("", card, count=1)
    return f"---\n{card_data(manifest).to_yaml().rstrip()}\n---\n{text}"


def _domains(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return list(manifest["domains"].values())


def _named(manifest: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(manifest["domains"].items())


def _results(manifest: dict[str, Any], name: str, facts: dict[str, Any]) -> list[EvalResult]:
    """The accuracy of a domain on test, and its mAP if it was measured."""
    from huggingface_hub import EvalResult

    accuracy, metric = facts.get("accuracy") or {}, facts.get("metric") or "accuracy"
    figures = [(HUB_METRICS.get(metric, metric), metric, accuracy.get("test"))]
    figures.append(("map", "mAP@0.5:0.95", accuracy.get("map")))
    told = {
        "required": facts.get("required"),
        "interval_95": accuracy.get("test_ci95"),
        "teacher": accuracy.get("teacher"),
    }
    extra = {key: value for key, value in told.items() if value is not None}
    data = ((manifest.get("lineage") or {}).get("data") or {}).get(name) or {}
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
            metric_args=extra if shown == metric else None,
        )
        for kind, shown, value in figures
        if value is not None
    ]
