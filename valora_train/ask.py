"""Command ``valora ask``: a model writes questions about a text, with answers (self-instruct).

As Wang et al. (ACL 2023) have training data made, and the context paper its questions (004). They
go to the file beside the text in which sources of kind `texts` look for questions, so that they
can be read and corrected first. A row names the model in `by`, and counts as given without it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import track

from valora_data.errors import DataError, ValoraError
from valora_data.schema import Answer, Document, Sample, Task, no_image
from valora_data.sources.formats.documents import MAX_WORDS, SENTENCE, questions_file, read_text_of
from valora_data.sources.formats.files import read_lines
from valora_teachers.registry import load_teacher

PASSAGE = 1500  # characters of text, at least, that a model is shown at once
TOKENS = 64  # of a question with its answer, at most
SECONDS = 120.0  # until an endpoint must have answered
ORDER = """Write {count} short questions that this text answers, each with its answer in a few \
words of the text, and nothing else. Begin the line of each question with "Q:" and that of its \
answer with "A:"."""
PAIR = re.compile(
    r"^[\W\d]*Q\W*\d*\W*:[\s*]*(.+?)[\s*]*^[\W\d]*A\W*\d*\W*:[ \t*]*(.+?)[\s*]*$", re.M | re.I
)
WORD = re.compile(r"\w+")
Writer = Callable[[str, str], str]
"""Answers what it is told (second) about a text (first)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0, or 1 if there is no text, or the model cannot write questions about it."""
    made = argparse.ArgumentParser("valora ask", description="Let a model write questions.")
    made.add_argument("text", type=Path, help="a .txt, .md or .pdf file, or a folder of them")
    made.add_argument("--model", required=True, help="folder or hub name; with --endpoint its name")
    made.add_argument("--endpoint", help="URL of an OpenAI-compatible server, such as http://…/v1")
    made.add_argument("--count", type=int, default=4, help="questions for 1,500 characters")
    made.add_argument("--device", default="cpu", help="of a base model, in torch's terms")
    made.add_argument("--dtype", default="float32", help="of its weights")
    made.add_argument("--out", type=Path, help="file to write; default: where it is looked for")
    options = made.parse_args(arguments)
    try:
        _ask(options)
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {error.filename or options.text}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _ask(options: argparse.Namespace) -> None:
    """Ask about each passage that has no questions of this model yet, and keep them at once."""
    if options.count < 1:
        raise DataError(f"--count is {options.count}: ask for one question, at least")
    passages = passages_of(read_text_of(options.text).text)
    out = options.out or questions_file(options.text)
    if not out.parent.is_dir():
        raise DataError(f"{out.parent}, where questions go, is no folder: make it, or name another")
    rows = list[dict[str, Any]]()
    for number, row in read_lines(out) if out.is_file() else []:
        if row is None:
            raise DataError(f"{out}, line {number} is no JSON object: correct it")
        rows.append(row)
    known = {_key(row.get("question")) for row in rows}
    done = {row.get("passage") for row in rows if row.get("by") == options.model}
    left = [number for number in range(len(passages)) if number not in done]
    before = len(rows)
    if left:
        write = _endpoint(options) if options.endpoint else _base(options)
    for number in track(left, f"{len(passages)} passages"):
        said = write(passages[number], ORDER.format(count=options.count))
        for question, answer in pairs_of(said, passages[number]):
            if _key(question) not in known:
                known.add(_key(question))
                rows.append({"question": question, "answers": [answer], "by": options.model,
                             "passage": number})  # fmt: skip
        if len(rows) > before:
            part = out.with_name(f"{out.name}.part")
            lines = (f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            part.write_text("".join(lines), "utf-8")
            part.replace(out)
    if left and len(rows) == before:
        raise DataError(
            f"{options.model} wrote no question with an answer from the text: name a model that "
            "follows instructions"
        )
    print(f"{out}: {len(rows)} questions, {len(rows) - before} of them new")


def passages_of(text: str) -> list[str]:
    """A text in parts of some 1,500 characters, which end with a sentence or line."""
    parts, ends = [""], [match.end() for match in SENTENCE.finditer(text)]
    for start, end in zip([0, *ends], [*ends, len(text)], strict=True):
        if len(parts[-1]) >= PASSAGE:
            parts.append("")
        parts[-1] += text[start:end]
    return [part.strip() for part in parts if part.strip()]


def pairs_of(said: str, passage: str) -> list[tuple[str, str]]:
    """Questions and answers of a reply: those that are short, and have a word of the passage."""
    words = {*map(str.lower, WORD.findall(passage)), "yes", "no"}
    return [
        (question, answer)
        for question, answer in PAIR.findall(said)
        if len(answer.split()) <= MAX_WORDS and words & {*map(str.lower, WORD.findall(answer))}
    ]


def _key(question: object) -> str:
    return " ".join(WORD.findall(str(question).lower()))


def _base(options: argparse.Namespace) -> Writer:
    """A base model, which reads the passage as the teacher of contexts does."""
    given = {"max_tokens": TOKENS * options.count, "dtype": options.dtype, "device": options.device}
    teacher = load_teacher("in_context", options.model, (), given, Task.CONTEXT, "{}")

    def write(passage: str, order: str) -> str:
        asked = Sample("ask", no_image(), Answer(), order, document=Document(passage))
        return teacher.answer([asked])[0].answers[0]

    return write


def _endpoint(options: argparse.Namespace) -> Writer:
    """A chat model behind an OpenAI-compatible URL; its key is `OPENAI_API_KEY`, if it is set."""
    import httpx

    url = f"{options.endpoint.rstrip('/')}/chat/completions"
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = httpx.Client(headers=headers, timeout=SECONDS)

    def write(passage: str, order: str) -> str:
        message = {"role": "user", "content": f"{passage}\n\n{order}"}
        body: dict[str, Any] = {"model": options.model, "messages": [message], "temperature": 0}
        try:
            reply = client.post(url, json=body | {"max_tokens": TOKENS * options.count})
            reply.raise_for_status()
            return str(reply.json()["choices"][0]["message"]["content"])
        except httpx.HTTPStatusError as error:
            said = f"{error.response.status_code} ({error.response.text[:200]!r})"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = f"not ({error})"
        except (ValueError, LookupError, TypeError):
            said = "without a message of a chat"
        raise DataError(f"{url} answers {said}: check --endpoint and --model, and go on")

    return write
