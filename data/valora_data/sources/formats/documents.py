"""Documents and albums as formats: a domain is one document, its samples are questions about it.

What is trained on are questions of self-study (`unlabelled`), whose answers a teacher gives that
reads the document, and given ones of split `train`; `val` and `test` are given questions, or, where
there are none, further ones of self-study.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Sample, Split, Task, no_image
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.documents.albums import AlbumFact, draw_album
from valora_data.sources.documents.reading import (
    QUESTIONS,
    TEXTS,
    Asked,
    questions_file,
    read_documents,
    read_texts,
    text_files,
)
from valora_data.sources.documents.records import Fact, Link, draw_document
from valora_data.sources.documents.self_study import continuations, gaps
from valora_data.sources.formats.folders import ImagesFormat
from valora_data.sources.generic.scenes import TRAINING_SEEDS
from valora_data.wording import plural

SELF_STUDY = 400
"""Most questions of self-study where `source.counts` does not say how many."""
LEAST_FACTS = 4
"""Fewest facts of a drawn document: two to decide with, two to measure with."""


class ContextFormat(SourceFormat):
    """A format of documents."""

    task = Task.CONTEXT

    def supports(self, task: Task) -> bool:
        """Contexts only."""
        return task is Task.CONTEXT


class DocumentsFormat(ContextFormat):
    """JSON lines of documents with questions; `source.document` names the one of the domain."""

    files = "JSON lines of documents"

    def recognises(self, location: Location) -> bool:
        """JSON lines whose first entry has a text or an article."""
        if location.path.suffix != ".jsonl" or not location.path.is_file():
            return False
        try:
            return bool(read_documents(location.path))
        except DataError:
            return False

    def open(self, source: Source) -> Splits:
        """The questions about the document that is named, or the only one."""
        file = Path(source.location)
        found = read_documents(file)
        named = [one for one in found if source.document in (None, one.name)]
        if len(named) != 1:
            shown = ", ".join(one.name for one in found[:10]) + (", …" if len(found) > 10 else "")
            raise DataError(
                f"{file.name} holds {len(found)} documents ({shown}): name one of them in "
                "source.document"
            )
        return _splits_of(Document(named[0].text), named[0].asked, source)


class TextsFormat(ContextFormat):
    """A text or PDF file, or a folder of them: one document, or a collection as one document.

    `questions.jsonl` in the folder holds questions, if there are any.
    """

    files = "text or PDF"

    def recognises(self, location: Location) -> bool:
        """Text files, PDFs, and folders that hold nothing else."""
        return bool(location.suffixes) and location.suffixes <= {*TEXTS, ".pdf"}

    def open(self, source: Source) -> Splits:
        """Questions about the whole text."""
        place = Path(source.location)
        return _splits_of(Document(read_texts(place)), questions_file(place), source)

    def reads(self, source: Source) -> Iterator[Path]:
        """The text files, and the questions."""
        place = Path(source.location)
        yield from text_files(place)
        if (place / QUESTIONS).is_file():
            yield place / QUESTIONS


class AlbumFormat(ContextFormat):
    """A folder of images with `questions.jsonl`: an album."""

    def open(self, source: Source) -> Splits:
        """Questions about all images."""
        folder = Path(source.location)
        images = tuple(sample.image for sample in ImagesFormat().read(source, (folder, "")))
        asked = questions_file(folder)
        if not asked:
            raise DataError(
                f"album {folder} has no {QUESTIONS}, and pictures alone ask nothing: add "
                "questions with answers"
            )
        return _splits_of(Document("", images), asked, source)


class RecordsFormat(ContextFormat):
    """A drawn document of records; `source.entries` says of how many.

    All facts are asked about in the wordings of self-study; in the last one, half for val, half for
    test.
    """

    drawn = True
    wordings: ClassVar[int] = 3
    """Wordings that are studied."""

    def open(self, source: Source) -> Splits:
        """The questions about its facts."""
        rng = _rng(source)
        document, facts = self.draw(rng, source.entries)
        if len(facts) < LEAST_FACTS:
            raise DataError(
                f"domain {source.name} has {plural(len(facts), 'fact')} to ask about, too few to "
                "decide and to measure with: raise source.entries, or change source.seed"
            )
        studied = [
            Asked(fact.question(wording), (fact.value,))
            for wording in range(self.wordings)
            for fact in facts
        ]
        held = [facts[number] for number in rng.permutation(len(facts))]
        asked = [Asked(fact.question(-1), (fact.value,)) for fact in held]
        half = len(asked) // 2
        parts = {Split.TRAIN: studied, Split.UNLABELLED: studied}
        parts |= {Split.VAL: asked[:half], Split.TEST: asked[half:]}
        return _streams(document, parts, source)

    def draw(
        self, rng: np.random.Generator, entries: int
    ) -> tuple[Document, Sequence[Fact | Link | AlbumFact]]:
        """The document, and what questions are about."""
        drawn = draw_document(rng, entries)
        return Document(drawn.text), drawn.facts


class LinkedRecordsFormat(RecordsFormat):
    """A drawn document of records whose questions do not name the letter (`records.Link`)."""

    def draw(
        self, rng: np.random.Generator, entries: int
    ) -> tuple[Document, Sequence[Fact | Link | AlbumFact]]:
        """The same document, and facts that another fact of the letter leads to."""
        drawn = draw_document(rng, entries)
        return Document(drawn.text), drawn.links()


class DrawnAlbumFormat(RecordsFormat):
    """A drawn album; `source.entries` says of how many scenes."""

    wordings = 2

    def draw(
        self, rng: np.random.Generator, entries: int
    ) -> tuple[Document, Sequence[Fact | Link | AlbumFact]]:
        """Scenes that the base model has not been trained on, and facts about single things."""
        scenes, facts = draw_album(int(rng.integers(TRAINING_SEEDS)), entries)
        return Document("", tuple(Image.fromarray(scene.pixels) for scene in scenes)), facts


def _splits_of(document: Document, asked: Sequence[Asked], source: Source) -> Splits:
    """The splits of a document with given questions, or with those of self-study alone.

    Given questions without a split are dealt to val and test.
    """
    rng = _rng(source)
    study = [Asked(question, (answer,)) for question, answer in continuations(document.text)]
    cloze = [Asked(question, (answer,)) for question, answer in gaps(document.text, rng)]
    study += cloze if asked else []
    free: list[Asked] = []
    parts: dict[Any, list[Asked]] = {split: [] for split in Split} | {None: free}
    for one in asked or cloze:
        if one.split not in (None, "train", "val", "test"):
            raise DataError(
                f"question {one.question[:60]!r} of {source.name} has split {one.split!r}: "
                "choose train, val or test"
            )
        parts[one.split].append(one)
    del parts[None]
    for place, number in enumerate(rng.permutation(len(free))):
        parts[Split.TEST if place % 2 else Split.VAL].append(free[number])
    if document.images and not parts[Split.TRAIN]:
        # Pictures give no questions of self-study: half of those for validation are studied.
        count = len(parts[Split.VAL]) // 2
        parts[Split.TRAIN], parts[Split.VAL] = parts[Split.VAL][:count], parts[Split.VAL][count:]
    study = [study[number] for number in rng.permutation(len(study))]
    parts[Split.UNLABELLED] = [*parts[Split.TRAIN], *study]
    parts[Split.TRAIN] = parts[Split.TRAIN] or parts[Split.UNLABELLED]
    if not all(parts.values()):
        raise DataError(
            f"document {source.name} has {plural(len(asked), 'given question')} and "
            f"{plural(len(study), 'question')} of self-study, too few to learn from and to measure "
            "with: add questions with answers"
        )
    return _streams(document, parts, source)


def _rng(source: Source) -> np.random.Generator:
    """The random numbers of a document, by its name and the source's seed."""
    key = sha256(f"{source.seed}/{source.name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(key[:16], "little"))


def _streams(document: Document, parts: Mapping[Split, list[Asked]], source: Source) -> Splits:
    """Samples of each split, at most as many as `source.counts` says."""
    return {
        split: partial(
            _samples, document, asked[: source.counts.get(split, SELF_STUDY)],
            f"{source.name}/{split}",
        )
        for split, asked in parts.items()
    }  # fmt: skip


def _samples(document: Document, asked: Sequence[Asked], prefix: str) -> Iterator[Sample]:
    for number, one in enumerate(asked):
        answer = Answer(answers=one.answers)
        yield Sample(f"{prefix}/{number:05d}", no_image(), answer, one.question, document=document)
