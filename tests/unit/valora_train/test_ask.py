"""`valora ask`: questions that a model behind an endpoint or a base model writes about a text."""

import json
import re
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from valora_data.schema import Split, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source
from valora_train import ask
from valora_train.ask import main, pairs_of, passages_of

SENTENCES = [f"Lighthouse {n} was built in {1800 + n} by a brother from Bergen." for n in range(90)]
TEXT = " ".join(SENTENCES)


def said(body):
    """What a model that follows instructions writes: two questions about a passage."""
    found = re.findall(r"Lighthouse (\d+) was built in (\d+)", body["messages"][0]["content"])
    pairs = [f"Q: When was lighthouse {n} built?\nA: {year}" for n, year in found[:2]]
    return {"choices": [{"message": {"content": "\n\n".join(["Here they are:", *pairs])}}]}


@contextmanager
def endpoint(answer=said, status=200, most=10**6):
    """An OpenAI-compatible server, which fails after so many answers, and what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            asked.append(
                (self.path, self.headers["Authorization"], json.loads(self.rfile.read(length)))
            )
            self.send_response(status if len(asked) <= most else 503)
            self.end_headers()
            self.wfile.write(json.dumps(answer(asked[-1][2])).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


@pytest.fixture
def manual(tmp_path):
    (tmp_path / "manual.md").write_text(TEXT)
    return tmp_path / "manual.md"


def rows(manual):
    text = manual.with_suffix(".questions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_questions_of_an_endpoint_measure_a_text_and_are_learnt(manual, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    count = len(passages_of(TEXT))
    with endpoint(most=2) as (url, asked):
        assert main([str(manual), "--endpoint", url, "--model", "writer"]) == 1
        assert "answers 503" in capsys.readouterr().err
    assert (asked[0][:2], len(rows(manual))) == (("/v1/chat/completions", "Bearer secret"), 4)
    with endpoint() as (url, asked):  # goes on where it was
        assert main([str(manual), "--endpoint", f"{url}/", "--model", "writer"]) == 0
        assert len(asked) == count - 2
        assert main([str(manual), "--endpoint", url, "--model", "writer"]) == 0
        assert len(asked) == count - 2
    assert len(rows(manual)) == len({row["question"] for row in rows(manual)}) == 2 * count
    source = Source("texts", Task.CONTEXT, name="manual", path=str(manual))
    found = {split: list(stream()) for split, stream in open_source(source).items()}
    written = {row["question"] for row in rows(manual)}
    asked = {split: {one.prompt for one in samples} for split, samples in found.items()}
    measured = asked[Split.VAL] | asked[Split.TEST]
    assert len(measured) == count and measured < written
    assert asked[Split.UNLABELLED] >= written - measured
    assert not asked[Split.UNLABELLED] & measured
    document = found[Split.TEST][0].document
    assert document.measured_by == "questions written by writer"


def test_given_questions_measure_and_written_ones_are_learnt_beside_them(manual):
    file = manual.with_suffix(".questions.jsonl")
    given = [{"question": f"given {n}?", "answer": "yes"} for n in range(4)]
    written = [{"question": f"written {n}?", "answer": "yes", "by": "m"} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, [*given, *written])))
    source = Source("texts", Task.CONTEXT, name="manual", path=str(manual))
    found = {split: list(stream()) for split, stream in open_source(source).items()}
    measured = {one.prompt for split in (Split.VAL, Split.TEST) for one in found[split]}
    assert measured == {one["question"] for one in given}
    assert {one["question"] for one in written} <= {one.prompt for one in found[Split.UNLABELLED]}
    assert found[Split.TEST][0].document.measured_by == "given questions"


REPLIES = {
    "Q: Who built it?\nA: a brother": [("Who built it?", "a brother")],
    "1. **Q:** Who?\n   **A:** Bergen\n\n2. Q2: When?\n\nA2: 1801": [
        ("Who?", "Bergen"), ("When?", "1801"),
    ],
    "q: Is it old?\na: Yes": [("Is it old?", "Yes")],
    "Q: Who?\nA: nobody knows": [],  # not of the text
    f"Q: Who?\nA: {'Bergen ' * 13}": [],  # too long
    "Q: Who?": [],
    "There are no questions.": [],
}  # fmt: skip


@pytest.mark.parametrize("reply", REPLIES)
def test_replies_are_read_as_models_write_them(reply):
    assert pairs_of(reply, TEXT) == REPLIES[reply]


def test_passages_are_the_text_in_parts():
    assert " ".join(passages_of(TEXT)) == TEXT
    assert all(ask.PASSAGE <= len(one) < ask.PASSAGE + 70 for one in passages_of(TEXT)[:-1])
    assert passages_of(" one line ") == ["one line"]


@pytest.mark.parametrize(
    ("more", "answer", "words"),
    [
        ((), lambda _: {"choices": []}, "without a message of a chat"),
        ((), lambda _: {"choices": [{"message": {"content": "none"}}]}, "follows instructions"),
        (("--count", "0"), said, "ask for one question"),
        (("--endpoint", "http://127.0.0.1:9/v1"), said, "answers not"),
        (("--endpoint", "nonsense"), said, "answers not"),
        (("--out", "nowhere/q.jsonl"), said, "nowhere, where questions go, is no folder"),
    ],
)
def test_what_goes_wrong_is_one_sentence(manual, capsys, more, answer, words):
    with endpoint(answer) as (url, _):
        assert main([str(manual), "--endpoint", url, "--model", "m", *more]) == 1
    told = capsys.readouterr().err
    assert words in told and "Traceback" not in told
    assert [file.name for file in manual.parent.iterdir()] == [manual.name]


def test_a_base_model_writes_about_what_it_reads(manual, monkeypatch, capsys):
    """valora-tiny follows no instructions, so what it is told is looked at."""
    assert main([str(manual), "--model", "tiny"]) == 1
    assert "follows instructions" in capsys.readouterr().err
    assert main([str(manual), "--model", "tiny", "--device", "nope"]) == 1
    assert "tiny cannot be moved to device nope" in capsys.readouterr().err
    assert main([str(manual.parent / "none.md"), "--model", "tiny"]) == 1
    assert "none.md" in capsys.readouterr().err
    told = []

    def answer(teacher, samples):
        told.extend((one.document.text, one.prompt) for one in samples)
        return [ask.Answer(answers=("Q: Who?\nA: a brother",))]

    monkeypatch.setattr("valora_teachers.in_context.InContext.answer", answer)
    assert main([str(manual), "--model", "tiny", "--count", "2"]) == 0
    assert [text for text, _ in told] == passages_of(TEXT)
    assert "Write 2 short questions" in told[0][1]
    assert [row["answers"] for row in rows(manual)] == [["a brother"]]  # the same one each time
