"""A shelf of small models, read as domains: the folder that Ultralytics trains into."""

import contextlib
import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath

import yaml

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.schema import Split, Task
from valora_data.sources.formats.files import folder_splits, is_data, read_text
from valora_data.sources.formats.yolo import YoloSet

ARGS = "args.yaml"
WEIGHTS = ("best.pt", "last.pt")
TASKS: Mapping[str, Task] = {
    "detect": Task.DETECTION, "segment": Task.DETECTION, "pose": Task.DETECTION,
    "classify": Task.CLASSIFICATION,
}  # fmt: skip
"""Ultralytics' tasks, and ours; of masks and poses the boxes are taken."""
UNNAMED = re.compile(r"(train|exp|run|multitrain)?[-_]?\d*")  # Names of runs that nobody has named
SCORES = ("metrics/mAP50-95(B)", "metrics/mAP50-95(M)", "metrics/accuracy_top1")
"""Columns of `results.csv` that tell the better of two runs."""


@dataclass(frozen=True, slots=True)
class ShelfModel:
    """A small model with the data that it was trained on."""

    name: str  # of its domain
    task: Task
    labels: tuple[str, ...]  # its classes, in the order of their indices
    run: Path  # folder of its training
    weights: Path  # its `.pt` file
    data: Path  # Ultralytics' YAML file, or the folder of a classification data set
    kind: str  # of the source that reads the data
    score: float | None = None  # the best of its training; None if it was not recorded


@dataclass(frozen=True, slots=True)
class Shelf:
    """The models of a folder by their domains' names, and a note for each run left out."""

    models: dict[str, ShelfModel]
    notes: tuple[str, ...] = ()


def is_shelf(folder: Path) -> bool:
    """Whether a folder holds trainings of Ultralytics."""
    return folder.is_dir() and any(_weights(file.parent) for file in folder.rglob(ARGS))


def read_shelf(folder: Path) -> Shelf:
    """Trainings below a folder, the best of each data set, or the newest; or a `DataError`."""
    if not folder.is_dir():
        text = f"shelf {folder} does not exist: name the folder that Ultralytics trains to"
        raise DataError(text)
    found, notes = list[ShelfModel](), list[str]()
    for file in sorted(folder.rglob(ARGS)):
        try:
            found.append(_read(file.parent, folder))
        except DataError as error:
            notes.append(f"run {file.parent} left out: {error}")
    best: dict[tuple[Path, Task], ShelfModel] = {}
    for model in sorted(found, key=lambda model: model.weights.stat().st_mtime):
        left, kept = best.get((model.data, model.task)), model
        if left and not (left.score is None or model.score is None or left.score <= model.score):
            left, kept = model, left
        best[model.data, model.task] = kept
        if left is not None:
            notes.append(f"run {left.run} left out: {kept.run} is a better one of the same data")
    if not best:
        reason = "; ".join(notes) or f"no run with {ARGS} and weights/{WEIGHTS[0]} lies in it"
        raise DataError(f"shelf {folder} holds no model that can be used: {reason}")
    models: dict[str, ShelfModel] = {}
    for model in sorted(best.values(), key=lambda model: str(model.run)):
        names = [model.name, *(f"{model.name}_{number}" for number in range(2, len(best) + 2))]
        name = next(name for name in names if name not in models)
        models[name] = replace(model, name=name)
        yolo = model.kind == "yolo"
        splits = YoloSet(model.data).splits if yolo else list(folder_splits(model.data))
        if Split.TEST not in splits:
            text = f"the data of {name} has no test split: it is taken from the training images,"
            notes.append(f"{text} which the teacher has seen, so its accuracy there is too high")
    return Shelf(models, tuple(notes))


def _weights(run: Path) -> Path | None:
    files = [run / "weights" / name for name in WEIGHTS]
    return next((file for file in files if file.is_file()), None)


def _read(run: Path, shelf: Path) -> ShelfModel:
    try:
        content = yaml.safe_load(read_text(run / ARGS))
    except yaml.YAMLError as error:
        raise DataError(f"its {ARGS} is no YAML") from error
    if not isinstance(content, dict) or content.get("mode", "train") != "train":
        raise DataError("it is no training")
    task, weights = TASKS.get(str(content.get("task"))), _weights(run)
    if task is None:
        raise DataError(f"task {content.get('task')} has no upright boxes and no classes")
    if weights is None:
        raise DataError(f"it has no weights/{WEIGHTS[0]}")
    data = _find_data(str(content.get("data") or ""), run, shelf)
    if task is Task.CLASSIFICATION:
        location = next(iter(folder_splits(data).values()), data)
        folders = (item for item in sorted(location.iterdir()) if item.is_dir())
        kind, labels = "imagefolder", [item.name for item in folders if is_data(item.name)]
    else:
        kind, labels = "yolo", [name for _, name in sorted(YoloSet(data).names.items())]
    if not labels:
        raise DataError(f"{data} holds no class: check the path")
    own = run.name if not UNNAMED.fullmatch(run.name) else ""
    of_data = data.parent.name if data.stem in ("data", "dataset") else data.stem
    name = re.sub(r"\W+", "_", own or of_data).strip("_").lower() or "domain"
    name = name if name.isidentifier() else f"d_{name}"
    return ShelfModel(name, task, tuple(labels), run, weights, data, kind, _score(run))


def _find_data(given: str, run: Path, shelf: Path) -> Path:
    """The data of a run: where they were, or by an end of the path around run and shelf."""
    if not given:
        raise DataError(f"its {ARGS} names no data")
    location = PureWindowsPath(given)  # it reads slashes, too
    parts = [part for part in location.relative_to(location.anchor).parts if part != ".."]
    ends = [Path(*parts[start:]) for start in range(len(parts) - 1)]
    around = [Path.cwd(), *shelf.absolute().parents, *run.absolute().parents]
    for folder in [*around, *(folder / "datasets" for folder in around)]:
        for part in (expanded(given), *ends):
            if (folder / part).exists():
                return (folder / part).resolve()
    text = f"its data {given} is not there any more: put it where it was, or"
    raise DataError(f"{text} {ends[-1] if ends else given} beside the shelf")


def _score(run: Path) -> float | None:
    file, found = run / "results.csv", []
    for row in csv.DictReader(read_text(file).splitlines()) if file.is_file() else ():
        for column, value in row.items():
            with contextlib.suppress(TypeError, ValueError):
                found += [float(value)] if str(column).strip() in SCORES else []
    return max(found, default=None)
