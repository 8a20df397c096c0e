"""Command ``valora label``: what a small model finds in pictures, written as `valora predict` does.

The same command continues where an interrupted one was. It is the other half of
`valora predict --beside`: nothing that serves imports small models.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from valora_data.contract.files import expanded
from valora_data.cpu import ahead
from valora_data.errors import ValoraError
from valora_data.faults import FaultError, load_image
from valora_data.hashing import file_facts, place_hash
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.formats.files import images_below, read_lines, readable
from valora_teachers.base import TeacherError
from valora_teachers.registry import KINDS, load_teacher


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 if the model cannot answer or there are no pictures."""
    made = argparse.ArgumentParser("valora label", description="Answer images with a small model.")
    add = made.add_argument
    add("model", help="best.pt of Ultralytics; a transformers folder or hub name")
    add("folder", type=expanded, help="folder of images, or one image")
    add("--labels", required=True, help="labels to keep, as a line of CSV")
    add("--task", default="detection", help="task of the domain")
    add("--domain", required=True, help="name of the domain that answers the same")
    add("--kind", help=f"{', '.join(KINDS)}; guessed from the model's name")
    add("--names", default="", help="CLASS=LABEL of classes with other names, with commas between")
    add("--min-score", type=float, default=0.25, help="least confidence of a box (as Ultralytics)")
    add("--out", type=expanded, default="labels.jsonl", help="file to write (%(default)s)")
    options = made.parse_args(arguments)
    try:
        _label(options)
    except ValoraError as error:
        said = str(error).replace("teacher.options.names", "--names CLASS=LABEL")
        print(f"error: {said}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {options.out} cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    return 0


def _label(options: argparse.Namespace) -> None:
    """Write a line for each image that can be read."""
    folder, out = options.folder, options.out
    paths = [folder] if folder.is_file() else images_below(folder)
    root = folder.parent if folder.is_file() else folder
    file = options.model.endswith(".pt") or Path(options.model).is_file()
    kind = options.kind or ("yolo" if file else "huggingface")
    labels, pairs = (
        [part.strip() for part in next(csv.reader([text], skipinitialspace=True)) if part.strip()]
        for text in (options.labels, options.names)
    )
    if not labels:
        raise TeacherError(f"--labels {options.labels} names none: name those of the domain")
    if not 0 <= options.min_score <= 1:
        raise TeacherError(f"--min-score is {options.min_score}: name one from 0 to 1")
    for pair in pairs:
        if "=" not in pair:
            raise TeacherError(f"--names {pair} maps nothing: write CLASS=LABEL")
    if out.is_dir():
        raise TeacherError(f"--out {out} is a folder: name a file")
    tempfile.TemporaryFile(dir=out.parent).close()  # before all is asked, which may take hours
    names = dict(pair.split("=", 1) for pair in pairs)
    teacher = load_teacher(kind, options.model, labels, {"names": names}, Task(options.task))
    asked = options.domain, labels, pairs, options.task, kind, options.min_score
    by = hashlib.sha256(f"{place_hash(options.model)} {asked}".encode()).hexdigest()[:16]
    files = {readable(path.relative_to(root).as_posix()): path for path in paths}
    versions = {name: file_facts(path) for name, path in files.items()}
    whole, journal = (out.parent / f".{out.name}.{part}" for part in ("partial", by))
    rows = {
        row["file"]: row
        for _, row in (read_lines(journal) if journal.is_file() else [])
        if row is not None and row["version"] == versions.get(row["file"])
    }
    samples = _read({name: path for name, path in files.items() if name not in rows})
    while batch := list(islice(samples, teacher.batch)):
        answers = teacher.answer(batch)
        with journal.open("a", encoding="utf-8") as kept:
            for sample, answer in zip(batch, answers, strict=True):
                width, height = sample.image.size
                rows[sample.id] = {
                    "file": sample.id, "domain": options.domain, "task": str(teacher.task),
                    "width": width, "height": height,
                    "answer": _fields(answer, options.min_score), "version": versions[sample.id],
                }  # fmt: skip
                kept.write(json.dumps(rows[sample.id], ensure_ascii=False) + "\n")
    if not rows:
        raise TeacherError(f"{folder} holds no image that can be read: check the path")
    lines = (json.dumps(rows[name], ensure_ascii=False) + "\n" for name in files if name in rows)
    whole.write_text("".join(lines), encoding="utf-8")
    whole.replace(out)  # a file is whole or not there
    journal.unlink(missing_ok=True)


def _read(files: dict[str, Path]) -> Iterator[Sample]:
    for (name, _), image in ahead(files.items(), lambda item: load_image(item[1])):
        try:
            yield Sample(name, image.result(), Answer())
        except FaultError as error:
            print(f"left out: {error.text}", file=sys.stderr)


def _fields(answer: Answer, min_score: float) -> dict[str, Any]:
    """An answer as ``/v1/vision`` gives it."""
    if answer.choice is not None:
        return {"label": answer.choice, "confidence": max(answer.soft, default=1.0)}
    found = [box for box in answer.boxes if box.confidence >= min_score]
    return {
        "detections": [
            {"label": box.label, "confidence": box.confidence, "box": box.xyxy} for box in found
        ]
    }
