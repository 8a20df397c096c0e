"""Stages `teach` and `distill`: train a small model, and label the unlabelled split with it.

The LMM is trained on the teacher's answers for the unlabelled split, as VaLoRA §4.2.1 collects its
training data by running the small models. The report says how well these agree with the truth.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data import shards
from valora_data.contract.results import golden_text
from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.wording import plural
from valora_train.metrics.evaluate import Matches, match
from valora_train.metrics.measures import calibration_error
from valora_train.metrics.speed import Pace
from valora_train.settings import LABELS, as_dict
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.data import HASHES, TRUTH
from valora_train.tasks.registry import TASK_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from valora_teachers.base import OnEpoch, Teacher
    from valora_train.settings import DomainSettings, TeacherSettings

    OnStep = Callable[[int, int, float], None]

TRAIN = "train"  # value of `domains.*.teacher`: a teacher is trained first
TAUGHT = "taught"
REPORT = "report.json"
TESTED = "tested.json"
"""File with the teacher's answers on the test split, which bundles show beside their own."""


def teach_stage(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, work: Path | None = None
) -> Stage | None:
    """The stage that trains or copies a domain's teacher; None if there is nothing to do.

    Args:
        domain: The domain.
        teacher: Its teacher settings.
        data: Output of stage `data`.
        work: Folder of all stages, where hashes of files are remembered; None to read all files.

    Raises:
        DataError: If a given teacher does not exist or cannot be read.
    """
    from valora_teachers.registry import NAMES, teacher_facts

    if domain.teacher == LABELS or (domain.teacher != TRAIN and _artefact(teacher) is None):
        return None
    settings: dict[str, Any] = {
        "labels": domain.labels, "kind": teacher.kind, "task": str(domain.task),
    }  # fmt: skip
    name = f"teach-{domain.name}"
    if domain.teacher == TRAIN:
        options = {key: value for key, value in teacher.options.items() if key != NAMES}
        _, inputs = teacher_facts(teacher.kind, None, options)
        settings["options"] = options
        inputs |= {"train": digest(data / Split.TRAIN)}
        return Stage(name, 3, settings, inputs, resumable=True, shared=True)
    path = Path(domain.teacher)
    if not path.exists():
        raise DataError(
            f"teacher of domain {domain.name} not found: {path} is no file; set "
            f"domains.{domain.name}.teacher to a trained model, `{TRAIN}` or `{LABELS}`"
        )
    try:
        found = digest(path, _cache(domain, work))
    except OSError as error:
        raise DataError(
            f"teacher of domain {domain.name}: {error.filename} cannot be read "
            f"({error.strerror}): check its permissions"
        ) from error
    return Stage(name, 3, settings, {"weights": found}, shared=True)


def _cache(domain: DomainSettings, work: Path | None) -> Path | None:
    return None if work is None else work / HASHES / f"{domain.name}.teacher.json"


def build_teacher(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, folder: Path, on_epoch: OnEpoch
) -> None:
    """Write the teacher's file or folder into the stage's folder."""
    if domain.teacher != TRAIN:
        load_teacher(
            domain.teacher, domain, teacher
        )  # raises unless it is a teacher of these labels
        place = folder / str(_artefact(teacher))
        if Path(domain.teacher).is_dir():
            shutil.copytree(domain.teacher, place)
        else:
            shutil.copyfile(domain.teacher, place)
        return
    from valora_teachers.base import CHECKPOINT
    from valora_teachers.registry import make_teacher

    for item in folder.iterdir():  # of an interrupted training only the checkpoint counts
        if item.is_dir():
            shutil.rmtree(item)
        elif item.name != CHECKPOINT:
            item.unlink()
    assert domain.task is not None, "`Settings.chosen` fills it in"
    model = make_teacher(teacher.kind, domain.task, domain.labels, teacher.options)
    samples = shards.read(intact(data / Split.TRAIN))
    report = model.train(samples, folder, on_epoch, _looked_at(data / Split.VAL))
    write_json(folder / REPORT, report)


