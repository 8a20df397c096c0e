"""Documents of users: their text and the questions about them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.errors import DataError
from valora_data.sources.formats.files import files_below
from valora_data.sources.formats.tables import read_text
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXTS = frozenset({".txt", ".md", ".markdown", ".rst"})
PDF = ".pdf"
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
    """A document as a file holds it.

    Attributes:
        name: Its id.
        text: Its text.
        asked: Questions about it.
    """

    name: str
    text: str
    asked: tuple[Asked, ...] = ()


def check_text(name: str, text: str) -> str:
    """Return a document's text without what surrounds it.

    Raises:
        DataError: It is empty or huge.
    """
    text = text.strip()
    if not text:
        raise DataError(f"document {name} is empty: add its text, or leave it out")
    if len(text) > MOST_BYTES:
        raise DataError(
            f"document {name} has {len(text):,} characters, more than {MOST_BYTES:,}: split it"
        )
    return text


def read_documents(file: Path) -> list[Told]:
    """Read a JSONL file of documents: `id`, `text`, and `questions` of `question` and `answer(s)`.

    Files of QuALITY (`article`, and questions with `options` and `gold_label`) are read too.

    Raises:
        DataError: A line is no such object, or a question has no answer.
    """
    found = []
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is no JSON ({error}): correct or remove it") from error
        if not isinstance(entry, dict) or not isinstance(_text_of(entry), str):
            raise DataError(f"{where} has no `text` (or `article`): add it or remove the line")
        name = str(entry.get("id", entry.get("article_id", number)))
        asked = entry.get("questions") or ()
        if not isinstance(asked, list | tuple):
            raise DataError(f"{where}: `questions` is no list: correct it")
        told = [_asked(item, f"{where}, question {n}") for n, item in enumerate(asked, 1)]
        found.append(Told(name, check_text(name, _text_of(entry)), tuple(told)))
    if not found:
        raise DataError(f"{file} holds no documents: the data set is empty")
    return _joined(found)


def _text_of(entry: dict[str, Any]) -> Any:
    return entry.get("text", entry.get("article"))


def _joined(found: list[Told]) -> list[Told]:
    """Join entries of one document: QuALITY lists an article once for each writer of questions."""
    by_name: dict[str, Told] = {}
    for told in found:
        known = by_name.get(told.name)
        if known is not None and known.text != told.text:
            raise DataError(f"two documents are named {told.name}: give each an id of its own")
        asked = (*(known.asked if known else ()), *told.asked)
        by_name[told.name] = Told(told.name, told.text, asked)
    return list(by_name.values())


def _asked(item: Any, where: str) -> Asked:
    """A question of an entry.

    Raises:
        DataError: It has no words or no answer.
    """
    question = _words(item.get("question")) if isinstance(item, dict) else ""
    if not question:
        raise DataError(f"{where} has no `question`: add it or remove the entry")
    options, label = item.get("options"), item.get("gold_label")
    if isinstance(options, list) and isinstance(label, int) and 1 <= label <= len(options):
        letters = [chr(ord("A") + place) for place in range(len(options))]
        lines = [f"({letter}) {text}" for letter, text in zip(letters, options, strict=True)]
        return Asked("\n".join([question, *lines]), (letters[label - 1],), item.get("split"))
    given = item.get("answers", item.get("answer"))
    said = [_words(one) for one in (given if isinstance(given, list) else [given])]
    if not any(said):
        raise DataError(f"{where} ({question[:60]!r}) has no answer: answer it, or leave it out")
    return Asked(question, tuple(filter(None, said)), item.get("split"))


def _words(value: Any) -> str:
    """A text or number as text; what is neither has no words."""
    known = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if known else ""


def text_files(place: Path) -> list[Path]:
    """The text and PDF files of a folder, in order; the file itself if it is one."""
    if place.is_file():
        return [place]
    return files_below(place, frozenset({*TEXTS, PDF}))


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
    return check_text(place.name, "\n\n".join(part for part in parts if part))


def _pdf_text(file: Path) -> str:
    """The text of a PDF.

    Raises:
        DataError: It is damaged, encrypted, or holds pictures of pages only.
    """
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        reader = PdfReader(file)
        pages = [(page.extract_text() or "").strip() for page in reader.pages]
    except (PyPdfError, OSError, ValueError, KeyError) as error:
        raise DataError(
            f"{file.name} cannot be read as a PDF ({error}): export it again, or as text"
        ) from error
    text = "\n\n".join(page for page in pages if page)
    if not text:
        raise DataError(
            f"{file.name} holds no text on {plural(len(pages), 'page')}, as if it were scanned: "
            "run OCR on it first"
        )
    return text


def questions_file(folder: Path) -> Iterator[Asked]:
    """Questions in `questions.jsonl` of a folder, if there is one.

    Raises:
        DataError: A line is no question, or has no answer.
    """
    file = folder / "questions.jsonl"
    if not file.is_file():
        return
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if line.strip():
            where = f"{file.name}, line {number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where} is no JSON ({error}): correct or remove it") from error
            yield _asked(item, where)
