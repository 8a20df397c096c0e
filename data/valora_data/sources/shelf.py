"""A shelf of small models: the folder that Ultralytics trains into, read as domains.

Every run has `args.yaml` (task and data set) and `weights/best.pt`. Trainings of one model on
several data sets (`multitrain/`) are folders of such runs. Nothing is unpickled here: class names
come from the data set that a run was trained on.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

import yaml

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.schema import Split, Task
from valora_data.sources.formats.files import folder_splits
from valora_data.sources.formats.tables import read_text
from valora_data.sources.formats.yolo import YoloSet

if TYPE_CHECKING:
    from collections.abc import Mapping

ARGS = "args.yaml"
WEIGHTS = ("best.pt", "last.pt")
TASKS: Mapping[str, Task] = {
    "detect": Task.DETECTION, "segment": Task.DETECTION, "pose": Task.DETECTION,
    "classify": Task.CLASSIFICATION,
}  # fmt: skip
"""Ultralytics' tasks, and ours; of masks and poses the boxes are taken."""
UNNAMED = re.compile(r"(train|exp|run|multitrain)?[-_]?\d*")
"""Names of runs that nobody has named."""
SCORES = ("metrics/mAP50-95(B)", "metrics/mAP50-95(M)", "metrics/accuracy_top1")
"""Columns of `results.csv` that tell the better of two runs."""


@dataclass(frozen=True, slots=True)
class ShelfModel:
    """A small model with the data that it was trained on.

    Attributes:
        name: Name of its domain.
        task: Its task type.
        labels: Its classes, in the order of their indices.
        run: Folder of its training.
        weights: Its `.pt` file.
        data: Ultralytics' YAML file, or the folder of a classification data set.
        kind: Kind of source that reads the data.
        score: The best score of its training; None if it was not recorded.
    """

    name: str
    task: Task
    labels: tuple[str, ...]
    run: Path
    weights: Path
    data: Path
    kind: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Shelf:
    """The models of a folder, one for each data set.

    Attributes:
        models: The models, by the name of their domain.
        notes: A sentence for each run that was left out.
    """

    models: dict[str, ShelfModel]
    notes: tuple[str, ...] = field(default=())


def is_shelf(folder: Path) -> bool:
    """Whether a folder holds trainings of Ultralytics."""
    return folder.is_dir() and any(_has_weights(file.parent) for file in folder.rglob(ARGS))


def read_shelf(folder: Path) -> Shelf:
    """Find the trainings in a folder and below it.

    Of several runs on one data set the one with the best score is taken, or else the newest.

    Args:
        folder: Ultralytics' `runs/`, a folder in it, or a single run.

    Raises:
        DataError: There is none that can be read; the message says why.
    """
    if not folder.is_dir():
        raise DataError(
            f"shelf {folder} does not exist: name the folder that Ultralytics trains to"
        )
    found: list[ShelfModel] = []
    notes: list[str] = []
    for file in sorted(folder.rglob(ARGS)):
        try:
            found.append(_read(file, folder))
        except DataError as error:
            notes.append(str(error))
    best: dict[tuple[Path, Task], ShelfModel] = {}
    for model in sorted(found, key=_age):
        key = (model.data, model.task)
        if key in best:
            model, other = _better(best[key], model)  # noqa: PLW2901
            notes.append(f"run {other.run} left out: {model.run} is a better one of the same data")
        best[key] = model
    if not best:
        reason = "; ".join(notes) or f"no run with {ARGS} and weights/{WEIGHTS[0]} lies in it"
        raise DataError(f"shelf {folder} holds no model that can be used: {reason}")
    named = _named(sorted(best.values(), key=lambda model: str(model.run)))
    notes += [
        f"the data of {name} has no test split: it is taken from the training images, which "
        "the teacher has seen, so that its accuracy there is too high"
        for name, model in named.items()
        if not _has_test(model)
    ]
    return Shelf(named, tuple(notes))


def _has_test(model: ShelfModel) -> bool:
    if model.kind == "yolo":
        return Split.TEST in YoloSet(model.data).splits
    return Split.TEST in folder_splits(model.data)


def _has_weights(run: Path) -> bool:
    return any((run / "weights" / name).is_file() for name in WEIGHTS)


