"""Questions about any text that the text itself answers: self-study without a language model.

A question repeats a part of a sentence and asks for the rest (`continue: …`) or for one word
(`which word is missing: …`). Teachers that write better questions can be used instead: their
questions come as `questions` in a file of documents.
"""

from __future__ import annotations

import re

import numpy as np

Pair = tuple[str, str]
"""A question and its answer."""

LEAST_WORDS = 5
"""Words of the shortest sentence that is asked about."""
MOST_WORDS = 12
"""Words of the longest answer, and of the longest part that a question repeats."""
GAP = "___"
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_WORD = re.compile(r"\w+")


def sentences_of(text: str) -> list[str]:
    """Sentences and lines of a text with enough words to ask about."""
    parts = (part.strip() for part in _SENTENCE.split(text))
    return [part for part in parts if len(_WORD.findall(part)) >= LEAST_WORDS]


def continuations(text: str) -> list[Pair]:
    """Ask for the rest of sentences, from every few words on."""
    found = []
    for sentence in sentences_of(text):
        words = sentence.split()
        for start in range(0, max(1, len(words) - 3), MOST_WORDS // 2):
            half = min((len(words) - start) // 2, MOST_WORDS)
            if half < 2:
                continue
            said = words[start : start + half]
            rest = words[start + half : start + half + MOST_WORDS]
            found.append((f"continue: {' '.join(said)}", " ".join(rest)))
    return found


def gaps(text: str, rng: np.random.Generator) -> list[Pair]:
    """Ask for one word of each sentence: a number or a name if there is one, else a long one."""
    found = []
    for sentence in sentences_of(text):
        words = list(_WORD.finditer(sentence))
        telling = [w for w in words if any(map(str.isdigit, w[0]))]
        telling += [w for w in words[1:] if w[0][0].isupper()]
        telling = telling or sorted(words, key=lambda w: -len(w[0]))[:3]
        word = telling[int(rng.integers(len(telling)))]
        near = sentence[: word.start()].split()[-MOST_WORDS:]
        after = sentence[word.end() :].split()[:MOST_WORDS]
        asked = " ".join([*near, GAP, *after])
        found.append((f"which word is missing: {asked}", word[0]))
    return found
