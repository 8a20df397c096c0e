"""Predictions on disk: one JSON object per line, which an interrupted run continues."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREDICTIONS = "predictions.jsonl"
"""File of the predictions, in the output folder."""
RUN = "run.json"
"""File beside it with what the predictions depend on."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The answer of one domain to one file.

    Attributes:
        file: Path of the image or video below the folder that was read.
        domain: Name of the domain.
        task: Its task type.
        width: Width of the image in pixels, as a viewer shows it.
        height: Its height.
        answer: Fields of `/v1/vision`'s results: `detections` (each with `label`, `confidence`
            and `box` (x0, y0, x1, y1) in pixels), or `label`, `confidence` and `confidences`, or
            `text`.
        error: Why there is no answer; None if there is one.
        version: Size in bytes and time of change in nanoseconds of the file, as it was read.
    """

    file: str
    domain: str
    task: str
    width: int = 0
    height: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    version: tuple[int, int] = (0, 0)

    @property
    def detections(self) -> list[dict[str, Any]]:
        """Boxes, by falling confidence; none for tasks without boxes."""
        return list(self.answer.get("detections") or ())


@dataclass(frozen=True, slots=True)
class DomainFacts:
    """What the writers of formats need to know about a domain.

    Attributes:
        name: Its name.
        task: Its task type.
        labels: Its labels, in the order of class indices; empty where answers are language.
        boxes: Whether its answers are boxes.
    """

    name: str
    task: str
    labels: tuple[str, ...]
    boxes: bool


@dataclass(frozen=True, slots=True)
class Results:
    """A finished run, as the writers of formats read it.

    Attributes:
        out: Output folder.
        source: Folder of the images and videos, absolute.
        model: Name and version of the bundles, e.g. ``detection@1``.
        domains: The domains that were asked, by name.
    """

    out: Path
    source: Path
    model: str
    domains: dict[str, DomainFacts]

    def predictions(self) -> Iterator[Prediction]:
        """All answers, sorted by file and domain; failures are left out."""
        order = {name: place for place, name in enumerate(self.domains)}
        found = [made for made in read_predictions(self.out / PREDICTIONS) if made.error is None]
        found = [made for made in found if made.domain in order]
        yield from sorted(found, key=lambda made: (made.file, order[made.domain]))


def read_predictions(path: Path) -> Iterator[Prediction]:
    """The predictions of a file; the newest of each file and domain, in the order of the file.

    A last line that was cut off, as by a full disk or a killed process, is left out.

    Raises:
        SettingsError: Another line is damaged.
    """
    if not path.is_file():
        return
    found: dict[tuple[str, str], Prediction] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            fields = json.loads(line)
            made = Prediction(**fields | {"version": tuple(fields["version"])})
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise SettingsError(
                f"line {number} of {path} is damaged: remove it, or name another folder with --out"
            ) from error
        found.pop((made.file, made.domain), None)
        found[made.file, made.domain] = made
    yield from found.values()


class Journal:
    """Appends predictions to a file as they come, each with a line of its own.

    Args:
        path: The file. A last line that was cut off is removed.
    """

    def __init__(self, path: Path) -> None:
        _drop_cut_line(path)
        self._file = path.open("ab")

    def add(self, made: Prediction) -> None:
        """Append a prediction and hand it to the system, so that a kill loses nothing."""
        line = json.dumps(asdict(made), ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _drop_cut_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)


def check_run(out: Path, facts: dict[str, Any]) -> None:
    """Keep what the predictions of a folder depend on, and refuse to mix them with others.

    Args:
        out: Output folder; it exists.
        facts: JSON values.

    Raises:
        SettingsError: The folder holds predictions that depend on something else.
    """
    file = out / RUN
    if not file.is_file():
        if (out / PREDICTIONS).exists():
            raise SettingsError(f"{out} holds predictions without {RUN}: name another with --out")
        file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        return
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} is damaged: name another folder with --out") from error
    other = sorted(name for name in facts | before if facts.get(name) != before.get(name))
    if other:
        raise SettingsError(
            f"{out} holds predictions of another run, with other {', '.join(other)}: name another "
            "folder with --out, or delete that one"
        )
