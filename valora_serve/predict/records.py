"""Predictions on disk: one JSON object per line, which an interrupted run continues."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import TypeAdapter

from valora_data.sources.formats.files import files_below
from valora_serve.errors import SettingsError
from valora_serve.server.samples import NOTE
from valora_serve.types import ServedModel

PREDICTIONS = "predictions.jsonl"
RUN = "run.json"  # what the predictions depend on, and the models that could be asked


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer of one domain to one file."""

    file: str  # path of the image or video below the folder that was read
    domain: str
    task: str
    width: int = 0  # of the image in pixels, as a viewer shows it
    height: int = 0
    # Fields of `/v1/vision`'s results: `detections` (each with `label`, `confidence` and `box`
    # (x0, y0, x1, y1) in pixels), or `label`, `confidence` and `confidences`, or `text`.
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None  # why there is no answer
    version: tuple[int, int] = (0, 0)  # bytes of the file, and time of change in nanoseconds

    @property
    def detections(self) -> list[dict[str, Any]]:
        """Boxes, by falling confidence; none for tasks without boxes."""
        return list(self.answer.get("detections") or ())


@dataclass(frozen=True, slots=True)
class Results:
    """A finished run, as the writers of formats read it."""

    out: Path
    source: Path  # folder of the images and videos, absolute
    model: str  # name and version of the bundles, e.g. ``detection@1``
    domains: dict[str, ServedModel]  # that were asked, by name

    def predictions(self) -> Iterator[Prediction]:
        """All answers, sorted by file and domain; failures are left out."""
        order = {name: number for number, name in enumerate(self.domains)}
        found = read_predictions(self.out / PREDICTIONS)
        kept = [made for made in found if made.error is None and made.domain in order]
        yield from sorted(kept, key=lambda made: (made.file, order[made.domain]))


def read_predictions(path: Path) -> list[Prediction]:
    """Return the newest prediction of each file and domain; a last line cut off is removed."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("rb+") as file:
            file.truncate(end)
    found: dict[tuple[str, str], Prediction] = {}
    for number, line in enumerate(content[:end].splitlines(), start=1):
        try:
            fields = json.loads(line)
            made = Prediction(**fields | {"version": tuple(fields["version"])})
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"line {number} of {path} is damaged: remove it, or name another folder with --out"
            ) from error
        found[made.file, made.domain] = made
    return list(found.values())


def take_sample(folder: Path, out: Path) -> list[ServedModel]:
    """Take over what a server kept in a `sample_folder`; of each domain, its newest bundle's."""
    found = []
    for path in sorted(files_below(folder, frozenset({".png"})), key=lambda path: path.name):
        file, facts = path.relative_to(folder).as_posix(), path.stat()
        try:
            with Image.open(path) as image:
                row, size = json.loads(image.info[NOTE]), image.size
            model = ServedModel(kind="domain", root="", **row["domain"])
            version = facts.st_size, facts.st_mtime_ns
            made = Prediction(
                file, model.name, model.task or "", *size, row["answer"], None, version
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            text = f"{path} holds no answer of a server: name the bundle to ask with --bundle"
            raise SettingsError(text) from error
        found.append((model, made))
    if not found:
        raise SettingsError(f"{folder} holds no sample of a server: name a bundle with --bundle")
    newest = {model.name: model for model, _ in found}
    kept = [asdict(made) for model, made in found if model == newest[model.name]]
    written(out / PREDICTIONS, "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in kept))
    return list(newest.values())


def written(path: Path, text: str) -> Path:
    """Write a file in one rename, so that it is never half there; returns it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def note_run(out: Path, facts: dict[str, Any], models: Iterable[ServedModel] = ()) -> None:
    """Keep the JSON values that predictions depend on, and what can be asked."""
    content = facts | {"models": [asdict(model) for model in models]}
    written(out / RUN, json.dumps(content, indent=1) + "\n")


def check_run(out: Path, facts: dict[str, Any]) -> list[ServedModel]:
    """Return what an earlier run could ask; refuse to mix its predictions with others."""
    file, made = out / RUN, out / PREDICTIONS
    if not made.is_file() or not made.stat().st_size:
        note_run(out, facts)
        return []
    try:
        before = {**json.loads(file.read_text(encoding="utf-8"))}
        models = TypeAdapter(list[ServedModel]).validate_python(before.pop("models", []))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise SettingsError(
            f"{out} holds predictions without a sound {RUN}: name another folder with --out"
        ) from error
    other = sorted(name for name in facts | before if facts.get(name) != before.get(name))
    if other:
        raise SettingsError(
            f"{out} holds predictions of another run, with other {', '.join(other)}: name another "
            "folder with --out, or delete that one"
        )
    return models
