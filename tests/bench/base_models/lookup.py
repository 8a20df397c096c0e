"""An auxiliary loss that shows attention heads where to look, so that looking up is learnt at all.

To answer "417 color?", one layer must bring letter and attribute of a line to its value, and those
of the question to the place where the answer begins; a later layer can find the value then. As long
as one part is missing, the others gain nothing: from answers alone, valora-tiny did not get beyond
guessing a value of the right attribute in 190 million tokens. A linked question ("table 52 color?")
takes one layer more: one that finds the given value, which knows its letter, and one that finds the
value of this letter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from tests.bench.base_models.records import RecordBatch

LETTERS, ATTRIBUTES = 0, 1
"""Heads that look for letters and for attributes, in the first two layers."""
FINDER = 2
"""Layer whose first head looks for the value, and the second one for the value that is given; the
first head of the next layer looks for the value once more."""


class LookupTutor:
    """Cross-entropy of the attention of seven heads to the tokens that hold what is looked for.

    In the first layer, two heads of a line's value look at its letter and its attribute; in the
    second one, those of an answer's place look at the question's; in the third one, a head looks at
    the value in the document. For a linked question, another head of the third layer looks at the
    given value in the document, and one of the fourth layer at the value that answers. For albums
    see `album_loss`.

    Args:
        language: Language model (Llama of transformers), whose layers' inputs are kept from now on.
    """

    def __init__(self, language: Any) -> None:
        self.language = language
        self.inputs: dict[int, Tensor] = {}
        for number, layer in enumerate(language.layers[: FINDER + 2]):
            layer.input_layernorm.register_forward_hook(
                lambda module, given, made, number=number: self.inputs.update({number: made})
            )

    def loss(self, batch: RecordBatch) -> Tensor:
        """Mean cross-entropy of the heads, after a forward pass of the batch."""
        letter, attribute, value = batch.lines.unbind(-1)
        asked_letter, asked_attribute, wanted = batch.asked.unbind(-1)
        place = batch.start - 1  # where the answer is predicted
        linked = batch.link > 0
        direct, linking = place.masked_fill(linked, 0), place.masked_fill(~linked, 0)
        losses = (
            self._attend(0, LETTERS, value, letter),
            self._attend(0, ATTRIBUTES, value, attribute),
            self._attend(1, LETTERS, place, asked_letter),
            self._attend(1, ATTRIBUTES, place, asked_attribute),
            self._attend(FINDER, 0, direct, wanted),
            self._attend(FINDER, 1, linking, batch.link),
            self._attend(FINDER + 1, 0, linking, wanted),
        )
        return torch.stack(losses).mean()

    def album_loss(self, start: Tensor, look: Tensor) -> Tensor:
        """Mean cross-entropy of two heads, after a forward pass of questions about albums.

        In the second layer, an answer's place looks at the question's shape, as at a letter; in the
        third one, at the thing.

        Args:
            start: (b, turns) int64, position of each answer; 0 for none.
            look: (b, turns, 2) int64, as in `tests.bench.base_models.data.Chunk`.
        """
        place = (start - 1).clamp_min(0)
        shape, thing = look.unbind(-1)
        return torch.stack(
            [self._attend(1, LETTERS, place, shape), self._attend(FINDER, 0, place, thing)]
        ).mean()

    def _attend(self, number: int, head: int, at: Tensor, to: Tensor) -> Tensor:
        """Cross-entropy of a head's attention from positions (b, q) to others (b, q).

        Position 0 stands for none.
        """
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        inputs = self.inputs[number]
        attention = self.language.layers[number].self_attn
        size = attention.head_dim
        rows = slice(head * size, (head + 1) * size)
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        cosine, sine = self.language.rotary_emb(inputs, positions[None])
        query = F.linear(inputs, attention.q_proj.weight[rows])[:, None]
        key = F.linear(inputs, attention.k_proj.weight[rows])[:, None]
        query, key = (x[:, 0] for x in apply_rotary_pos_emb(query, key, cosine, sine))
        query = query.gather(1, at[..., None].expand(-1, -1, size))
        scores = (query @ key.mT).float() * attention.scaling
        scores = scores.masked_fill(positions > at[..., None], -torch.inf)
        there = (at > 0).float().flatten()
        goal = to.masked_fill(at == 0, 0)  # which is all that position 0 sees
        wrong = F.cross_entropy(scores.flatten(0, 1), goal.flatten(), reduction="none")
        return (wrong * there).sum() / there.sum().clamp_min(1)
