"""The accuracy of visual question answering (Antol et al. 2015; VQA v2): agreement with people."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ENOUGH = 3
"""Annotators who must agree for an answer to be fully right."""
ARTICLES = frozenset({"a", "an", "the"})
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5",
    "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
PUNCTUATION = re.compile(r"[;/\[\]\"{}()=+\\_<>@`?!,\-]")
PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")


def vqa_score(said: str, answers: Sequence[str]) -> float:
    """How well an answer agrees with the annotators'.

    The mean, over every way to leave one annotator out, of min(agreeing others / 3, 1). With fewer
    than four annotators all others must agree; a single one must be met exactly.

    Args:
        said: The answer.
        answers: What each annotator answered, equal ones repeated.

    Returns:
        Between 0 and 1.
    """
    mine = normalized(said)
    agree = [normalized(answer) == mine for answer in answers]
    if len(agree) == 1:
        return float(agree[0])
    enough = min(ENOUGH, len(agree) - 1)
    total = sum(agree)
    return sum(min((total - one) / enough, 1.0) for one in agree) / len(agree)


def normalized(answer: str) -> str:
    """Lower case, numbers in digits, without punctuation and articles, as VQA's evaluation does."""
    text = PERIOD.sub("", PUNCTUATION.sub(" ", answer.lower().replace("\n", " ")))
    words = [NUMBERS.get(word, word) for word in text.split() if word not in ARTICLES]
    return " ".join(words)
