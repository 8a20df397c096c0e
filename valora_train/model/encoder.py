"""The paper's context encoder: LoRA and queries that compress a document to memory tokens.

Offline context learning §3: the encoder θ_f reads the document and gives memory tokens m, from
which the decoder θ_g, another adapter, first reconstructs the document (equation 3) and then
answers questions about it (equation 4). Both adapters are trained together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data.contract import contexts
from valora_data.contract.contexts import MEMORY_TOKENS, around_memory
from valora_data.errors import DataError
from valora_data.wording import plural
from valora_train.model import memory
from valora_train.model.prompts import Example

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Document
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded

REPEAT = "repeat"
"""What the decoder is asked when it is to reconstruct a document."""
PIECE = 128
"""Tokens of a piece of a document that is reconstructed."""
PIECES = 4
"""Pieces in one step, which share the pass over the document; that costs as much as they do."""
QUESTIONS = 32
"""Questions about a document in one step, for the same reason."""


class MadeTokens:
    """Memory tokens that an encoder has just made; their gradients reach it.

    Args:
        embeddings: [tokens, width].
    """

    form = MEMORY_TOKENS
    position = 0

    def __init__(self, embeddings: Tensor) -> None:
        self.embeddings = embeddings
        self.tokens = len(embeddings)


class ContextEncoder(nn.Module):
    """An encoder with its adapter, and the decoder's adapter if it has one.

    Args:
        lmm: The model; gets one adapter or two.
        tokens: Number of memory tokens.
        seed: Seed of the adapters and the queries.
        decoder: Name of the decoder's adapter; None if the frozen base model decodes, as in ICAE.
    """

    encoder = "encoder"

    def __init__(self, lmm: Lmm, tokens: int, seed: int, decoder: str | None = "decoder") -> None:
        super().__init__()
        self._lmm, self.decoder = lmm, decoder
        for shift, name in enumerate(self.adapters):
            lmm.adapters.add(name, seed + shift, decode_only=False)
        table = lmm.model.get_input_embeddings().weight.detach().float()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(table), (tokens,), generator=generator)
        self.queries = nn.Parameter(table[rows.to(table.device)].clone())
        # Hidden states after the final norm are much larger than embeddings.
        self.scale = nn.Parameter(torch.full((lmm.width,), float(table.std())).to(table.device))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of its adapters."""
        return (self.encoder,) if self.decoder is None else (self.encoder, self.decoder)

    def weights(self) -> list[nn.Parameter]:
        """The weights of its adapters."""
        found = self._lmm.adapters.parameters
        return [weight for name in self.adapters for weight in found(name).values()]

    def encode(self, document: Document) -> MadeTokens:
        """Compress a document.

        Args:
            document: A document without images that fits into the model's context.

        Raises:
            DataError: It has images, or does not fit.
        """
        if document.images:
            raise DataError(
                "an encoder of memory tokens reads texts only, not albums: set context.form=prefix"
            )
        lmm = self._lmm
        lmm.adapters.activate(self.encoder)
        before, _ = around_memory(lmm)
        ids = [*before, *lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"]]
        if len(ids) + len(self.queries) > lmm.context_length:
            raise DataError(
                f"a document of {plural(len(ids), 'token')} and {len(self.queries)} memory tokens "
                f"do not fit into the {lmm.context_length} that the base model reads: split it"
            )
        embedded = lmm.model.get_input_embeddings()(torch.tensor([ids], device=lmm.device))
        inputs = torch.cat([embedded, self.queries[None].to(embedded)], dim=1)
        lmm.language_model.eval()
        with lmm.precision():
            hidden = lmm.language_model(inputs_embeds=inputs, use_cache=False).last_hidden_state[0]
        return MadeTokens(self.stored().memory(hidden.float()))

    def stored(self) -> contexts.Encoder:
        """The queries in the form that bundles hold; they share memory with the module."""
        return contexts.Encoder(self.queries, self.scale)

    def save(self, folder: Path, base: str) -> None:
        """Write the encoder's adapter and its queries."""
        self._lmm.adapters.save(self.encoder, folder, base)
        self.stored().write(folder)

    def loss(self, document: Document, asked: Sequence[Encoded]) -> Tensor:
        """Cross entropy of answers, given the memory tokens of a document.

        Args:
            document: The document.
            asked: Questions about it with their answers, encoded.
        """
        made = self.encode(document)
        self._lmm.adapters.activate(self.decoder)
        memories: list[Any] = [made] * len(asked)
        states = memory.states(self._lmm, asked, memories)
        hidden, tokens = states.answer_pairs()
        found = F.cross_entropy(self._lmm.logits(hidden), tokens)
        for weight in self.weights():  # activating one adapter froze the other
            weight.requires_grad_(True)
        return found


def train_encoder(
    module: ContextEncoder,
    lmm: Lmm,
    asked: Mapping[str, tuple[Document, Sequence[Encoded]]],
    *,
    reconstruct: int,
    steps: int,
    lr: float,
    seed: int,
    on_step: Callable[[int, int, float], None] = lambda *_: None,
) -> None:
    """Train encoder and decoder: reconstruction first, questions then.

    Args:
        module: The encoder.
        lmm: Its model.
        asked: Documents with questions and answers, encoded, by name.
        reconstruct: Steps in which documents are reconstructed.
        steps: Steps in which questions are answered.
        lr: Peak learning rate.
        seed: Seed of what is drawn.
        on_step: Called with step (from 1), number of steps, and loss.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [*module.weights(), *module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    total = reconstruct + steps
    schedule = one_cycle(optimizer, lr, total)
    names = list(asked)
    for step in range(total):
        document, questions = asked[names[step % len(names)]]
        if step < reconstruct:
            batch = [_piece(lmm, document, generator) for _ in range(PIECES)]
        else:
            rows = torch.randint(len(questions), (QUESTIONS,), generator=generator).tolist()
            batch = [questions[row] for row in rows]
        optimizer.zero_grad(set_to_none=True)
        loss = module.loss(document, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        on_step(step + 1, total, float(loss.detach()))


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, steps: int
) -> torch.optim.lr_scheduler.OneCycleLR:
    """A learning rate that rises for a tenth of the steps, and for two at least, and falls then."""
    steps = max(steps, 3)
    rising = max(0.1, 2 / steps)  # torch divides by the first phase's steps, less one
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=rising)


def _piece(lmm: Lmm, document: Document, generator: torch.Generator) -> Encoded:
    """A piece of a document to reconstruct: after its first words, if it is not the beginning."""
    ids = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"]
    start = int(torch.randint(max(1, len(ids) - PIECE), (), generator=generator))
    start = start if len(ids) > PIECE else 0
    given = lmm.tokenizer.decode(ids[max(0, start - 4) : start]) if start else ""
    text = lmm.tokenizer.decode(ids[start : start + PIECE])
    return lmm.encode([Example(f"{REPEAT} {given}".strip(), (), answer=lambda _: text)])[0]
