"""Command ``valora label``: what a small model finds in pictures, written as `valora predict` does.

It is the other half of `valora predict --beside`: nothing that serves imports small models.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import ValoraError
from valora_data.faults import FaultError
from valora_data.schema import Answer, Sample, Task
from valora_data.sources.formats.files import IMAGES, files_below
from valora_data.sources.formats.labelled import ahead, load_image
from valora_teachers.registry import KINDS, load_teacher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_teachers.base import Teacher


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 if the model cannot answer or there are no pictures."""
    made = argparse.ArgumentParser("valora label", description=__doc__)
    made.add_argument("model", help="best.pt of Ultralytics; a transformers folder or hub name")
    made.add_argument("folder", type=Path, help="folder of images, or one image")
    made.add_argument("--labels", required=True, help="labels to keep, separated by commas")
    made.add_argument("--task", default="detection", help="task of the domain")
    made.add_argument("--domain", default="small", help="name that stands in the file")
    made.add_argument("--kind", help=f"{', '.join(KINDS)}; guessed from the model's name")
    made.add_argument(
        "--names", default="", help="CLASS=LABEL of classes with other names, with commas between"
    )
    made.add_argument(
        "--min-score", type=float, default=0.25, help="least confidence of boxes (Ultralytics' own)"
    )
    made.add_argument("--out", type=Path, default=Path("labels.jsonl"), help="file to write")
    options = made.parse_args(arguments)
    kind = options.kind or ("yolo" if options.model.endswith(".pt") else "huggingface")
    names = dict(pair.split("=", 1) for pair in options.names.split(",") if "=" in pair)
    try:
        teacher = load_teacher(
            kind, options.model, options.labels.split(","), {"names": names}, Task(options.task)
        )
        count = _label(teacher, options)
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not count:
        print(f"error: {options.folder} holds no image: check the path", file=sys.stderr)
    return 0 if count else 1


def _label(teacher: Teacher, options: argparse.Namespace) -> int:
    """Write a line for each image of the folder; their number."""
    folder, out = options.folder, options.out
    root = folder.parent if folder.is_file() else folder
    paths = [folder] if folder.is_file() else files_below(folder, IMAGES)
    partial = out.with_suffix(".partial")
    waiting: list[Sample] = []
    with partial.open("w", encoding="utf-8") as file:

        def flush() -> None:
            for sample, answer in zip(waiting, teacher.answer(waiting), strict=True):
                width, height = sample.image.size
                line: dict[str, Any] = {"file": sample.id, "domain": options.domain}
                line |= {"task": str(teacher.task), "width": width, "height": height}
                line["answer"] = _fields(answer, options.min_score)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            waiting.clear()

        for path, image in ahead(paths, load_image):
            try:
                shown = image.result()
            except FaultError as error:
                print(f"left out: {error.text}", file=sys.stderr)
                continue
            waiting.append(Sample(path.relative_to(root).as_posix(), shown, Answer()))
            if len(waiting) == teacher.batch:
                flush()
        flush()
    partial.replace(out)
    return len(paths)


def _fields(answer: Answer, min_score: float) -> dict[str, Any]:
    """An answer as ``/v1/vision`` gives it."""
    if answer.choice is not None:
        return {"label": answer.choice, "confidence": max(answer.soft, default=1.0)}
    return {
        "detections": [
            {"label": box.label, "confidence": box.confidence, "box": box.xyxy}
            for box in answer.boxes
            if box.confidence >= min_score
        ]
    }


if __name__ == "__main__":
    sys.exit(main())
