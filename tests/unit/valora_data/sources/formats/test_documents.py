"""Documents of users: every format, how questions are split, and what is refused."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from valora_data import shards
from valora_data.errors import DataError
from valora_data.prepare import prepare
from valora_data.schema import Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats.documents import (
    GAP,
    WORDINGS,
    continuations,
    draw_document,
    gaps,
)
from valora_data.sources.registry import detect_kind, open_source

TEXT = (
    "The lighthouse of Vardo was built in 1896 by two brothers from Bergen. Its lamp burns oil of "
    "herring. On clear nights it is seen from 40 miles away; ships greet it with three short "
    "blasts. The keeper writes every passing ship into a green book."
)
QUESTIONS = [{"question": f"question {n}?", "answer": f"answer {n}"} for n in range(8)]


def lines(path, *entries):
    path.write_text("\n".join(json.dumps(entry) for entry in entries))
    return path


def read(kind, path, **more):
    source = Source(kind, Task.CONTEXT, name="vardo", path=str(path), **more)
    return {split: list(stream()) for split, stream in open_source(source).items()}


def test_given_questions_are_measured_and_self_study_is_learnt(tmp_path):
    file = lines(tmp_path / "d.jsonl", {"id": "a", "text": TEXT, "questions": QUESTIONS})
    assert detect_kind(file) == "documents"
    found = read("documents", file)
    asked = {split: {sample.prompt for sample in samples} for split, samples in found.items()}
    assert not asked[Split.VAL] & asked[Split.TEST]
    assert asked[Split.VAL] | asked[Split.TEST] == {item["question"] for item in QUESTIONS}
    assert not asked[Split.UNLABELLED] & (asked[Split.VAL] | asked[Split.TEST])
    assert all(sample.document.text == TEXT for samples in found.values() for sample in samples)
    assert all(sample.images == () for samples in found.values() for sample in samples)
    assert found == read("documents", file)  # the same each time
    splits = ["train", "val", "test"] * 2
    given = [one | {"split": split} for one, split in zip(QUESTIONS[:6], splits, strict=True)]
    found = read("documents", lines(file, {"text": TEXT, "questions": given}))
    assert [sample.prompt for sample in found[Split.TEST]] == ["question 2?", "question 5?"]
    assert {"question 0?", "question 3?"} <= {one.prompt for one in found[Split.UNLABELLED]}


def test_one_document_of_a_file_is_named(tmp_path):
    file = lines(
        tmp_path / "d.jsonl",
        {"id": "a", "text": TEXT, "questions": QUESTIONS},
        {"id": "b", "text": "Other. " + TEXT, "questions": QUESTIONS},
    )
    found = read("documents", file, document="b")
    assert found[Split.TEST][0].document.text.startswith("Other.")
    for name in (None, "c"):
        with pytest.raises(DataError, match=r"holds 2 documents \(a, b\): name one"):
            read("documents", file, document=name)


def test_a_folder_of_texts_is_one_document_that_asks_itself(tmp_path):
    (tmp_path / "a.md").write_text(TEXT)
    (tmp_path / "b.txt").write_text("A second file has four more sentences in it than one.")
    assert detect_kind(tmp_path) == "texts"
    found = read("texts", tmp_path)
    assert all(found.values())
    assert TEXT in found[Split.VAL][0].document.text
    assert all(GAP in sample.prompt for sample in found[Split.TEST])
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    assert {len(read("texts", tmp_path)[split]) for split in (Split.VAL, Split.TEST)} == {4}


def test_self_study_asks_what_the_text_answers():
    for one in continuations(TEXT):
        assert f"{one.question.removeprefix('continue: ')} {one.answers[0]}" in TEXT
    for one in gaps(TEXT, np.random.default_rng(0)):
        filled = one.question.removeprefix("which word is missing: ").replace(GAP, one.answers[0])
        known = {one.answers[0], *TEXT.split(), *TEXT.replace(".", " .").split()}
        assert set(filled.split()) <= known


def pdf(text):
    """A PDF of one page, with or without text, of which pypdf mends the table of objects."""
    content = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET" if text else ""
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>",
        f"<< /Length {len(content)} >>\nstream\n{content}\nendstream",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body = "\n".join(f"{number} 0 obj\n{item}\nendobj" for number, item in enumerate(objects, 1))
    return f"%PDF-1.4\n{body}\ntrailer << /Size 6 /Root 1 0 R >>\nstartxref\n0\n%%EOF".encode()


def test_the_text_of_a_pdf_is_read(tmp_path):
    (tmp_path / "a.pdf").write_bytes(pdf(TEXT))
    assert read("texts", tmp_path)[Split.TEST][0].document.text == TEXT


def test_an_album_is_its_images_and_its_questions(tmp_path):
    for number in range(3):
        Image.new("RGB", (20, 20), (number * 80, 0, 0)).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match=r"no questions.jsonl"):
        read("album", tmp_path)
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    found = read("album", tmp_path)
    assert len(found[Split.TEST][0].document.images) == 3
    assert all(found.values())


def test_a_shard_keeps_the_document(tmp_path):
    album = tmp_path / "album"
    album.mkdir()
    for number in range(2):
        Image.new("RGB", (9, 7), (number, 3, 5)).save(album / f"{number}.png")
    (album / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    source = Source("album", Task.CONTEXT, name="vardo", path=str(album))
    counts = prepare(open_source(source), (), {}, tmp_path / "out")
    assert counts[Split.TEST] == 4
    sample = shards.read(tmp_path / "out" / "test")[0]
    assert [image.getpixel((0, 0)) for image in sample.document.images] == [(0, 3, 5), (1, 3, 5)]


def asking(**question):
    return {"text": TEXT, "questions": [question]}


FAULTS = {
    "document a is empty: add its text": {"text": " "},
    r"\('who\?'\) has no answer": asking(question="who?"),
    "'null'.* has no answer": asking(question="null", answers=[None]),
    "has no `question`": asking(answer="x"),
    "question 1 has no `question`": asking(question=["who?"], answer="x"),
    "is no JSON object with a `text`": {"title": TEXT},
    "is no list": {"text": TEXT, "questions": "who?"},
    "too few to learn from": {"text": "Too short.", "questions": []},
    "split 'x': choose": asking(question="a", answer="b", split="x"),
}


@pytest.mark.parametrize("words", list(FAULTS))
def test_bad_documents_are_refused_in_one_sentence(words, tmp_path):
    with pytest.raises(DataError, match=words):
        read("documents", lines(tmp_path / "d.jsonl", {"id": "a"} | FAULTS[words]))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.png", b"", r"holds no \.txt"),
        ("scan.pdf", pdf(""), r"scan\.pdf holds no text on 1 page.*OCR"),
        ("scan.pdf", b"%PDF-broken", r"scan\.pdf cannot be read as a PDF"),
        ("a.txt", b"", "is empty"),
    ],
)
def test_bad_texts_are_refused_in_one_sentence(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        read("texts", tmp_path)


def test_drawn_documents_measure_in_a_wording_that_is_not_studied():
    source = Source("records", Task.CONTEXT, name="trip", entries=6)
    found = {split: list(stream()) for split, stream in open_source(source).items()}
    held = [*found[Split.VAL], *found[Split.TEST]]
    assert len(held) >= 4 and len(found[Split.UNLABELLED]) == 3 * len(held)
    assert all(one.prompt.startswith("what ") for one in held)
    assert not any(one.prompt.startswith("what ") for one in found[Split.UNLABELLED])
    document = held[0].document
    assert document.text and not document.images
    assert next(iter(open_source(source)[Split.VAL]())).document == document
    other = Source("records", Task.CONTEXT, name="bergen", entries=6)
    assert next(iter(open_source(other)[Split.TEST]())).document != document
    with pytest.raises(DataError, match=r"domain trip has 0 facts .* raise source\.entries"):
        open_source(Source("records", Task.CONTEXT, name="trip", entries=0))


def test_a_linked_question_has_one_answer_and_does_not_name_the_letter():
    document = draw_document(np.random.default_rng(7), 29)
    links = document.links()
    told = {(fact.key, fact.attribute): fact.value for fact in document.facts}
    for link in links:
        letters = {key for (key, name), value in told.items()
                   if (name, value) == link.given}  # fmt: skip
        assert letters == {link.key} and link.given != (link.attribute, link.value)
        assert told[link.key, link.attribute] == link.value
        for wording in range(len(WORDINGS["color"])):
            asked = link.question(wording)
            assert link.given[1] in asked and link.attribute in asked
            assert str(link.key) not in asked
    times = Counter((name, value) for (_, name), value in told.items())
    own = Counter(key for (key, name), value in told.items() if times[name, value] == 1)
    assert len(links) == len(set(links)) == 3 * sum(own.values()) > 0
