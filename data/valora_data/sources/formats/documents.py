"""Documents as formats: a domain is one, its samples are given questions or of self-study."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any, ClassVar, NamedTuple

import numpy as np

from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Sample, Split, Task, no_image
from valora_data.sources.base import Location, Source, SourceFormat, Splits
from valora_data.sources.formats.files import files_below, read_lines, read_text
from valora_data.sources.formats.rows import ImagesFormat
from valora_data.sources.generic.scenes import COLORS, PATTERNS, seeded
from valora_data.wording import plural

TEXTS = frozenset({".txt", ".md", ".markdown", ".rst", ".pdf"})
QUESTIONS = "questions.jsonl"
SELF_STUDY = 400  # Most questions of self-study where `source.counts` does not say how many
MIN_FACTS = 4  # Fewest facts of a drawn document: two to decide with, two to measure with
MIN_WORDS = 5  # Words of the shortest sentence that is asked about
MAX_WORDS = 12  # Words of the longest answer, and of the longest part that a question repeats
GAP = "___"
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
WORD = re.compile(r"\w+")


class Asked(NamedTuple):
    """A question with its right answers, the one to learn first, and the split that it names."""

    question: str
    answers: tuple[str, ...]
    split: str | None = None
    by: str = ""  # model that wrote it, see `valora_train.ask`; nobody if it was given


class ContextFormat(SourceFormat):
    """A format of documents."""

    task, texts = Task.CONTEXT, True

    def supports(self, task: Task) -> bool:
        return task is Task.CONTEXT


class DocumentsFormat(ContextFormat):
    """JSON lines of `id`, `text` and `questions`; `source.document` names the domain's."""

    text, name = "text", "id"
    several: ClassVar[bool] = False  # whether a document may have several lines

    def recognises(self, location: Location) -> bool:
        lines = location.path.suffix == ".jsonl"
        return lines and isinstance(location.entry.get(self.text), str)

    def open(self, source: Source) -> Splits:
        file, found = Path(source.location), dict[str, tuple[str, list[Any]]]()
        for number, entry in read_lines(file):
            where = f"{file.name}, line {number}"
            if entry is None or not isinstance(entry.get(self.text), str):
                what = f"{where} is no JSON object with `{self.text}`"
                raise DataError(f"{what}: correct or remove it")
            name, text = str(entry.get(self.name, number)), entry[self.text]
            if name in found and not (self.several and found[name][0] == text):
                raise DataError(f"two documents are named {name}: give each an id of its own")
            if not isinstance(asked := entry.get("questions") or [], list):
                raise DataError(f"{where}: `questions` is no list: correct it")
            _, questions = found.setdefault(name, (text, []))
            questions += [(one, f"{where}, question {place}") for place, one in enumerate(asked, 1)]
        name = source.document or (next(iter(found)) if len(found) == 1 else "")
        if name not in found:
            shown = ", ".join([*found][:10]) + (", …" if len(found) > 10 else "")
            text = f"{file.name} holds {plural(len(found), 'document')} ({shown})"
            raise DataError(f"{text}: name one of them in source.document")
        text, questions = found[name]
        asked = [_asked(self.question(one), where) for one, where in questions]
        return _splits_of(_document(name, text), asked, source)

    def question(self, entry: Any) -> Any:
        """An entry of `questions` with `question` and `answer`."""
        return entry


class QualityFormat(DocumentsFormat):
    """JSON lines of QuALITY (Pang et al., NAACL 2022): articles with multiple-choice questions.

    An article, which its `article_id` names, has a line for each writer of questions.
    """

    text, name, several = "article", "article_id", True

    def question(self, entry: Any) -> Any:
        """A question with its lettered options, and the letter of the right one."""
        options, label = (entry.get(key) for key in ("options", "gold_label"))
        if not isinstance(options, list) or label not in range(1, len(options) + 1):
            return entry  # is refused, as it has no answer
        lines = [f"({letter}) {one}" for letter, one in zip(ascii_uppercase, options, strict=False)]
        return {"question": "\n".join([str(entry.get("question")), *lines]),
                "answer": ascii_uppercase[label - 1]}  # fmt: skip


class TextsFormat(ContextFormat):
    """Text or PDF files as one document, with questions if there are some (`questions_file`)."""

    def recognises(self, location: Location) -> bool:
        return bool(location.suffixes) and location.suffixes <= TEXTS

    def open(self, source: Source) -> Splits:
        path = Path(source.location)
        return _splits_of(read_text_of(path), _questions(questions_file(path)), source)

    def reads(self, source: Source) -> Iterator[Path]:
        path = Path(source.location)
        yield from _texts(path)
        if (file := questions_file(path)).is_file():
            yield file


