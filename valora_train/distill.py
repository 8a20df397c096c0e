"""Stages `teach` and `distill`: from labelled samples to a small model, from it to what it says.

The LMM learns from what a teacher says of the unlabelled split (VaLoRA §4.2.1 collects its data
by running the small models). How well that agrees with the truth is reported.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data import shards
from valora_data.errors import DataError
from valora_data.schema import Answer, Box, Sample, Split
from valora_train.domains import TRUTH
from valora_train.evaluate import Matches, match
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest, read_json, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_teachers.base import Teacher
    from valora_train.settings import DomainSettings, TeacherSettings

LABELS = "labels"  # the training labels stand in for a teacher
TRAIN = "train"  # a teacher is trained first
WEIGHTS = "teacher.pt"
TAUGHT = "taught"
REPORT = "report.json"


def teach_stage(domain: DomainSettings, teacher: TeacherSettings, data: Path) -> Stage | None:
    """The stage that trains a domain's teacher, or takes over a trained one; None without one."""
    if domain.teacher == LABELS:
        return None
    settings: dict[str, Any] = {"labels": domain.labels, "kind": teacher.kind}
    if domain.teacher == TRAIN:
        settings["options"] = teacher.options
        return Stage(f"teach-{domain.name}", 1, settings, {"data": digest(data)})
    path = Path(domain.teacher)
    if not path.is_file():
        raise DataError(
            f"teacher of domain {domain.name} not found: {path} is no file; set "
            f"domains.{domain.name}.teacher to a trained model, `{TRAIN}` or `{LABELS}`"
        )
    return Stage(f"teach-{domain.name}", 1, settings, {"weights": digest(path)})


def build_teacher(
    domain: DomainSettings,
    teacher: TeacherSettings,
    data: Path,
    folder: Path,
    on_epoch: Callable[[int, int, float], None],
) -> None:
    """Fill the stage's folder with `teacher.pt`."""
    if domain.teacher != TRAIN:
        load_teacher(Path(domain.teacher), domain, teacher)  # is it one, and of these labels?
        shutil.copyfile(domain.teacher, folder / WEIGHTS)
        return
    from valora_teachers.registry import train_teacher

    report = train_teacher(
        teacher.kind,
        shards.read(data / Split.TRAIN),
        domain.labels,
        folder,
        teacher.options,
        on_epoch,
    )
    write_json(folder / REPORT, report)


def load_teacher(weights: Path, domain: DomainSettings, teacher: TeacherSettings) -> Teacher:
    """A trained teacher for a domain's labels."""
    from valora_teachers.registry import load_teacher as load

    return load(teacher.kind, weights, domain.labels, teacher.options)


def distill_stage(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, taught: Path | None
) -> Stage:
    """The stage that runs a domain's teacher over the unlabelled split."""
    inputs = {"data": digest(data)} | ({"teacher": digest(taught)} if taught else {})
    settings = as_dict(teacher) | {"labels": domain.labels, "teacher": domain.teacher}
    settings.pop("options")
    return Stage(f"distill-{domain.name}", 2, settings, inputs)


def build_distilled(
    domain: DomainSettings,
    teacher: TeacherSettings,
    data: Path,
    taught: Path | None,
    folder: Path,
) -> None:
    """Fill the stage's folder: `taught` (what the LMM learns) and `report.json`."""
    if taught is None:
        samples = shards.read(data / Split.TRAIN) + shards.read(data / TRUTH)
        shards.write(samples, domain.labels, folder / TAUGHT)
        write_json(folder / REPORT, {"teacher": LABELS, "samples": len(samples)})
        return
    model = load_teacher(taught / WEIGHTS, domain, teacher)
    found = {
        split: _ask(model, shards.read(data / split), teacher.min_confidence)
        for split in (Split.UNLABELLED, Split.VAL, Split.TEST)
    }
    truth = {
        split: shards.read(data / (TRUTH if split is Split.UNLABELLED else split))
        for split in found
    }
    matches = {
        split: match(
            [sample.answer.boxes for sample in samples],
            [sample.answer.boxes for sample in truth[split]],
            domain.labels,
        )
        for split, samples in found.items()
    }
    threshold = teacher.threshold
    if threshold is None:
        threshold = matches[Split.VAL].best_threshold()
    kept = [_above(sample, threshold) for sample in found[Split.UNLABELLED]]
    boxes = sum(len(sample.answer.boxes) for sample in kept)
    if not boxes:
        raise DataError(
            f"the teacher of domain {domain.name} finds nothing on {len(kept)} unlabelled images "
            f"at confidence {threshold:.2f}: check its labels, or lower teacher.threshold"
        )
    shards.write(kept, domain.labels, folder / TAUGHT)
    report = {
        "teacher": domain.teacher,
        "threshold": threshold,
        "samples": len(kept),
        "boxes": boxes,
        "accuracy": {split: summary(found, threshold) for split, found in matches.items()},
    }
    write_json(folder / REPORT, report)


def _ask(model: Teacher, samples: Sequence[Sample], min_confidence: float) -> list[Sample]:
    said = model.answer(samples)
    return [
        _above(Sample(sample.id, sample.image, Answer(output.boxes)), min_confidence)
        for sample, output in zip(samples, said, strict=True)
    ]


def _above(sample: Sample, confidence: float) -> Sample:
    boxes: tuple[Box, ...] = tuple(
        box for box in sample.answer.boxes if box.confidence >= confidence
    )
    return Sample(sample.id, sample.image, Answer(boxes))


def summary(matches: Matches, threshold: float) -> dict[str, Any]:
    """What a report says of a split."""
    precision, recall = matches.precision_recall(threshold)
    return {
        "f1": matches.f1(threshold),
        "ci95": matches.f1_interval(threshold),
        "precision": precision,
        "recall": recall,
        "map": matches.map,
        "ece": matches.calibration_error(),
    }


def describe(distilled: Path) -> str:
    """What the teacher said, and how well it agrees with the truth, for the terminal."""
    report = read_json(distilled / REPORT)
    if "accuracy" not in report:
        return f": {report['samples']} labelled images"
    agreement = report["accuracy"][Split.UNLABELLED]["f1"]
    return (
        f": {report['boxes']} boxes from confidence {report['threshold']:.2f} on "
        f"{report['samples']} images, F1 {agreement:.3f} against the truth"
    )


def teacher_accuracy(distilled: Path, split: Split) -> float | None:
    """F1 that the teacher reaches on a split; None where labels stand in for one."""
    accuracy = read_json(distilled / REPORT).get("accuracy")
    return float(accuracy[split]["f1"]) if accuracy else None
