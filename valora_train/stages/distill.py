"""Stages `teach` and `distill`: a small model labels the unlabelled split (VaLoRA §4.2.1)."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from valora_data import shards
from valora_data.errors import DataError
from valora_data.hashing import hub_file
from valora_data.prepare import TRUTH
from valora_data.schema import Answer, Split
from valora_data.wording import plural
from valora_teachers.base import CHECKPOINT, LOOK_SAMPLES, Teacher, check_answers
from valora_teachers.registry import KINDS, NAMES, load_teacher, make_teacher, teacher_facts
from valora_train.fusion.samples import PSEUDO_LABELLED
from valora_train.metrics.evaluate import match
from valora_train.metrics.measures import calibration_error
from valora_train.metrics.speed import Pace
from valora_train.reporting.progress import Step
from valora_train.settings import LABELS, DomainSettings, TeacherSettings, as_dict
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.data import HASHES
from valora_train.tasks.registry import TASK_TYPES

log = logging.getLogger(__name__)

Answers = dict[Split, list[Answer]]

TRAIN = "train"  # value of `domains.*.teacher`: a teacher is trained first
REPORT = "report.json"
TESTED = "tested.json"  # the teacher's answers on test, which bundles show beside their own


def teach_stage(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, work: Path | None = None
) -> Stage | None:
    """The stage that trains or copies a domain's teacher; None if there is nothing to do."""
    trained = domain.teacher == TRAIN
    if domain.teacher == LABELS or (not trained and KINDS[teacher.kind].artefact is None):
        return None
    name, task = f"teach-{domain.name}", str(domain.task)
    settings: dict[str, Any] = {"labels": domain.labels, "kind": teacher.kind, "task": task}
    if trained:
        settings["options"] = {k: v for k, v in teacher.options.items() if k != NAMES}
        _, inputs = teacher_facts(teacher.kind, None, settings["options"])
        inputs |= {"train": digest(data / Split.TRAIN)}
        return Stage(name, 3, settings, inputs, resumable=True, shared=True)
    try:
        weights = digest(hub_file(domain.teacher), _cache(domain, work))
    except OSError as error:
        raise DataError(
            f"teacher of domain {domain.name}: {error.filename} cannot be read "
            f"({error.strerror}): check its permissions"
        ) from error
    return Stage(name, 3, settings, {"weights": weights}, shared=True)


def build_teacher(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, folder: Path, on_epoch: Step
) -> None:
    """Write the teacher's file or folder into the stage's folder."""
    if domain.teacher != TRAIN:
        weights = hub_file(domain.teacher)
        model = _load(weights, domain, teacher)  # raises unless it knows these labels
        if model.remark:
            log.warning("teacher of domain %s: %s", domain.name, model.remark)
        copy = shutil.copytree if weights.is_dir() else shutil.copyfile
        copy(weights, folder / str(KINDS[teacher.kind].artefact))
        return
    for item in folder.iterdir():  # of an interrupted training only the checkpoint counts
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name != CHECKPOINT:
            item.unlink()
    samples = shards.read(intact(data / Split.TRAIN))
    val = shards.open_shard(data / Split.VAL)  # for the curve; the training depends on none of it
    looked_at = [val[number] for number in range(min(len(val), LOOK_SAMPLES))]
    model = make_teacher(teacher.kind, domain.task_type, domain.labels, teacher.options)
    report = model.train(samples, folder, on_epoch, looked_at)
    write_json(folder / REPORT, report)


def distill_stage(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, trained: Path | None,
    work: Path | None = None,
) -> Stage:  # fmt: skip
    """The stage that runs a domain's teacher, as stage `teach` left it, over its samples."""
    settings: dict[str, Any] = {"labels": domain.labels, "task": str(domain.task)}
    splits: list[str] = [Split.UNLABELLED, Split.TRAIN]
    inputs: dict[str, str] = {}
    if domain.teacher == LABELS:
        settings["teacher"] = LABELS
    else:
        weights = domain.teacher if trained is None else None
        cache = _cache(domain, work)
        facts, hashes = teacher_facts(teacher.kind, weights, teacher.options, domain.prompt, cache)
        known = as_dict(teacher)
        settings |= {key: known[key] for key in ("min_confidence", "threshold", "labelled")}
        settings |= facts
        inputs |= hashes
        if trained is not None:
            inputs["teacher"] = digest(trained / str(KINDS[teacher.kind].artefact))
        if not teacher.labelled:
            splits.remove(Split.TRAIN)
        splits += [Split.VAL, Split.TEST]  # for the report
    if (data / TRUTH).is_dir():
        splits.append(TRUTH)
    inputs |= {str(split): digest(data / split) for split in splits}
    return Stage(f"distill-{domain.name}", 5, settings, inputs, shared=True)