def read_text_of(path: Path) -> Document:
    """The document that text and PDF files are; a `DataError` if there is no text."""
    if not (files := _texts(path)):
        raise DataError(f"{path} holds no .txt, .md or .pdf file: check the path")
    return _document(path.name, "\n\n".join(filter(None, map(_text_of, files))))


def _texts(path: Path) -> list[Path]:
    return [path] if path.is_file() else [*files_below(path, TEXTS)]


def questions_file(path: Path) -> Path:
    """Where questions about a folder, or a file of text, are looked for."""
    return path.with_suffix(f".{QUESTIONS}") if path.is_file() else path / QUESTIONS


class AlbumFormat(ContextFormat):
    """A folder of images with `questions.jsonl`: an album."""

    texts = False

    def open(self, source: Source) -> Splits:
        folder = Path(source.location)
        images = tuple(sample.image for sample in ImagesFormat().read(source, (folder, "")))
        if asked := _questions(questions_file(folder)):
            return _splits_of(Document("", images), asked, source)
        text = f"album {folder} has no {QUESTIONS}, and pictures alone ask nothing"
        raise DataError(f"{text}: add questions with answers")


# Drawn documents, such as ``417 color red``, that nobody knows otherwise: words of valora-tiny.
THINGS = (
    "anchor", "arrow", "bell", "bolt", "bone", "bow", "candle", "castle", "chair", "circle",
    "clock", "cloud", "comb", "cross", "crown", "drop", "fish", "flag", "fork", "gear", "hammer",
    "hat", "heart", "house", "key", "kite", "lamp", "mug", "ring", "star", "sun", "tent",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS), "pattern": tuple(PATTERNS), "thing": THINGS,
    "table": tuple(str(number) for number in range(10, 100)),
}  # fmt: skip


def _wordings(given: str, asked: str) -> tuple[str, ...]:
    return (f"{given} {asked}?", f"which {asked} has {given}?",
            f"{given} has which {asked}?", f"what {asked} has {given}?")  # fmt: skip


WORDINGS = {attribute: _wordings("{key}", attribute) for attribute in VALUES}
"""Wordings of a question about an attribute; the last one is for measuring."""
LINKED_WORDINGS = {
    (given, asked): _wordings(f"{given} {{value}}", asked)
    for given in VALUES
    for asked in VALUES
    if given != asked
}
KEYS = range(100, 1000)  # Numbers of letters


class Fact(NamedTuple):
    """Letter, attribute and value; of a link also a fact that is `given` instead of the letter."""

    key: int
    attribute: str
    value: str
    given: tuple[str, str] | None = None

    def question(self, wording: int) -> str:
        """Ask for the value; wording −1 is the one for measuring."""
        if self.given is None:
            return WORDINGS[self.attribute][wording].format(key=self.key)
        name, value = self.given
        return LINKED_WORDINGS[name, self.attribute][wording].format(value=value)


class RecordDocument(NamedTuple):
    """A document, and its facts in the order of the text."""

    text: str
    facts: tuple[Fact, ...]

    def links(self) -> list[Fact]:
        """Facts beside each other one about the same letter that no other letter shares."""
        times = Counter(fact[1:] for fact in self.facts)
        unique = [fact for fact in self.facts if times[fact[1:]] == 1]
        return [
            asked._replace(given=(given.attribute, given.value))
            for asked in self.facts
            for given in unique
            if given.key == asked.key and given != asked
        ]


def draw_document(rng: np.random.Generator, records: int) -> RecordDocument:
    """Draw a document of so many letters, at most 900."""
    keys = rng.choice(np.array(KEYS), records, replace=False)
    facts = [
        Fact(key, name, str(rng.choice(choices)))
        for key in keys.tolist()
        for name, choices in VALUES.items()
    ]
    facts = [facts[index] for index in rng.permutation(len(facts))]
    text = "\n".join(f"{fact.key} {fact.attribute} {fact.value}" for fact in facts)
    return RecordDocument(text, tuple(facts))


class RecordsFormat(ContextFormat):
    """A drawn document of `source.entries` records, asked about in other words to measure."""

    drawn = True
    linked: ClassVar[bool] = False

    def open(self, source: Source) -> Splits:
        rng = seeded(f"{source.seed}/{source.name}")
        document = draw_document(rng, source.entries)
        facts = document.links() if self.linked else document.facts
        if len(facts) < MIN_FACTS:
            text = f"domain {source.name} has {plural(len(facts), 'fact')} to ask about, too few"
            raise DataError(f"{text} to measure: raise source.entries, or change source.seed")
        studied = [Asked(one.question(way), (one.value,)) for way in range(3) for one in facts]
        held = [facts[number] for number in rng.permutation(len(facts))]
        asked, half = [Asked(one.question(-1), (one.value,)) for one in held], len(held) // 2
        parts = {Split.TRAIN: studied, Split.UNLABELLED: studied}
        parts |= {Split.VAL: asked[:half], Split.TEST: asked[half:]}
        return _streams(Document(document.text, (), "drawn questions"), parts, source)


