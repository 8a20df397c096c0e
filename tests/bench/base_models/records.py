"""Record documents with questions, drawn as token ids a batch at a time on the training's device.

The documents are those of `valora_data.sources.formats.documents`, and the ids are those that the
tokenizer gives for their text. Drawn as text, a document of 1,900 tokens takes a processor core
longer than a GPU takes to learn from it.

To look facts up is learned in the shortest documents and then carries over to longer ones: the next
length opens when the longest so far is read (`Curriculum`). Questions come in all wordings, also in
the one that is kept for measuring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_data.sources.formats.documents import KEYS, LINKED_WORDINGS, VALUES, WORDINGS

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

RECORD_TOKENS = 17  # of all facts about a letter with valora-tiny's tokenizer
LETTER_TOKENS = (0, 5, 9, 13, RECORD_TOKENS)
"""Tokens of facts about a letter, by their number, at most."""
TURN_TOKENS = 11
"""Tokens of a question with its answer and the turns' marks, at most."""
LINKED = 0.4
"""Share of questions that are linked, where the document allows it."""
_NONE, _KEY, _VALUE = -1, -2, -3
"""In place of token ids: nothing, the number of the letter, and the value that is given."""
READ = 0.85
"""Running accuracy at which a length counts as read, and the next one opens."""


@dataclass(frozen=True, slots=True)
class Length:
    """A group of record documents of similar length.

    Attributes:
        records: Fewest and most letters of a document.
        turns: Questions about each document.
        kinds: Number of attributes that a document tells of each letter.
    """

    records: tuple[int, int]
    turns: int
    kinds: int = len(VALUES)

    @property
    def tokens(self) -> int:
        """Tokens of a document with its questions, at most."""
        return 2 + self.records[1] * LETTER_TOKENS[self.kinds] + self.turns * TURN_TOKENS


