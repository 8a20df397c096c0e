"""Drawn record documents: every fact is drawn at random, so nobody knows it without the document.

A document lists the colour, the pattern, the thing and the table of numbered letters, in any order:

    417 color red
    820 thing star
    417 table 52

All words are single tokens of valora-tiny, which learns to read such documents. Questions come in
several wordings; the last one of each attribute is kept for measuring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from valora_data.sources.generic.scenes import COLORS, PATTERNS

THINGS = (
    "anchor", "arrow", "bell", "bolt", "bone", "bow", "candle", "castle", "chair", "circle",
    "clock", "cloud", "comb", "cross", "crown", "drop", "fish", "flag", "fork", "gear", "hammer",
    "hat", "heart", "house", "key", "kite", "lamp", "mug", "ring", "star", "sun", "tent",
)  # fmt: skip
VALUES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "pattern": tuple(PATTERNS),
    "thing": THINGS,
    "table": tuple(str(number) for number in range(10, 100)),
}
"""Values of each attribute; all are equally likely."""
WORDINGS: dict[str, tuple[str, ...]] = {
    attribute: (
        f"{{key}} {attribute}?",
        f"which {attribute} has {{key}}?",
        f"{{key}} has which {attribute}?",
        f"what {attribute} has {{key}}?",
    )
    for attribute in VALUES
}
"""Wordings of a question about an attribute; the last one is for measuring."""
KEYS = range(100, 1000)
"""Numbers of letters."""
RECORD_TOKENS = 17
"""Tokens of all facts about a letter with valora-tiny's tokenizer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact of a document.

    Attributes:
        key: Number of the letter.
        attribute: A key of `VALUES`.
        value: Its value.
    """

    key: int
    attribute: str
    value: str

    def question(self, wording: int) -> str:
        """Ask for the value.

        Args:
            wording: Index into `WORDINGS`; −1 is the wording for measuring.
        """
        return WORDINGS[self.attribute][wording].format(key=self.key)


@dataclass(frozen=True, slots=True)
class RecordDocument:
    """A document and its facts.

    Attributes:
        text: The document.
        facts: All facts, in the order of the text.
    """

    text: str
    facts: tuple[Fact, ...]


def draw_document(rng: np.random.Generator, records: int) -> RecordDocument:
    """Draw a document.

    Args:
        rng: Source of randomness.
        records: Number of letters, at most 900.
    """
    keys = rng.choice(np.array(KEYS), records, replace=False)
    facts = [
        Fact(key, name, str(rng.choice(choices)))
        for key in keys.tolist()
        for name, choices in VALUES.items()
    ]
    facts = [facts[place] for place in rng.permutation(len(facts))]
    text = "\n".join(f"{fact.key} {fact.attribute} {fact.value}" for fact in facts)
    return RecordDocument(text, tuple(facts))
