"""What a data-set format is, and what it is asked to open."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from valora_data.errors import DataError
from valora_data.schema import Sample, Split, Task
from valora_data.sources.formats.files import files_below, load_json, read_lines
from valora_data.sources.formats.videos import FRAMES

if TYPE_CHECKING:
    from valora_data.faults import ImageReader

ARCHIVES = frozenset({".7z", ".gz", ".rar", ".tar", ".tgz", ".xz", ".zip"})
ANSWERS = frozenset({"objects", "phrase", "label", "video", "count", "answers", "captions"})
"""What formats hold: a field of `Answer`; boxes are many objects or a phrase's."""
Splits = dict[Split | None, Callable[[], Iterator[Sample]]]
"""Streams by split, which can be started again; None: of what missing splits are taken."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the samples of a domain come from."""

    kind: str  # name of the format (see `valora_data.sources.registry.FORMATS`)
    task: Task
    labels: tuple[str, ...] = ()  # empty where answers are language, or to take every label
    name: str = ""  # of the domain; `scenes` draws the built-in domain of this name
    path: str | None = None  # file, folder or name of the data set, as the format has it
    images: str | None = None  # folder of the images; None for that of the file that names them
    columns: Mapping[str, str] = field(default_factory=dict)  # by field of `rows.NAMES`
    frames: int = FRAMES  # taken of each video
    counts: Mapping[str, int] = field(default_factory=dict)  # samples to draw for each split
    seed: int = 0  # for drawing
    reader: ImageReader | None = None  # collects faults; None for one that tolerates few
    unlabelled: str | None = None  # folder of images without labels, as the unlabelled split
    document: str | None = None  # id of the document, for files of several
    entries: int = 30  # records of a drawn document, or scenes of a drawn album

    @property
    def location(self) -> str:
        """`path`, for formats that need one: no archive."""
        if self.path is None:
            setting = f"domains.{self.name or 'NAME'}.source.path"
            raise DataError(f"a source of kind {self.kind} needs a path: set {setting}")
        check_unpacked(Path(self.path))
        return self.path

    @property
    def file(self) -> Path:
        """The file that names the images: `path`, or the only such file in that folder."""
        return annotation_file(Path(self.location))

    @property
    def image_folder(self) -> Path:
        """Folder of the images: `images`, or the folder of the file."""
        return Path(self.images) if self.images else self.file.parent


def check_unpacked(path: Path) -> None:
    """Raise a `DataError` if the path is an archive."""
    if path.suffix.lower() in ARCHIVES and path.is_file():
        raise DataError(f"{path} is an archive: unpack it, and name the folder")


def annotation_file(path: Path) -> Path:
    """`data.yaml`, or the only YAML or JSON file of a folder; any other path as it is."""
    if not path.is_dir():
        return path
    if (path / "data.yaml").is_file():
        return path / "data.yaml"
    found = [file for file in path.iterdir() if file.suffix in (".json", ".yaml", ".yml")]
    return found[0] if len(found) == 1 and found[0].is_file() else path


class Location:
    """A path that a user gave, with what formats recognise it by; each is read once."""

    def __init__(self, text: str) -> None:
        self.text, self.path = text, Path(text)
        self.file = annotation_file(self.path)

    @cached_property
    def suffixes(self) -> frozenset[str]:
        """Suffixes in lower case of the file, or of all files in the folder."""
        files = files_below(self.path) if self.path.is_dir() else [self.path]
        return frozenset(file.suffix.lower() for file in files)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of a JSON file's object, or of its first entry if it is a list."""
        return frozenset(self.entry) if self.file.suffix == ".json" else frozenset()

    @cached_property
    def entry(self) -> dict[str, Any]:
        """The object or first entry of a JSON file, or the first of its lines; else empty."""
        content: Any = None
        if self.file.suffix in (".json", ".jsonl") and self.file.is_file():
            lines = self.file.suffix == ".jsonl"
            content = [row for _, row in read_lines(self.file)] if lines else load_json(self.file)
        content = content[0] if isinstance(content, list) and content else content
        return content if isinstance(content, dict) else {}


class SourceFormat(ABC):
    """A data-set format; its name in the registry is the `source.kind` of the configuration."""

    answers: ClassVar[frozenset[str]] = ANSWERS  # what it holds
    task: ClassVar[Task | None] = None  # the most likely one; None if a data set tells
    remote: ClassVar[bool] = False  # whether the path may be a name of what is on the hub
    video: ClassVar[bool] = False  # whether all samples are videos
    texts: ClassVar[bool] = False  # whether it may hold questions without images
    drawn: ClassVar[bool] = False  # whether samples are drawn, so that none is a copy of another

    def supports(self, task: Task) -> bool:
        """Whether the format holds answers for a task."""
        spec = task.spec
        if spec.answer == "boxes":
            return ("objects" if spec.detects else "phrase") in self.answers
        return ("video" if spec.video else spec.answer) in self.answers

    @abstractmethod
    def open(self, source: Source) -> Splits:
        """Streams of the splits of a source; a `DataError` says what is missing or corrupt."""

    def reads(self, source: Source) -> Iterator[Path]:
        """Files, perhaps missing, that decide on the samples; by default those of the source."""
        for path in map(Path, filter(None, (source.path, source.images))):
            yield from files_below(path) if path.is_dir() else filter(Path.exists, (path,))

    def recognises(self, location: Location) -> bool:
        """Whether a path is of this format. Formats that are never guessed leave this out."""
        return False

    def guess_task(self, path: str) -> Task:
        """The most likely task of the data set at a path; a `DataError` if it does not tell."""
        if self.task is None:
            raise DataError(f"{path} does not tell its task: give one with --task")
        return self.task