LENGTHS = {
    "records_10": Length((2, 2), 8, kinds=1),
    "records_20": Length((2, 4), 8, kinds=1),
    "records_36": Length((2, 4), 8, kinds=2),
    "records_64": Length((1, 3), 16),
    "records_128": Length((3, 7), 16),
    "records_256": Length((7, 14), 16),
    "records_512": Length((14, 29), 20),
    "records_1024": Length((29, 59), 24),
    "records_1900": Length((59, 111), 14),
}
"""Groups of documents of up to so many tokens, by name, in the order in which they are opened."""


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Documents with questions.

    Attributes:
        ids: (b, length) int64, token ids, padded on the right: a system turn with the document,
            then turns of the user and the assistant.
        start: (b, turns) int64, position of each answer, which is one token before `</s>`.
        lines: (b, lines, 3) int64, positions of letter, attribute and value of each line of the
            document; 0 where there is no line.
        asked: (b, turns, 3) int64, positions of letter and attribute in each question, and of the
            value in the document. In a linked question, the given value is in the letter's place.
        link: (b, turns) int64, position in the document of the value that a linked question gives;
            0 for other questions.
    """

    ids: Tensor
    start: Tensor
    lines: Tensor
    asked: Tensor
    link: Tensor


class RecordDrawer:
    """Draws record documents with questions about them.

    Facts are asked about with replacement, so that earlier answers do not tell what later ones
    are not.

    Args:
        tokenizer: Tokenizer of `tests.bench.base_models.data.build_tokenizer`.
        seed: Seed of documents and questions.
        device: Device that draws.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int, device: torch.device) -> None:
        self.device = device
        self.rng = torch.Generator(device).manual_seed(seed)

        def encode(text: str) -> list[int]:
            """Ids of a text about letter 100, whose number becomes `_KEY`."""
            ids: list[int] = tokenizer.encode(text).ids
            return [_KEY if i == hundred else i for i in ids]

        def table(rows: list[list[int]]) -> Tensor:
            """Rows of ids, filled up with `_NONE`, (rows, longest)."""
            longest = max(len(row) for row in rows)
            full = [row + [_NONE] * (longest - len(row)) for row in rows]
            return torch.tensor(full, device=device)

        (hundred,) = tokenizer.encode("100").ids
        special: dict[str, int] = tokenizer.get_vocab()
        facts = [(name, value) for name, choices in VALUES.items() for value in choices]
        # A line's break is its last token; the last line of a document has none.
        self.line = table([encode(f"100 {name} {value}") for name, value in facts])
        self.line_break = int(tokenizer.encode("\n").ids[0])
        self.answer = torch.tensor(
            [one for _, value in facts for one in tokenizer.encode(value).ids], device=device
        )
        self.told = self.line.gather(1, (self.line != _NONE).sum(1, keepdim=True) - 1)[:, 0]
        # Questions by the attribute that is asked about and the one that is given; where both are
        # the same, the letter is given.
        names = {
            name: {*tokenizer.encode(name).ids, *tokenizer.encode(f" {name}").ids}
            for name in VALUES
        }
        asking, parts = [], []
        for name, wordings in WORDINGS.items():
            for given, choices in VALUES.items():
                if given == name:
                    rows, mark = [encode(wording.format(key=100)) for wording in wordings], _KEY
                else:
                    value, mark = int(tokenizer.encode(f" {choices[0]}").ids[-1]), _VALUE
                    rows = [
                        [mark if one == value else one for one in tokenizer.encode(text).ids]
                        for wording in LINKED_WORDINGS[given, name]
                        for text in [wording.format(value=choices[0])]
                    ]
                asking += rows
                parts += [
                    [ids.index(mark), next(i for i, one in enumerate(ids) if one in names[name])]
                    for ids in rows
                ]
        shape = (len(VALUES), len(VALUES), len(wordings))
        self.asking = table(asking).view(*shape, TURN_TOKENS - 4)
        # Places of letter, or of the value that is given, and of the attribute in a question.
        self.parts = torch.tensor(parts, device=device).view(*shape, 2)
        counts = [len(choices) for choices in VALUES.values()]
        self.count = torch.tensor(counts, device=device)
        self.first = self.count.cumsum(0) - self.count  # of each attribute among the facts
        keys = [one for key in KEYS for one in tokenizer.encode(str(key)).ids]
        self.keys = torch.tensor(keys, device=device)
        self.pad, self.eos = special["<pad>"], special["</s>"]
        self.head = torch.tensor([special["<s>"], special["<|system|>"]], device=device)
        self.user, self.assistant = special["<|user|>"], special["<|assistant|>"]

    def draw(
        self,
        samples: int,
        records: tuple[int, int],
        turns: int,
        kinds: int = len(VALUES),
        wording: int | None = None,
        linked: float = LINKED,
    ) -> RecordBatch:
        """Draw documents with questions.

        Args:
            samples: Number of documents.
            records: Fewest and most letters of a document.
            turns: Questions about each document.
            kinds: Number of attributes of a letter that the document tells, the same of each.
            wording: Index into `WORDINGS` of all questions; None for any.
            linked: Share of questions that give another fact of the letter instead of its number,
                if no other letter has the same.
        """
        rng, device, attributes = self.rng, self.device, len(VALUES)
        fewest, most = records

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=rng, device=device)

        letters = fewest + (uniform(samples, 1) * (most - fewest + 1)).long()
        numbers = self.keys[uniform(samples, len(self.keys)).argsort(1)[:, :most]]
        told_attributes = uniform(samples, attributes).argsort(1) < kinds
        # Facts by letter and attribute, (samples, most * attributes).
        place = torch.arange(most * attributes, device=device)
        attribute = place % attributes
        value = uniform(samples, len(attribute)) * self.count[attribute]
        fact = self.first[attribute] + value.long()
        number = numbers.repeat_interleave(attributes, 1)
        facts = letters * kinds
        missing = (place // attributes >= letters) | ~told_attributes[:, attribute]
        # The facts that are told come first, in any order.
        order = uniform(samples, len(place)).masked_fill(missing, 2.0).argsort(1)
        lines = torch.cat(
            [self.line[fact.gather(1, order)], self._full((samples, len(attribute), 1))], 2
        )
        lines[..., -1] = self.line_break
        lines = torch.where(lines == _KEY, number.gather(1, order)[..., None], lines)
        lines[..., -1].masked_fill_(place == facts - 1, _NONE)
        lines.masked_fill_((place >= facts)[..., None], _NONE)

        line = (uniform(samples, turns) * facts).long()
        asked = order.gather(1, line)
        wordings = self.asking.shape[2]
        which = (uniform(samples, turns) * wordings).long()
        if wording is not None:
            which.fill_(wording % wordings)
        given = self._given(fact, missing, asked, linked)
        case = asked % attributes, given % attributes, which
        question = self.asking[case]
        question = torch.where(question == _KEY, number.gather(1, asked)[..., None], question)
        told_value = self.told[fact.gather(1, given)][..., None]
        question = torch.where(question == _VALUE, told_value, question)
        told = self._full((samples, turns, TURN_TOKENS))
        told[..., 0], told[..., 1:-3] = self.user, question
        told[..., -3], told[..., -1] = self.assistant, self.eos
        told[..., -2] = self.answer[fact.gather(1, asked)]

        loose = torch.cat([self.head.expand(samples, -1), lines.flatten(1), told.flatten(1)], 1)
        there = loose != _NONE
        place = there.cumsum(1) - 1
        length = len(self.head) + most * LETTER_TOKENS[kinds] + turns * TURN_TOKENS
        ids = self._full((samples, length + 1)).fill_(self.pad)
        ids.scatter_(1, place.masked_fill(~there, length), loose)
        turn = place[:, -turns * TURN_TOKENS :].view(samples, turns, TURN_TOKENS)
        parts = turn[..., 1:].gather(2, self.parts[case])
        # A line begins with letter and attribute; its last token before the break is the value.
        line_place = place[:, len(self.head) : -turns * TURN_TOKENS].view(lines.shape)
        line_place = line_place.masked_fill(lines == _NONE, 0)
        value = line_place[..., :-1].amax(-1)
        found = torch.cat([line_place[..., :2], value[..., None]], -1)
        asked_parts = torch.cat([parts, value.gather(1, line)[..., None]], -1)
        link = value.gather(1, order.argsort(1).gather(1, given)) * (given != asked)
        return RecordBatch(ids[:, :length], turn[..., -2], found, asked_parts, link)

    def _given(self, fact: Tensor, missing: Tensor, asked: Tensor, linked: float) -> Tensor:
        """Places of the facts that questions give; the fact that is asked about gives the letter.

        Args:
            fact: (b, places) int64, index of the fact at each place, by letter and attribute.
            missing: (b, places) bool, which of them the document does not tell.
            asked: (b, turns) int64, places of the facts that are asked about.
            linked: Share of questions that give another fact of the letter, one that no other
                letter shares.

        Returns:
            (b, turns) int64.
        """
        samples, attributes = len(fact), len(VALUES)
        times = torch.zeros(samples, len(self.answer), device=self.device)
        times.scatter_add_(1, fact, (~missing).float())
        unique = (times.gather(1, fact) == 1) & ~missing
        letter, kind = asked // attributes, asked % attributes
        own = unique.view(samples, -1, attributes)
        own = own.gather(1, letter[..., None].expand(-1, -1, attributes))
        own = own & (torch.arange(attributes, device=self.device) != kind[..., None])
        drawn = torch.rand((*own.shape, 2), generator=self.rng, device=self.device)
        chosen = letter * attributes + (drawn[..., 0] * own).argmax(-1)
        return torch.where(own.any(-1) & (drawn[..., 0, 1] < linked), chosen, asked)

    def _full(self, shape: tuple[int, ...]) -> Tensor:
        return torch.full(shape, _NONE, device=self.device)


class Curriculum:
    """Draws documents of growing length; half of the batches are of the newest length.

    Args:
        drawer: Draws the documents.
        tokens: Tokens of a batch, about.
        seed: Seed of the choice of lengths.
    """

    def __init__(self, drawer: RecordDrawer, tokens: int, seed: int) -> None:
        self.drawer, self.tokens = drawer, tokens
        self.rng = np.random.default_rng(seed)
        self.open = 1
        self.drawn = 0
        self.right = torch.zeros(len(LENGTHS), device=drawer.device)

    def draw(self) -> tuple[str, RecordBatch]:
        """A batch and the name of its length."""
        self.drawn += 1
        # Now and then only, because the CPU waits for the GPU here.
        if self.drawn % 10 == 0 and self.open < len(LENGTHS):
            self.open += int(float(self.right[self.open - 1]) >= READ)
        newest = self.open - 1
        place = newest if self.rng.random() < 0.5 else int(self.rng.integers(self.open))
        name, length = list(LENGTHS.items())[place]
        samples = max(1, self.tokens // length.tokens)
        return name, self.drawer.draw(samples, length.records, length.turns, length.kinds)

    def note(self, name: str, right: Tensor) -> None:
        """Note the share of a batch's questions that were answered rightly, () float32."""
        self.right[list(LENGTHS).index(name)].lerp_(right, 0.1)