def _looked_at(split: Path) -> list[Sample]:
    """Samples for the validation curve of a teacher's training, which depends on none of them."""
    from valora_teachers.base import LOOK_SAMPLES

    shard = shards.open_shard(split)
    return [shard[number] for number in range(min(len(shard), LOOK_SAMPLES))]


def _artefact(teacher: TeacherSettings) -> str | None:
    """Name of the trained model's file or folder; None for models that are used where they are."""
    from valora_teachers.registry import KINDS

    return KINDS[teacher.kind].artefact


def load_teacher(weights: str | Path, domain: DomainSettings, teacher: TeacherSettings) -> Teacher:
    """Load a trained teacher for a domain."""
    from valora_teachers.registry import load_teacher as load

    assert domain.task is not None, "`Settings.chosen` fills it in"
    return load(teacher.kind, weights, domain.labels, teacher.options, domain.task, domain.prompt)


def distill_stage(
    domain: DomainSettings,
    teacher: TeacherSettings,
    data: Path,
    taught: Path | None,
    work: Path | None = None,
) -> Stage:
    """The stage that runs a domain's teacher over the unlabelled split.

    Args:
        domain: The domain.
        teacher: Its teacher settings.
        data: Output of stage `data`.
        taught: Output of stage `teach`, if there is one.
        work: As in `teach_stage`.
    """
    settings: dict[str, Any] = {"labels": domain.labels, "task": str(domain.task)}
    splits: list[str] = [Split.UNLABELLED, Split.TRAIN]
    inputs: dict[str, str] = {}
    if domain.teacher == LABELS:
        settings["teacher"] = LABELS
    else:
        from valora_teachers.registry import teacher_facts

        weights = domain.teacher if taught is None else None
        facts, hashes = teacher_facts(
            teacher.kind, weights, teacher.options, domain.prompt, _cache(domain, work)
        )
        kept = {"min_confidence", "threshold", "labelled"}
        settings |= {key: value for key, value in as_dict(teacher).items() if key in kept}
        settings |= facts
        inputs |= hashes
        if taught is not None:
            inputs["teacher"] = digest(taught / str(_artefact(teacher)))
        if not teacher.labelled:
            splits.remove(Split.TRAIN)
        splits += [Split.VAL, Split.TEST]  # for the report
    if (data / TRUTH).is_dir():
        splits.append(TRUTH)
    inputs |= {str(split): digest(data / split) for split in splits}
    return Stage(f"distill-{domain.name}", 5, settings, inputs, shared=True)


def build_distilled(
    domain: DomainSettings,
    teacher: TeacherSettings,
    data: Path,
    taught: Path | None,
    folder: Path,
    on_batch: OnStep = lambda *_: None,
) -> None:
    """Write `taught` (the LMM's training samples) and `report.json` into the stage's folder."""
    if domain.teacher == LABELS:
        samples = shards.read(intact(data / Split.TRAIN))
        if (data / TRUTH).is_dir():
            intact(data / Split.UNLABELLED)  # holds the images
            samples += shards.read(intact(data / TRUTH))
        shards.write(samples, domain.labels, folder / TAUGHT)
        write_json(folder / REPORT, {"teacher": LABELS, "samples": len(samples)})
        return
    from valora_teachers.base import check_answers

    weights = domain.teacher if taught is None else intact(taught / str(_artefact(teacher)))
    model = load_teacher(weights, domain, teacher)
    assert domain.task is not None, "`Settings.chosen` fills it in"
    found: Found = {}
    truth: Truth = {}
    pace = Pace()
    for split in (Split.UNLABELLED, Split.VAL, Split.TEST):
        samples = shards.read(intact(data / split))
        answers = _answer(model, samples, pace, on_batch)
        check_answers(f"the teacher of domain {domain.name}", domain.task, answers)
        found[split] = [
            replace(sample, answer=answer) for sample, answer in zip(samples, answers, strict=True)
        ]
        known = data / (TRUTH if split is Split.UNLABELLED else split)
        if known.is_dir():
            truth[split] = shards.open_shard(intact(known)).answers()
    if domain.task.spec.detects:
        kept, report = _keep_boxes(domain, teacher, found, truth)
    else:
        kept, report = _keep_answers(domain, teacher, found, truth)
    report |= {"teacher": domain.teacher, "samples": len(kept)}
    report["speed"] = pace.facts()
    sure = max(report["threshold"] or 0.0, teacher.min_confidence)
    # The stage's version stays, as nothing that is trained reads this file: outputs without it are
    # up to date, and their bundles show no teacher's answers.
    write_json(folder / TESTED, [_shown(domain, one.answer, sure) for one in found[Split.TEST]])
    if teacher.labelled:
        kept += shards.read(intact(data / Split.TRAIN))
    shards.write(kept, domain.labels, folder / TAUGHT)
    write_json(folder / REPORT, report)


