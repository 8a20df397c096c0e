"""Documents as formats: a domain is one, its samples are given questions or of self-study."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Sample, Split, Task, no_image
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.documents.records import Fact, Link, draw_document
from valora_data.sources.formats.files import files_below, read_lines, read_text
from valora_data.sources.formats.rows import ImagesFormat
from valora_data.wording import plural

TEXTS = frozenset({".txt", ".md", ".markdown", ".rst", ".pdf"})
QUESTIONS = "questions.jsonl"
MAX_BYTES = 64 << 20  # Most bytes of a document's text
SELF_STUDY = 400  # Most questions of self-study where `source.counts` does not say how many
MIN_FACTS = 4  # Fewest facts of a drawn document: two to decide with, two to measure with
MIN_WORDS = 5  # Words of the shortest sentence that is asked about
MAX_WORDS = 12  # Words of the longest answer, and of the longest part that a question repeats
GAP = "___"
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its right answers, the one to learn first, and the split that it names."""

    question: str
    answers: tuple[str, ...]
    split: str | None = None


class ContextFormat(SourceFormat):
    """A format of documents."""

    task = Task.CONTEXT
    texts = True

    def supports(self, task: Task) -> bool:
        return task is Task.CONTEXT


class DocumentsFormat(ContextFormat):
    """JSON lines of `id`, `text` and `questions`; `source.document` names the domain's."""

    def recognises(self, location: Location) -> bool:
        lines = location.path.suffix == ".jsonl"
        return lines and isinstance(location.entry.get("text"), str)

    def open(self, source: Source) -> Splits:
        file = Path(source.location)
        found: dict[str, tuple[str, Any, str]] = {}
        for number, entry in read_lines(file):
            where = f"{file.name}, line {number}"
            if entry is None or not isinstance(entry.get("text"), str):
                raise DataError(f"{where} is no JSON object with a `text`: correct or remove it")
            name = str(entry.get("id", number))
            if name in found:
                raise DataError(f"two documents are named {name}: give each an id of its own")
            found[name] = (entry["text"], entry.get("questions") or [], where)
        name = source.document or (next(iter(found)) if len(found) == 1 else "")
        if name not in found:
            shown = ", ".join(list(found)[:10]) + (", …" if len(found) > 10 else "")
            raise DataError(
                f"{file.name} holds {plural(len(found), 'document')} ({shown}): name one of them "
                "in source.document"
            )
        text, asked, where = found[name]
        if not isinstance(asked, list):
            raise DataError(f"{where}: `questions` is no list: correct it")
        questions = [_asked(one, f"{where}, question {i}") for i, one in enumerate(asked, 1)]
        return _splits_of(Document(_checked(name, text)), questions, source)


class TextsFormat(ContextFormat):
    """Text or PDF files as one document, with `questions.jsonl` if there is one."""

    def recognises(self, location: Location) -> bool:
        return bool(location.suffixes) and location.suffixes <= TEXTS

    def open(self, source: Source) -> Splits:
        place = Path(source.location)
        files = [file for file in self.reads(source) if file.name != QUESTIONS]
        if not files:
            raise DataError(f"{place} holds no .txt, .md or .pdf file: check the path")
        text = "\n\n".join(filter(None, map(_text_of, files)))
        return _splits_of(Document(_checked(place.name, text)), _questions(place), source)

    def reads(self, source: Source) -> Iterator[Path]:
        place = Path(source.location)
        yield from [place] if place.is_file() else files_below(place, TEXTS)
        if (place / QUESTIONS).is_file():
            yield place / QUESTIONS


class AlbumFormat(ContextFormat):
    """A folder of images with `questions.jsonl`: an album."""

    texts = False

    def open(self, source: Source) -> Splits:
        folder = Path(source.location)
        images = tuple(sample.image for sample in ImagesFormat().read(source, (folder, "")))
        asked = _questions(folder)
        if not asked:
            raise DataError(
                f"album {folder} has no {QUESTIONS}, and pictures alone ask nothing: add "
                "questions with answers"
            )
        return _splits_of(Document("", images), asked, source)


class RecordsFormat(ContextFormat):
    """A drawn document of `source.entries` records, asked about in other words to measure."""

    drawn = True
    linked: ClassVar[bool] = False

    def open(self, source: Source) -> Splits:
        rng = _rng(source)
        document = draw_document(rng, source.entries)
        facts: Sequence[Fact | Link] = document.links() if self.linked else document.facts
        if len(facts) < MIN_FACTS:
            raise DataError(
                f"domain {source.name} has {plural(len(facts), 'fact')} to ask about, too few to "
                "decide and to measure with: raise source.entries, or change source.seed"
            )
        studied = [
            Asked(fact.question(wording), (fact.value,)) for wording in range(3) for fact in facts
        ]
        held = [facts[number] for number in rng.permutation(len(facts))]
        asked = [Asked(fact.question(-1), (fact.value,)) for fact in held]
        half = len(asked) // 2
        parts = {Split.TRAIN: studied, Split.UNLABELLED: studied}
        parts |= {Split.VAL: asked[:half], Split.TEST: asked[half:]}
        return _streams(Document(document.text), parts, source)