def _read(args: Path, shelf: Path) -> ShelfModel:
    """The model of one run.

    Raises:
        DataError: It cannot be used.
    """
    run = args.parent
    try:
        content = yaml.safe_load(read_text(args))
    except yaml.YAMLError as error:
        raise DataError(f"run {run} left out: its {ARGS} is no YAML") from error
    if not isinstance(content, dict) or content.get("mode", "train") != "train":
        raise DataError(f"run {run} left out: it is no training")
    task = TASKS.get(str(content.get("task")))
    if task is None:
        raise DataError(
            f"run {run} left out: task {content.get('task')} has no upright boxes and no classes"
        )
    if not _has_weights(run):
        raise DataError(f"run {run} left out: it has no weights/{WEIGHTS[0]}")
    weights = next(file for name in WEIGHTS if (file := run / "weights" / name).is_file())
    data = _find_data(str(content.get("data") or ""), run, shelf)
    if task is Task.CLASSIFICATION:
        labels, kind = _folder_labels(data), "imagefolder"
    else:
        labels, kind = tuple(name for _, name in sorted(YoloSet(data).names.items())), "yolo"
    name = _name_of(run, data)
    return ShelfModel(name, task, labels, run, weights, data, kind, _score(run))


def _find_data(given: str, run: Path, shelf: Path) -> Path:
    """The data set of a run: where it was, or below a folder around the run."""
    if not given:
        raise DataError(f"run {run} left out: its {ARGS} names no data")
    place = expanded(given)
    around = [Path.cwd(), *shelf.absolute().parents, *run.absolute().parents]
    around += [folder / "datasets" for folder in tuple(around)]
    ends = _ends(given)
    for folder in around:
        for part in (place, *ends):
            if (folder / part).exists():
                return (folder / part).resolve()
    raise DataError(
        f"run {run} left out: its data {given} is not there any more: put it where it was, or "
        f"{ends[-1] if ends else place} beside the shelf"
    )


def _ends(given: str) -> list[Path]:
    """Ever shorter ends of a path that has moved, also one of Windows, of two parts at least."""
    place = PureWindowsPath(given)  # it reads slashes, too
    parts = [part for part in place.relative_to(place.anchor).parts if part != ".."]
    return [Path(*parts[start:]) for start in range(len(parts) - 1)]


def _folder_labels(folder: Path) -> tuple[str, ...]:
    """Classes of a folder with a folder for each: those of the training split."""
    splits = folder_splits(folder)
    place = next(iter(splits.values()), folder)
    labels = sorted(item.name for item in place.iterdir() if item.is_dir() and item.name[0] != ".")
    if not labels:
        raise DataError(f"{folder} holds no folder for each class: check the path")
    return tuple(labels)


def _name_of(run: Path, data: Path) -> str:
    """Name of a run's domain: its own if somebody gave it one, or else that of its data."""
    own = run.name if not UNNAMED.fullmatch(run.name) else ""
    of_data = data.parent.name if data.stem in ("data", "dataset") else data.stem
    name = re.sub(r"\W+", "_", own or of_data).strip("_").lower() or "domain"
    return name if name.isidentifier() else f"d_{name}"


def _named(models: list[ShelfModel]) -> dict[str, ShelfModel]:
    """Models by their names, of which those that repeat get a number."""
    named: dict[str, ShelfModel] = {}
    for model in models:
        name, number = model.name, 1
        while name in named:
            number += 1
            name = f"{model.name}_{number}"
        fields: dict[str, Any] = {slot: getattr(model, slot) for slot in model.__slots__}
        named[name] = ShelfModel(**fields | {"name": name})
    return named


def _score(run: Path) -> float | None:
    """The best score in a run's `results.csv`."""
    file = run / "results.csv"
    if not file.is_file():
        return None
    rows = csv.DictReader(read_text(file).splitlines(), skipinitialspace=True)
    found = []
    for row in rows:
        for column, value in row.items():
            if isinstance(column, str) and column.strip() in SCORES:
                try:
                    found.append(float(value))
                except (TypeError, ValueError):
                    continue
    return max(found, default=None)


def _age(model: ShelfModel) -> float:
    return model.weights.stat().st_mtime


def _better(one: ShelfModel, newer: ShelfModel) -> tuple[ShelfModel, ShelfModel]:
    """The better of two runs, and the other one."""
    if one.score is not None and newer.score is not None and one.score > newer.score:
        return one, newer
    return newer, one