class LinkedRecordsFormat(RecordsFormat):
    """The same documents, with questions that do not name the letter (`RecordDocument.links`)."""

    linked = True


def _splits_of(document: Document, asked: Sequence[Asked], source: Source) -> Splits:
    """Splits of questions: given ones and half of written ones measure, others are studied."""
    rng = seeded(f"{source.seed}/{source.name}")
    study, cloze = continuations(document.text), gaps(document.text, rng)
    given = [one for one in asked if one.split or not one.by]
    written = [one for one in asked if one.by and not one.split]
    measured, by = given or cloze, "given questions" if given else "words left out of sentences"
    if written and not given:
        order = [written[number] for number in rng.permutation(len(written))]
        measured, written = order[: len(order) // 2], order[len(order) // 2 :]
        by = f"questions written by {order[0].by}"
    study += [*cloze, *written] if asked else []
    document = replace(document, measured_by=by)
    parts: dict[Any, list[Asked]] = {split: [] for split in (*Split, None)}
    for one in measured:
        parts[one.split].append(one)
    free = parts.pop(None)
    for index, number in enumerate(rng.permutation(len(free))):
        parts[Split.TEST if index % 2 else Split.VAL].append(free[number])
    if document.images and not parts[Split.TRAIN]:
        # Pictures give no questions of self-study: half of those for validation are studied.
        count = len(parts[Split.VAL]) // 2
        parts[Split.TRAIN], parts[Split.VAL] = parts[Split.VAL][:count], parts[Split.VAL][count:]
    study = [study[number] for number in rng.permutation(len(study))]
    parts[Split.UNLABELLED] = [*parts[Split.TRAIN], *study]
    parts[Split.TRAIN] = parts[Split.TRAIN] or parts[Split.UNLABELLED]
    if all(parts.values()):
        return _streams(document, parts, source)
    text = f"document {source.name} has {plural(len(asked), 'given question')} and "
    text += f"{plural(len(study), 'question')} of self-study, too few to learn from"
    raise DataError(f"{text} and to measure with: add questions with answers")


def _streams(document: Document, parts: Mapping[Split, list[Asked]], source: Source) -> Splits:
    """Samples of each split, at most as many as `source.counts` says."""

    def samples(split: Split, asked: Sequence[Asked]) -> Iterator[Sample]:
        for number, one in enumerate(asked[: source.counts.get(split, SELF_STUDY)]):
            key, answer = f"{source.name}/{split}/{number:05d}", Answer(answers=one.answers)
            yield Sample(key, no_image(), answer, one.question, document=document)

    return {split: partial(samples, split, asked) for split, asked in parts.items()}


def _questions(file: Path) -> list[Asked]:
    rows = read_lines(file) if file.is_file() else []
    return [_asked(item, f"{file.name}, line {number}") for number, item in rows]


def _document(name: str, text: str) -> Document:
    if not (text := text.strip()):
        raise DataError(f"document {name} is empty: add its text, or leave it out")
    return Document(text)


def _asked(item: Any, where: str) -> Asked:
    question = _words(item.get("question")) if isinstance(item, dict) else ""
    if not question:
        raise DataError(f"{where} has no `question`: add it or remove the entry")
    given = item.get("answers", item.get("answer"))
    answers = tuple(filter(None, map(_words, given if isinstance(given, list) else [given])))
    if not answers:
        raise DataError(f"{where} ({question[:60]!r}) has no answer: answer it, or leave it out")
    if item.get("split") not in (None, "train", "val", "test"):
        raise DataError(f"{where} has split {item['split']!r}: choose train, val or test")
    return Asked(question, answers, item.get("split"), _words(item.get("by")))


def _words(value: Any) -> str:
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
        text = f"{file.name} cannot be read as a PDF ({error}): export it again, or as text"
        raise DataError(text) from error
    if text := "\n\n".join(filter(None, pages)):
        return text
    text = f"{file.name} holds no text on {plural(len(pages), 'page')}, as if it were scanned"
    raise DataError(f"{text}: run OCR on it first")


def _sentences(text: str) -> list[str]:
    return [s.strip() for s in SENTENCE.split(text) if len(WORD.findall(s)) >= MIN_WORDS]


def continuations(text: str) -> list[Asked]:
    """Ask for the rest of sentences, from every few words on."""
    found = []
    for sentence in _sentences(text):
        words = sentence.split()
        for start in range(0, max(1, len(words) - 3), MAX_WORDS // 2):
            half = min((len(words) - start) // 2, MAX_WORDS)
            if half >= 2:
                said, rest = words[start : start + half], words[start + half :][:MAX_WORDS]
                found.append(Asked(f"continue: {' '.join(said)}", (" ".join(rest),)))
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
