"""Documents of users, conversations of LLaVA: what they say comes out, what is wrong is named."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.support.data_sets import noise, picture, write_video
from tests.support.detection_sets import read_split
from valora_data import shards
from valora_data.errors import DataError
from valora_data.prepare import prepare
from valora_data.schema import Answer, Box, Split, Task
from valora_data.sources.base import Source
from valora_data.sources.formats import documents as reader
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


def test_articles_of_quality_are_asked_by_all_their_writers(tmp_path):
    def entry(article, *labels, text=TEXT):
        options = ["herring", "whale", "coal", "none"]
        asked = [{"question": f"What burns, {label}?", "options": options, "gold_label": label}
                 for label in labels]  # fmt: skip
        return {"article_id": article, "set_unique_id": f"{labels}", "article": text,
                "questions": asked}  # fmt: skip

    file = lines(tmp_path / "QuALITY.v1.0.1.htmlstripped.dev", entry("7", 1, 2), entry("8", 3),
                 entry("7", 3, 4))  # fmt: skip
    found = read("quality", file, document="7")
    answers = {one.prompt: one.answer.answers for one in found[Split.VAL] + found[Split.TEST]}
    asked = "What burns, 2?\n(A) herring\n(B) whale\n(C) coal\n(D) none"
    assert (len(answers), answers[asked]) == (4, ("B",))
    assert found[Split.TEST][0].document.measured_by == "given questions"
    with pytest.raises(DataError, match=r"holds 2 documents \(7, 8\): name one"):
        read("quality", file)
    file = lines(tmp_path / "dev.jsonl", entry("7", 1), entry("7", 2, text="another"))
    assert detect_kind(file) == "quality"
    with pytest.raises(DataError, match="two documents are named 7"):
        read("quality", file, document="7")
    for label in (None, 0, 5, "2"):  # of the test split, or damaged
        with pytest.raises(DataError, match="has no answer"):
            read("quality", lines(file, entry("7", label)))


def test_a_folder_of_texts_is_one_document_that_asks_itself(tmp_path):
    (tmp_path / "a.md").write_text(TEXT)
    (tmp_path / "b.txt").write_text("A second file has four more sentences in it than one.")
    assert detect_kind(tmp_path) == "texts"
    found = read("texts", tmp_path)
    assert all(found.values())
    assert TEXT in found[Split.VAL][0].document.text
    assert all(reader.GAP in sample.prompt for sample in found[Split.TEST])
    lines(tmp_path / "questions.jsonl", *QUESTIONS)
    assert {len(read("texts", tmp_path)[split]) for split in (Split.VAL, Split.TEST)} == {4}


def test_self_study_asks_what_the_text_answers():
    for one in reader.continuations(TEXT):
        assert f"{one.question.removeprefix('continue: ')} {one.answers[0]}" in TEXT
    for one in reader.gaps(TEXT, np.random.default_rng(0)):
        filled = one.question.removeprefix("which word is missing: ").replace(
            reader.GAP, one.answers[0]
        )
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


def test_an_album_is_its_images_and_its_questions_and_a_shard_keeps_them(tmp_path):
    album = tmp_path / "album"
    for number in range(3):
        picture(album / f"{number}.png", number)
    with pytest.raises(DataError, match=r"no questions.jsonl"):
        read("album", album)
    lines(album / "questions.jsonl", *QUESTIONS)
    found = read("album", album)
    assert all(found.values())
    source = Source("album", Task.CONTEXT, name="vardo", path=str(album))
    assert prepare(open_source(source), (), {}, tmp_path / "out")[Split.TEST] == 4
    kept = shards.read(tmp_path / "out" / "test")[0].document.images
    read_images = found[Split.TEST][0].document.images
    assert [image.tobytes() for image in kept] == [noise(n).tobytes() for n in range(3)]
    assert [image.tobytes() for image in read_images] == [image.tobytes() for image in kept]


def asking(**question):
    return {"text": TEXT, "questions": [question]}


FAULTS = {
    "document a is empty: add its text": {"text": " "},
    r"\('who\?'\) has no answer": asking(question="who?"),
    "'null'.* has no answer": asking(question="null", answers=[None]),
    "has no `question`": asking(answer="x"),
    "question 1 has no `question`": asking(question=["who?"], answer="x"),
    "is no JSON object with `text`": {"title": TEXT},
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
    document = reader.draw_document(np.random.default_rng(7), 29)
    links = document.links()
    told = {(fact.key, fact.attribute): fact.value for fact in document.facts}
    for link in links:
        letters = {key for (key, name), value in told.items()
                   if (name, value) == link.given}  # fmt: skip
        assert letters == {link.key} and link.given != (link.attribute, link.value)
        assert told[link.key, link.attribute] == link.value
        for wording in range(len(reader.WORDINGS["color"])):
            asked = link.question(wording)
            assert link.given[1] in asked and link.attribute in asked
            assert str(link.key) not in asked
    times = Counter((name, value) for (_, name), value in told.items())
    own = Counter(key for (key, name), value in told.items() if times[name, value] == 1)
    assert len(links) == len(set(links)) == 3 * sum(own.values()) > 0


def read_talk(folder, entries, task=Task.GROUNDING, name="set.json", **more):
    """What is read of a file of these entries, whose kind is recognised."""
    for image in ("a.png", "b.png"):
        picture(folder / image, ord(image[0]), (200, 100))
    file = folder / name
    lines = "\n".join(map(json.dumps, entries)) + "\n\n"
    file.write_text(lines if name.endswith("l") else json.dumps(entries))
    return list(read_split(detect_kind(file), file, task=task, **more))


def talk(*turns, **entry):
    said = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(turns)]
    return {"id": "x", "image": "a.png", "conversations": said} | entry


def test_conversations_become_questions(tmp_path):
    said = [{"role": "user", "content": "<image>Who?"}, {"role": "assistant", "content": "me"}]
    entries = [
        talk("<image>\nWho is it?", "me", "And where?", "here", id="first"),
        {"id": "text", "conversations": talk("hi", "ho")["conversations"]},
        talk("Why?\n<image>", "so"),
        {"images": ["b.png"], "messages": said},
    ]
    samples = read_talk(tmp_path, entries, Task.VQA)
    assert [(s.id, s.prompt, s.answer.answers) for s in samples] == [
        ("first#0", "Who is it?", ("me",)), ("first#1", "And where?", ("here",)),
        ("x", "Why?", ("so",)), ("2", "Who?", ("me",)),
    ]  # fmt: skip
    assert samples[1].image.tobytes() == Image.open(tmp_path / "a.png").tobytes()


CAT = Answer((Box(50, 50, 100, 100, "the cat"),))
TASKS = [
    (Task.CAPTION, "", "a cat", None, Answer(captions=("a cat",))),
    (Task.CLASSIFICATION, "What?", "cat", "What?", Answer(label="cat")),
    (Task.COUNTING, "How many?", "3", "How many?", Answer(count=3)),
    (Task.GROUNDING, "locate", "<ref>the cat</ref><box>(250,500),(500,1000)</box>", "the cat", CAT),
    (Task.GROUNDING, "the cat", "[0.25, 0.5, 0.5, 1.0]", "the cat", CAT),
]


@pytest.mark.parametrize(("task", "asked", "said", "prompt", "answer"), TASKS)
def test_conversations_for_every_task(tmp_path, task, asked, said, prompt, answer):
    (sample,) = read_talk(tmp_path, [talk(f"<image>\n{asked}", said)], task, "talk.jsonl")
    assert (sample.id, sample.prompt, sample.answer) == ("x", prompt, answer)


def test_several_images_and_videos(tmp_path):
    write_video(tmp_path / "c.mp4", [20, 60, 100, 140])
    entries = [
        talk("<image> and <image>\nsame?", "no", image=["a.png", "b.png"]),
        talk("<video>\nwhat?", "a fade", image=None, video="c.mp4", id="y"),
    ]
    both, video = read_talk(tmp_path, entries, Task.VQA, frames=2)
    assert (len(both.images), both.prompt) == (2, "and same?")
    assert both.rest[0].tobytes() == Image.open(tmp_path / "b.png").tobytes()
    assert (len(video.images), video.prompt) == (2, "what?")


USELESS = {
    "is by human, expected human and gpt in turn": (Task.VQA, talk("hi")),
    "is by nobody": (Task.VQA, talk()),
    "has 1 image and 2 <image>": (Task.VQA, talk("<image><image>?", "b")),
    "question 0: the answer is empty": (Task.VQA, talk("<image>?", "")),
    "conversation x, question 0: the answer is empty": (Task.VQA, talk("<image>?", None)),
    "{'a': 1} is no text": (Task.VQA, talk("<image>?", {"a": 1})),
    "has objects beside its messages": (Task.VQA, talk("<image>?", "b", objects={})),
    "no conversation has an image": (Task.GROUNDING, talk("?", "[0, 0, 1, 1]", image=None)),
    "has neither an image nor a question": (Task.VQA, talk("", "b", image=None)),
    "1 of 1 image has faults": (Task.VQA, talk("<image>?", "b", image="gone.png")),
    "label 'fox' is not one of cat, dog": (Task.CLASSIFICATION, talk("<image>?", "fox")),
    "'over there' holds no box": (Task.GROUNDING, talk("<image>?", "over there")),
    "count 'some' is no whole number": (Task.COUNTING, talk("<image>?", "some")),
    "llava has no answers for task detection": (Task.DETECTION, talk("<image>?", "b")),
}


@pytest.mark.parametrize("message", list(USELESS))
def test_conversations_of_no_use(tmp_path, message):
    task, entry = USELESS[message]
    labels = ["cat", "dog"] if task is Task.CLASSIFICATION else []
    with pytest.raises(DataError, match=message):
        read_talk(tmp_path, [entry], task, labels=labels)