class LinkedRecordsFormat(RecordsFormat):
    """The same documents, with questions that do not name the letter (`records.Link`)."""

    linked = True


def _splits_of(document: Document, asked: Sequence[Asked], source: Source) -> Splits:
    """Splits of given questions, or of self-study; those without a split go to val and test."""
    rng = _rng(source)
    study, cloze = continuations(document.text), gaps(document.text, rng)
    study += cloze if asked else []
    parts: dict[Any, list[Asked]] = {split: [] for split in (*Split, None)}
    for one in asked or cloze:
        parts[one.split].append(one)
    free = parts.pop(None)
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

    def samples(split: Split, asked: Sequence[Asked]) -> Iterator[Sample]:
        for number, one in enumerate(asked[: source.counts.get(split, SELF_STUDY)]):
            key, answer = f"{source.name}/{split}/{number:05d}", Answer(answers=one.answers)
            yield Sample(key, no_image(), answer, one.question, document=document)

    return {split: partial(samples, split, asked) for split, asked in parts.items()}


def _questions(folder: Path) -> list[Asked]:
    """Questions in `questions.jsonl` of a folder, if there is one."""
    file = folder / QUESTIONS
    rows = read_lines(file) if file.is_file() else []
    return [_asked(item, f"{QUESTIONS}, line {number}") for number, item in rows]


def _checked(name: str, text: str) -> str:
    """A document's text without what surrounds it, which is neither empty nor huge."""
    text = text.strip()
    if not text:
        raise DataError(f"document {name} is empty: add its text, or leave it out")
    if len(text) > MAX_BYTES:
        raise DataError(
            f"document {name} has {len(text):,} characters, more than {MAX_BYTES:,}: split it"
        )
    return text


def _asked(item: Any, where: str) -> Asked:
    """A question of an entry, which has words and an answer."""
    question = _words(item.get("question")) if isinstance(item, dict) else ""
    if not question:
        raise DataError(f"{where} has no `question`: add it or remove the entry")
    given = item.get("answers", item.get("answer"))
    answers = tuple(filter(None, map(_words, given if isinstance(given, list) else [given])))
    if not answers:
        raise DataError(f"{where} ({question[:60]!r}) has no answer: answer it, or leave it out")
    if item.get("split") not in (None, "train", "val", "test"):
        raise DataError(f"{where} has split {item['split']!r}: choose train, val or test")
    return Asked(question, answers, item.get("split"))


def _words(value: Any) -> str:
    """A text or number as text; what is neither has no words."""
    known = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if known else ""


def _text_of(file: Path) -> str:
    """The text of a file; a `DataError` for a PDF that is damaged, encrypted or only pictures."""
    if file.suffix.lower() != ".pdf":
        return read_text(file).strip()
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        pages = [(page.extract_text() or "").strip() for page in PdfReader(file).pages]
    except (PyPdfError, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{file.name} cannot be read as a PDF ({error}): export it again, or as text"
        ) from error
    text = "\n\n".join(filter(None, pages))
    if not text:
        raise DataError(
            f"{file.name} holds no text on {plural(len(pages), 'page')}, as if it were scanned: "
            "run OCR on it first"
        )
    return text


def _sentences(text: str) -> list[str]:
    """Sentences and lines of a text with enough words to ask about."""
    parts = (part.strip() for part in SENTENCE.split(text))
    return [part for part in parts if len(WORD.findall(part)) >= MIN_WORDS]


def continuations(text: str) -> list[Asked]:
    """Ask for the rest of sentences, from every few words on."""
    found = []
    for sentence in _sentences(text):
        words = sentence.split()
        for start in range(0, max(1, len(words) - 3), MAX_WORDS // 2):
            half = min((len(words) - start) // 2, MAX_WORDS)
            if half >= 2:
                said = " ".join(words[start : start + half])
                rest = words[start + half : start + half + MAX_WORDS]
                found.append(Asked(f"continue: {said}", (" ".join(rest),)))
    return found


def gaps(text: str, rng: np.random.Generator) -> list[Asked]:
    """Ask for one word of each sentence: a number or a name if there is one, else a long one."""
    found = []
    for sentence in _sentences(text):
        words = list(WORD.finditer(sentence))
        telling = [w for w in words if any(map(str.isdigit, w[0]))]
        telling += [w for w in words[1:] if w[0][0].isupper()]
        telling = telling or sorted(words, key=lambda w: -len(w[0]))[:3]
        word = telling[int(rng.integers(len(telling)))]
        near = sentence[: word.start()].split()[-MAX_WORDS:]
        after = sentence[word.end() :].split()[:MAX_WORDS]
        asked = f"which word is missing: {' '.join([*near, GAP, *after])}"
        found.append(Asked(asked, (word[0],)))
    return found
