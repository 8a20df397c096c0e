"""VQA score, the accuracy of visual question answering (Antol et al. 2015; VQA v2)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ENOUGH = 3
"""Number of annotators who must give an answer for it to score 1."""
ARTICLES = frozenset({"a", "an", "the"})
NUMBERS = {
    "none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5",
    "six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
PUNCTUATION = re.compile(r"[;/\[\]\"{}()=+\\_<>@`?!,\-]")
PERIOD = re.compile(r"(?<!\d)\.|\.(?!\d)")


def vqa_score(said: str, answers: Sequence[str]) -> float:
    """Compare an answer with those of the annotators.

    The score is the mean of min(agreeing annotators / 3, 1) over all subsets that leave one
    annotator out. With two or three annotators, all of a subset must agree; with a single one, the
    score is 1 if the answers are equal, else 0.

    Args:
        said: The predicted answer.
        answers: The answer of each annotator.

    Returns:
        The score, in [0, 1].
    """
    mine = normalized(said)
    agree = [normalized(answer) == mine for answer in answers]
    if len(agree) == 1:
        return float(agree[0])
    enough = min(ENOUGH, len(agree) - 1)
    total = sum(agree)
    return sum(min((total - one) / enough, 1.0) for one in agree) / len(agree)


def normalized(answer: str) -> str:
    """Normalise an answer as the VQA evaluation does.

    Letters become lower case, number words become digits, punctuation and articles are removed.
    """
    text = PERIOD.sub("", PUNCTUATION.sub(" ", answer.lower().replace("\n", " ")))
    words = [NUMBERS.get(word, word) for word in text.split() if word not in ARTICLES]
    return " ".join(words)