def build_distilled(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, trained: Path | None,
    folder: Path, on_batch: Step = lambda *_: None,
) -> None:  # fmt: skip
    """Write the LMM's training samples and `report.json` into the stage's folder."""
    if domain.teacher == LABELS:
        kept = shards.read(intact(data / Split.TRAIN))
        if (data / TRUTH).is_dir():
            intact(data / Split.UNLABELLED)  # holds the images
            kept += shards.read(intact(data / TRUTH))
        shards.write(kept, domain.labels, folder / PSEUDO_LABELLED)
        write_json(folder / REPORT, {"teacher": LABELS, "samples": len(kept)})
        return
    artefact = str(KINDS[teacher.kind].artefact)
    weights = domain.teacher if trained is None else intact(trained / artefact)
    model, pace = _load(weights, domain, teacher), Pace()

    def answered(done: int, total: int) -> None:
        pace.on_batch(done)
        on_batch(done, total, 0.0)

    found: Answers = {}
    truth: Answers = {}
    unlabelled = shards.read(intact(data / Split.UNLABELLED))
    for split in (Split.UNLABELLED, Split.VAL, Split.TEST):
        samples = unlabelled if split is Split.UNLABELLED else shards.read(intact(data / split))
        pace.start(samples)
        found[split] = model.answer(samples, answered)
        pace.on_batch(len(samples))  # some teachers report no batches
        check_answers(f"the teacher of domain {domain.name}", domain.task_type, found[split])
        known = data / (TRUTH if split is Split.UNLABELLED else split)
        if known.is_dir():
            truth[split] = shards.open_shard(intact(known)).answers()
    keep = _keep_boxes if domain.task_type.spec.detects else _keep_answers
    answers, report = keep(domain, teacher, found, truth)
    kept = [
        replace(sample, answer=answer)
        for sample, answer in zip(unlabelled, answers, strict=True)
        if answer is not None
    ]
    report |= {"teacher": domain.teacher, "samples": len(kept), "speed": pace.facts()}
    sure = max(report["threshold"] or 0.0, teacher.min_confidence)
    # The stage's version stays, as nothing that is trained reads this file: outputs without it are
    # up to date, and their bundles show no teacher's answers.
    write_json(folder / TESTED, [_shown(domain, one, sure) for one in found[Split.TEST]])
    if teacher.labelled:
        kept += shards.read(intact(data / Split.TRAIN))
    shards.write(kept, domain.labels, folder / PSEUDO_LABELLED)
    write_json(folder / REPORT, report)


def _keep_boxes(
    domain: DomainSettings, teacher: TeacherSettings, found: Answers, truth: Answers
) -> tuple[list[Answer], dict[str, Any]]:
    """Keep all images, with the boxes from the threshold on; mAP and ECE are of all boxes."""
    matches = {
        split: match([one.boxes for one in found[split]], [one.boxes for one in known],
                     domain.labels)
        for split, known in truth.items()
    }  # fmt: skip
    threshold = teacher.threshold
    if threshold is None:
        threshold = matches[Split.VAL].above(teacher.min_confidence).best_threshold()
    sure = max(threshold, teacher.min_confidence)
    kept = [
        replace(one, boxes=tuple(box for box in one.boxes if box.confidence >= sure))
        for one in found[Split.UNLABELLED]
    ]
    boxes = sum(len(one.boxes) for one in kept)
    if not boxes:
        raise DataError(
            f"the teacher of domain {domain.name} finds nothing on "
            f"{plural(len(kept), 'unlabelled image')} at confidence {threshold:.2f}: check its "
            "labels, or lower teacher.threshold"
        )
    accuracy = {}
    for split, one in matches.items():
        precision, recall = one.precision_recall(sure)
        accuracy[split] = {
            "accuracy": one.f1(sure), "ci95": one.f1_interval(sure), "precision": precision,
            "recall": recall, "map": one.map, "ece": one.calibration_error(),
        }  # fmt: skip
    return kept, {"threshold": threshold, "boxes": boxes, "accuracy": accuracy}