def _shown(domain: DomainSettings, answer: Answer, sure: float) -> Any:
    """A teacher's answer as golden examples hold answers; None if there is none."""
    if answer.boxes or (domain.task is not None and domain.task.spec.detects):
        return [
            {"label": box.label, "box": list(box.xyxy), "confidence": box.confidence}
            for box in answer.boxes
            if box.confidence >= sure
        ]
    if answer.captions:
        return golden_text(answer.captions[0])
    if answer.choice is None:
        return None
    return {"label": answer.choice} | ({"confidence": max(answer.soft)} if answer.soft else {})


def _answer(model: Teacher, samples: list[Sample], pace: Pace, on_batch: OnStep) -> list[Answer]:
    """A teacher's answers; its pace is measured."""

    def answered(done: int, all_: int) -> None:
        pace.on_batch(done)
        on_batch(done, all_, 0.0)

    pace.start(samples)
    answers = model.answer(samples, answered)
    pace.on_batch(len(samples))  # some teachers report no batches
    return answers


Found = dict[Split, list[Sample]]
Truth = dict[Split, list[Answer]]


def _keep_boxes(
    domain: DomainSettings, teacher: TeacherSettings, found: Found, truth: Truth
) -> tuple[list[Sample], dict[str, Any]]:
    """Keep all images, with the boxes whose confidence reaches the threshold.

    mAP and calibration error are those of all boxes that the teacher gives.
    """
    matches = {
        split: match(
            [sample.answer.boxes for sample in samples],
            [answer.boxes for answer in answers],
            domain.labels,
        )
        for split, answers in truth.items()
        for samples in (found[split],)
    }
    threshold = teacher.threshold
    if threshold is None:
        threshold = matches[Split.VAL].above(teacher.min_confidence).best_threshold()
    sure = max(threshold, teacher.min_confidence)
    kept = [_above(sample, sure) for sample in found[Split.UNLABELLED]]
    boxes = sum(len(sample.answer.boxes) for sample in kept)
    if not boxes:
        raise DataError(
            f"the teacher of domain {domain.name} finds nothing on "
            f"{plural(len(kept), 'unlabelled image')} "
            f"at confidence {threshold:.2f}: check its labels, or lower teacher.threshold"
        )
    report = {
        "threshold": threshold,
        "boxes": boxes,
        "accuracy": {split: detection_figures(found, sure) for split, found in matches.items()},
    }
    return kept, report


def _above(sample: Sample, confidence: float) -> Sample:
    boxes = tuple(box for box in sample.answer.boxes if box.confidence >= confidence)
    return replace(sample, answer=replace(sample.answer, boxes=boxes))


