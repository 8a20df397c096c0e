"""Drawn record documents, such as ``417 color red``: nobody knows a fact without the document.

All words are tokens of valora-tiny. The last wording of each question is kept for measuring. A
*linked* question names another fact instead of the letter: `what color has table 52?`, so that a
search for words does not find the line that answers it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from valora_data.sources.generic.scenes import COLORS, PATTERNS

THINGS = (
    "anchor", "arrow", "bell", "bolt", "bone", "bow", "candle", "castle", "chair", "circle",
    "clock", "cloud", "comb", "cross", "crown", "drop", "fish", "flag", "fork", "gear", "hammer",
    "hat", "heart", "house", "key", "kite", "lamp", "mug", "ring", "star", "sun", "tent",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS), "pattern": tuple(PATTERNS), "thing": THINGS,
    "table": tuple(str(number) for number in range(10, 100)),
}  # fmt: skip
"""Values of each attribute; all are equally likely."""


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
"""The same of a linked question, by the attributes that are given and asked about."""
KEYS = range(100, 1000)  # Numbers of letters
RECORD_TOKENS = 17  # Tokens of all facts about a letter with valora-tiny's tokenizer


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a document: the number of its letter, a key of `VALUES`, and its value."""

    key: int
    attribute: str
    value: str

    def question(self, wording: int) -> str:
        """Ask for the value; wording −1 is the one for measuring."""
        return WORDINGS[self.attribute][wording].format(key=self.key)


@dataclass(frozen=True, slots=True)
class Link:
    """Two facts about a letter: one that no other letter shares, and one that is asked about."""

    given: Fact
    asked: Fact

    @property
    def value(self) -> str:
        """The answer."""
        return self.asked.value

    def question(self, wording: int) -> str:
        """Ask for the value without naming the letter; wording −1 is the one for measuring."""
        wordings = LINKED_WORDINGS[self.given.attribute, self.asked.attribute]
        return wordings[wording].format(value=self.given.value)


@dataclass(frozen=True, slots=True)
class RecordDocument:
    """A document, and its facts in the order of the text."""

    text: str
    facts: tuple[Fact, ...]

    def links(self) -> list[Link]:
        """All links between facts about the same letter, in the order of the text."""
        times = Counter((fact.attribute, fact.value) for fact in self.facts)
        unique: dict[int, list[Fact]] = defaultdict(list)
        for fact in self.facts:
            if times[fact.attribute, fact.value] == 1:
                unique[fact.key].append(fact)
        return [
            Link(given, asked)
            for asked in self.facts
            for given in unique[asked.key]
            if given != asked
        ]


def draw_document(rng: np.random.Generator, records: int) -> RecordDocument:
    """Draw a document of so many letters, at most 900."""
    keys = rng.choice(np.array(KEYS), records, replace=False)
    facts = [
        Fact(key, name, str(rng.choice(choices)))
        for key in keys.tolist()
        for name, choices in VALUES.items()
    ]
    facts = [facts[place] for place in rng.permutation(len(facts))]
    text = "\n".join(f"{fact.key} {fact.attribute} {fact.value}" for fact in facts)
    return RecordDocument(text, tuple(facts))
