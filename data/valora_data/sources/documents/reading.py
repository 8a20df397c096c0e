"""Documents of users: their text and the questions about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from valora_data.errors import DataError
from valora_data.sources.formats.files import files_below
from valora_data.sources.formats.tables import read_lines, read_text
from valora_data.wording import plural

TEXTS = frozenset({".txt", ".md", ".markdown", ".rst"})
PDF = ".pdf"
QUESTIONS = "questions.jsonl"
MOST_BYTES = 64 << 20
"""Most bytes of a document's text."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A question with its answers.

    Attributes:
        question: The question.
        answers: What is right, the answer to learn first.
        split: `train`, `val` or `test` where the file says it.
    """

    question: str
    answers: tuple[str, ...]
    split: str | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """A document as a file holds it: its id, its text, and questions about it."""

    name: str
    text: str
    asked: tuple[Asked, ...] = ()


def read_documents(file: Path) -> list[Told]:
    """Read a JSONL file of documents: `id`, `text`, and `questions` of `question` and `answer(s)`.

    Files of QuALITY (`article`, and questions with `options` and `gold_label`) are read too; they
    list an article once for each writer of questions.

    Raises:
        DataError: A line is no such object, or a question has no answer.
    """
    found: dict[str, Told] = {}
    for where, number, entry in _entries(file):
        text = entry.get("text", entry.get("article")) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise DataError(f"{where} has no `text` (or `article`): add it or remove the line")
        name = str(entry.get("id", entry.get("article_id", number)))
        asked = entry.get("questions") or []
        if not isinstance(asked, list):
            raise DataError(f"{where}: `questions` is no list: correct it")
        told = Told(name, _checked(name, text))
        told = found.setdefault(name, told)
        if told.text != text.strip():
            raise DataError(f"two documents are named {name}: give each an id of its own")
        more = (_asked(item, f"{where}, question {n}") for n, item in enumerate(asked, 1))
        found[name] = replace(told, asked=(*told.asked, *more))
    if not found:
        raise DataError(f"{file} holds no documents: the data set is empty")
    return list(found.values())


def questions_file(folder: Path) -> list[Asked]:
    """Questions in `questions.jsonl` of a folder, if there is one.

    Raises:
        DataError: A line is no question, or has no answer.
    """
    file = folder / QUESTIONS
    return [_asked(item, where) for where, _, item in _entries(file)] if file.is_file() else []


def _entries(file: Path) -> Iterator[tuple[str, int, Any]]:
    for number, entry in read_lines(file):
        where = f"{file.name}, line {number}"
        if entry is None:
            raise DataError(f"{where} is no JSON: correct or remove it")
        yield where, number, entry


def _checked(name: str, text: str) -> str:
    """A document's text without what surrounds it, which is neither empty nor huge."""
    text = text.strip()
    if not text:
        raise DataError(f"document {name} is empty: add its text, or leave it out")
    if len(text) > MOST_BYTES:
        raise DataError(
            f"document {name} has {len(text):,} characters, more than {MOST_BYTES:,}: split it"
        )
    return text


def _asked(item: Any, where: str) -> Asked:
    """A question of an entry, which has words and an answer."""
    question = _words(item.get("question")) if isinstance(item, dict) else ""
    if not question:
        raise DataError(f"{where} has no `question`: add it or remove the entry")
    options, label = item.get("options"), item.get("gold_label")
    if isinstance(options, list) and isinstance(label, int) and 1 <= label <= len(options):
        letters = [chr(ord("A") + place) for place in range(len(options))]
        lines = [f"({letter}) {text}" for letter, text in zip(letters, options, strict=True)]
        return Asked("\n".join([question, *lines]), (letters[label - 1],), item.get("split"))
    given = item.get("answers", item.get("answer"))
    said = tuple(filter(None, map(_words, given if isinstance(given, list) else [given])))
    if not said:
        raise DataError(f"{where} ({question[:60]!r}) has no answer: answer it, or leave it out")
    return Asked(question, said, item.get("split"))


def _words(value: Any) -> str:
    """A text or number as text; what is neither has no words."""
    known = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if known else ""


def text_files(place: Path) -> list[Path]:
    """The text and PDF files of a folder, in order; the file itself if it is one."""
    return [place] if place.is_file() else files_below(place, TEXTS | {PDF})


def read_texts(place: Path) -> str:
    """Read text and PDF files as one document.

    Raises:
        DataError: There are none, a PDF holds no text, or all are empty.
    """
    files = text_files(place)
    if not files:
        raise DataError(f"{place} holds no .txt, .md or .pdf file: check the path")
    parts = [
        _pdf_text(file) if file.suffix.lower() == PDF else read_text(file).strip() for file in files
    ]
    return _checked(place.name, "\n\n".join(filter(None, parts)))


def _pdf_text(file: Path) -> str:
    """The text of a PDF; a `DataError` if it is damaged, encrypted, or only pictures of pages."""
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