def _keep_answers(
    domain: DomainSettings, teacher: TeacherSettings, found: Answers, truth: Answers
) -> tuple[list[Answer | None], dict[str, Any]]:
    """Keep the answers whose confidence reaches the threshold."""
    answers, least = found[Split.UNLABELLED], teacher.threshold or 0.0
    said = [one if one.boxes or one.choice or one.captions else None for one in answers]
    kept = [one if one and _confidence(one) >= least else None for one in said]
    if not any(kept):
        raise DataError(
            f"the teacher of domain {domain.name} answers none of "
            f"{plural(len(answers), 'unlabelled sample')} at confidence {least:g}: check its "
            "labels and what it is asked, or lower teacher.threshold"
        )
    accuracy = {}
    for split, known in truth.items():
        scores = TASK_TYPES[domain.task_type].measure(found[split], known)
        accuracy[split] = {"accuracy": scores.mean, "ci95": scores.interval(), **scores.details}
        if (ece := calibration_error(found[split], known)) is not None:
            accuracy[split]["ece"] = ece
    return kept, {"threshold": teacher.threshold, "accuracy": accuracy}


def _confidence(answer: Answer) -> float:
    """Confidence in an answer; 1 where the teacher gives none."""
    if answer.soft:
        return max(answer.soft)
    return answer.boxes[0].confidence if answer.boxes else 1.0


def _shown(domain: DomainSettings, answer: Answer, sure: float) -> Any:
    """A teacher's answer as golden examples hold answers; None if there is none."""
    if answer.boxes or domain.task_type.spec.detects:
        return [
            {"label": box.label, "box": list(box.xyxy), "confidence": box.confidence}
            for box in answer.boxes
            if box.confidence >= sure
        ]
    if answer.captions:
        return {"text": answer.captions[0]}
    if answer.choice is None:
        return None
    return {"label": answer.choice} | ({"confidence": max(answer.soft)} if answer.soft else {})


def _cache(domain: DomainSettings, work: Path | None) -> Path | None:
    return None if work is None else work / HASHES / f"{domain.name}.teacher.json"


def load_trained(domain: DomainSettings, teacher: TeacherSettings, trained: Path) -> Teacher:
    """The teacher of a domain, as stage `teach` left it."""
    return _load(intact(trained / str(KINDS[teacher.kind].artefact)), domain, teacher)


def _load(weights: str | Path, domain: DomainSettings, teacher: TeacherSettings) -> Teacher:
    return load_teacher(
        teacher.kind, weights, domain.labels, teacher.options, domain.task_type, domain.prompt
    )


def describe_distilled(distilled: Path) -> str:
    """What the teacher labelled, and how well it agrees with the truth, for the terminal."""
    report = read_json(intact(distilled / REPORT))
    message = f": {plural(report['samples'], 'labelled sample')}"
    if "boxes" in report:
        boxes = plural(report["boxes"], "box|boxes")
        message += f", {boxes} from confidence {report['threshold']:.2f}"
    if accuracy := report.get("accuracy"):
        reached = accuracy.get(Split.UNLABELLED) or accuracy[Split.VAL]
        message += f", {reached['accuracy']:.3f} against the truth"
    return message


def teacher_accuracy(distilled: Path, split: Split) -> float | None:
    """Accuracy of the teacher on a split; None where there is no teacher or no truth."""
    accuracy = read_json(intact(distilled / REPORT)).get("accuracy", {})
    return float(accuracy[split]["accuracy"]) if split in accuracy else None


def teacher_figures(distilled: Path) -> dict[str, Any]:
    """What the teacher reaches on test, in the words of the manifest; `teacher` is its accuracy."""
    figures = read_json(intact(distilled / REPORT)).get("accuracy", {}).get(Split.TEST, {})
    return {"teacher": figures.pop("accuracy", None)} | {
        f"teacher_{key}": value
        for key, value in figures.items()
        if key == "ci95" or math.isfinite(value)
    }


def answers_on_test(distilled: Path) -> list[Any]:
    """The teacher's answers on test, as golden examples hold answers; maybe nothing."""
    file = distilled / TESTED
    return list(read_json(intact(file))) if file.exists() else []


def teacher_speed(distilled: Path) -> dict[str, Any]:
    """`images_per_second` of the teacher and its `machine`; empty where there is no teacher."""
    return dict(read_json(intact(distilled / REPORT)).get("speed", {}))