def _keep_answers(
    domain: DomainSettings, teacher: TeacherSettings, found: Found, truth: Truth
) -> tuple[list[Sample], dict[str, Any]]:
    """Keep the samples whose answer's confidence reaches the threshold."""
    assert domain.task is not None, "`Settings.chosen` fills it in"
    said = [sample for sample in found[Split.UNLABELLED] if _has_answer(sample.answer)]
    kept = [sample for sample in said if _confidence(sample.answer) >= (teacher.threshold or 0.0)]
    if not kept:
        asked = plural(len(found[Split.UNLABELLED]), "unlabelled sample")
        if not said:
            raise DataError(
                f"the teacher of domain {domain.name} answers none of {asked}: check what it is "
                "asked, or choose another one"
            )
        raise DataError(
            f"the teacher of domain {domain.name} is sure enough of none of {asked}: check its "
            "labels, or lower teacher.threshold"
        )
    accuracy = {}
    for split, answers in truth.items():
        predicted = [sample.answer for sample in found[split]]
        scores = TASK_TYPES[domain.task].measure(predicted, answers)
        ece = calibration_error(predicted, answers)
        accuracy[split] = {
            "accuracy": scores.mean, "ci95": scores.interval(), **scores.details,
            **({} if ece is None else {"ece": ece}),
        }  # fmt: skip
    return kept, {"threshold": teacher.threshold, "accuracy": accuracy}


def _has_answer(answer: Answer) -> bool:
    return bool(answer.boxes or answer.choice or answer.captions)


def _confidence(answer: Answer) -> float:
    """Confidence in an answer; 1 where the teacher gives none."""
    if answer.soft:
        return max(answer.soft)
    return answer.boxes[0].confidence if answer.boxes else 1.0


def detection_figures(matches: Matches, threshold: float) -> dict[str, Any]:
    """Figures of a detector on a split, for the report."""
    precision, recall = matches.precision_recall(threshold)
    return {
        "accuracy": matches.f1(threshold),
        "ci95": matches.f1_interval(threshold),
        "precision": precision,
        "recall": recall,
        "map": matches.map,
        "ece": matches.calibration_error(),
    }


def describe_distilled(distilled: Path) -> str:
    """What the teacher labelled, and how well it agrees with the truth, for the terminal."""
    report = read_json(intact(distilled / REPORT))
    if "accuracy" not in report:
        return f": {plural(report['samples'], 'labelled sample')}"
    split = Split.UNLABELLED if Split.UNLABELLED in report["accuracy"] else Split.VAL
    agreement = f"{report['accuracy'][split]['accuracy']:.3f} against the truth"
    if "boxes" in report:
        return (
            f": {plural(report['boxes'], 'box|boxes')} from confidence "
            f"{report['threshold']:.2f} on "
            f"{plural(report['samples'], 'image')}, F1 {agreement}"
        )
    return f": {plural(report['samples'], 'answer')}, {agreement}"


def teacher_accuracy(distilled: Path, split: Split) -> float | None:
    """Accuracy of the teacher on a split; None where there is no teacher or no truth."""
    found = _teacher_report(distilled, split).get("accuracy")
    return None if found is None else float(found)


def teacher_figures(distilled: Path) -> dict[str, Any]:
    """What the teacher reaches, in the words of the manifest.

    Args:
        distilled: Output of stage `distill`.

    Returns:
        `teacher`, its accuracy on the test split (None where there is no teacher), with its
        interval `teacher_ci95` and further metrics, such as `teacher_map` and `teacher_ece`.
    """
    more = {
        f"teacher_{key}": value
        for key, value in _teacher_report(distilled, Split.TEST).items()
        if key == "ci95" or (key != "accuracy" and math.isfinite(value))
    }
    return {"teacher": teacher_accuracy(distilled, Split.TEST)} | more


def answers_on_test(distilled: Path) -> list[Any]:
    """The teacher's answers on the test split, in its order, as golden examples hold answers.

    Args:
        distilled: Output of stage `distill`.

    Returns:
        Lists of boxes from the teacher's threshold on, ``{"label", "confidence"}`` or ``{"text"}``,
        None where it gave no answer; empty where there is no teacher, or the output is of an
        earlier version.
    """
    if not (distilled / TESTED).exists():
        return []
    return list(read_json(intact(distilled / TESTED)))


def teacher_speed(distilled: Path) -> dict[str, Any]:
    """`images_per_second` of the teacher and its `machine`; empty where there is no teacher."""
    return dict(read_json(intact(distilled / REPORT)).get("speed", {}))


def _teacher_report(distilled: Path, split: Split) -> dict[str, Any]:
    return dict(read_json(intact(distilled / REPORT)).get("accuracy", {}).get(split, {}))
