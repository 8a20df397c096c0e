"""Prefixes that begin as what questions attend to in a document.

What nobody looks at need not stand in a prefix, and what is looked at need not be learnt again:
such a prefix begins closer to the whole document than one of the document's beginning. Caches that
are not trained are shortened in the same way (H2O, SnapKV).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from valora_train.model import memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded

QUESTIONS = 512
"""Most questions whose attention is computed, evenly taken from all."""


def most_attended(
    lmm: Lmm, read: memory.Prefix, questions: Sequence[Encoded], tokens: int
) -> memory.Prefix:
    """Return the keys and values of a document that questions attend to most.

    Every head keeps tokens of its own, in the document's order and at their positions.

    Args:
        lmm: The model, with its active adapter.
        read: What it keeps of the whole document.
        questions: Encoded questions about the document, with answers or without.
        tokens: Tokens to keep, at most those of the document.
    """
    mass = attention_mass(lmm, read, questions)
    kept = mass.topk(tokens, -1).indices.sort(-1).values[..., None]
    kept = kept.expand(-1, -1, -1, read.keys.shape[-1])
    keys, values = (part.detach().gather(2, kept) for part in (read.keys, read.values))
    return memory.Prefix(keys, values, read.position)


@torch.no_grad()
def attention_mass(lmm: Lmm, read: memory.Prefix, questions: Sequence[Encoded]) -> Tensor:
    """Sum up the attention of questions to each token of a document.

    Args:
        lmm: The model, with its active adapter.
        read: What it keeps of the whole document.
        questions: Encoded questions, with answers or without.

    Returns:
        [layers, kv_heads, tokens] float32, sums over the tokens of all questions and over the heads
        that share keys.
    """
    some = questions[:: -(-len(questions) // QUESTIONS)]
    mass = torch.zeros(read.keys.shape[:3], device=lmm.device)
    step = max(1, memory.READ_AT_ONCE // read.tokens)
    for start in range(0, len(some), step):
        batch = some[start : start + step]
        lengths = torch.tensor([item.length for item in batch], device=lmm.device)

        def add(layer: int, weights: Tensor, lengths: Tensor = lengths) -> None:
            there = torch.arange(weights.shape[2], device=lmm.device) < lengths[:, None]
            found = torch.einsum("nhqt,nq->ht", weights[..., : read.tokens].float(), there.float())
            mass[layer] += found.unflatten(0, (len(mass[layer]), -1)).sum(1)

        with _attention_weights(lmm.language_model, add):
            memory.states(lmm, batch, [read] * len(batch))
    return mass


@contextmanager
def _attention_weights(language: Any, call: Any) -> Iterator[None]:
    """Call a function with the number of each layer and its attention, (n, heads, q, keys)."""

    def told(layer: int) -> Any:
        def hook(module: nn.Module, given: Any, made: tuple[Tensor, Tensor]) -> None:
            call(layer, made[1])

        return hook

    before = language.config._attn_implementation
    language.set_attn_implementation("eager")  # the only one that returns its weights
    hooks = [
        layer.self_attn.register_forward_hook(told(number))
        for number, layer in enumerate(language.layers)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        language.set_attn_implementation(before)
