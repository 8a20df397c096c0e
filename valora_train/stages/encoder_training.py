"""Encoder training (stage `memorise`): LoRA and queries that make memory tokens of documents.

It learns to reconstruct, then to answer (offline context learning §3.2, §3.3, with ICAE's frozen
decoder). Output: `encoder/` and `memories/NAME.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from valora_data import shards
from valora_data.contract import contexts
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.contract.contexts import MEMORY_TOKENS, around_memory
from valora_data.errors import DataError
from valora_data.schema import Document
from valora_data.wording import plural
from valora_train.fusion.samples import PSEUDO_LABELLED, make_deterministic
from valora_train.model import memory
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, Example
from valora_train.reporting.progress import Step
from valora_train.settings import Settings, as_dict
from valora_train.stage import Stage, digest, intact
from valora_train.stages.fuse import DomainInputs
from valora_train.tasks.registry import make_task

ENCODER = "encoder"
MEMORIES = "memories"
REPEAT = "repeat"  # what the decoder is asked when it is to reconstruct a document
PIECE = 128  # tokens of a piece of a document that is reconstructed
PIECES = 4  # in one step; they share the pass over the document, which costs as much as they do
QUESTIONS = 32  # about a document in one step, for the same reason


def encoder_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that trains an encoder."""
    context, base = settings.context, settings.model.id
    inputs = {"base": base_hash(base), "processor": processor_hash(base)}
    for item in domains:
        inputs[f"{item.settings.name}/taught"] = digest(item.distilled / PSEUDO_LABELLED)
    values: dict[str, Any] = {
        "tokens": context.tokens, "steps": context.encoder_steps, "lr": settings.train.lr,
        "seed": settings.train.seed, "model": as_dict(settings.model),
        "lora": as_dict(settings.train.lora),
        "prompts": {item.settings.name: item.settings.prompt for item in domains},
    }  # fmt: skip
    return Stage(f"memorise-{settings.task.name}", 1, values, inputs)


def build_encoder(
    settings: Settings, domains: Sequence[DomainInputs], folder: Path, on_step: Step
) -> None:
    """Train the encoder, and write it and the memory of each document."""
    make_deterministic(settings.train.threads)
    lmm = Lmm(settings.model, settings.train.lora)
    asked: dict[str, tuple[Document, Sequence[Encoded]]] = {}
    for item in domains:
        task = make_task(item.settings.domain(), settings.heads, lmm)
        samples = shards.read(intact(item.distilled / PSEUDO_LABELLED))
        task.prepare(samples)
        document = samples[0].document
        assert document is not None, "`prepare` checks it"
        encoded = lmm.encode([task.training_example(sample) for sample in samples])
        asked[item.settings.name] = document, encoded
    steps, train = settings.context.encoder_steps, settings.train
    encoder = ContextEncoder(lmm, settings.context.tokens, train.seed)
    train_encoder(
        encoder, asked, reconstruct=steps, steps=steps, lr=train.lr, seed=train.seed,
        on_step=on_step,
    )  # fmt: skip
    base = base_hash(settings.model.id)
    for name, (document, _) in asked.items():
        with torch.no_grad():
            made = memory.MemoryTokens(encoder.encode(document))
        memory.stored(made, base, torch.float32).write(folder / MEMORIES / f"{name}.safetensors")
    encoder.save(folder / ENCODER, settings.model.id)


class ContextEncoder(nn.Module):
    """An encoder with its adapter; the frozen base model decodes."""

    adapters: tuple[str, ...] = (ENCODER,)
    decoder: str | None = None  # the decoder's adapter

    def __init__(self, lmm: Lmm, tokens: int, seed: int) -> None:
        super().__init__()
        self.lmm = lmm
        for shift, name in enumerate(self.adapters):
            lmm.adapters.add(name, seed + shift, decode_only=False)
        table = lmm.model.get_input_embeddings().weight.detach().float()
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(table), (tokens,), generator=generator)
        self.queries = nn.Parameter(table[rows.to(table.device)].clone())
        # Hidden states after the final norm are much larger than embeddings.
        self.scale = nn.Parameter(torch.full((lmm.width,), float(table.std())).to(table.device))

    def weights(self) -> list[nn.Parameter]:
        """The weights of its adapters."""
        found = self.lmm.adapters.parameters
        return [weight for name in self.adapters for weight in found(name).values()]

    def encode(self, document: Document) -> Tensor:
        """Compress a document to memory tokens, [tokens, width]; gradients reach the encoder."""
        if document.images:
            raise DataError(
                "an encoder of memory tokens reads texts only, not albums: set context.form=prefix"
            )
        lmm = self.lmm
        lmm.adapters.activate(ENCODER)
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
        return contexts.Encoder(self.queries, self.scale).memory(hidden.float())

    def save(self, folder: Path, base: str) -> None:
        """Write the encoder's adapter and its queries."""
        self.lmm.adapters.save(ENCODER, folder, base)
        contexts.Encoder(self.queries, self.scale).write(folder)

    def loss(self, document: Document, asked: Sequence[Encoded]) -> Tensor:
        """Cross entropy of answers to encoded questions, given a document's memory tokens."""
        made = self.encode(document)
        self.lmm.adapters.activate(self.decoder)
        # As `memory.MemoryTokens`, whose parameter gradients would not pass.
        tokens: Any = SimpleNamespace(
            form=MEMORY_TOKENS, position=0, tokens=len(made), embeddings=made
        )
        hidden, answers = memory.states(self.lmm, asked, [tokens] * len(asked)).answer_pairs()
        found = F.cross_entropy(self.lmm.logits(hidden), answers)
        for weight in self.weights():  # activating one adapter froze the other
            weight.requires_grad_(True)
        return found


def train_encoder(
    encoder: ContextEncoder,
    asked: Mapping[str, tuple[Document, Sequence[Encoded]]],
    *,
    reconstruct: int,
    steps: int,
    lr: float,
    seed: int,
    on_step: Step = lambda *_: None,
) -> None:
    """Train an encoder: first `reconstruct` steps of documents, then `steps` of questions."""
    generator = torch.Generator().manual_seed(seed)
    weights = [*encoder.weights(), *encoder.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0)
    total = reconstruct + steps
    schedule = one_cycle(optimizer, lr, total)
    names = list(asked)
    for step in range(total):
        document, questions = asked[names[step % len(names)]]
        if step < reconstruct:
            batch = [_piece(encoder.lmm, document, generator) for _ in range(PIECES)]
        else:
            rows = torch.randint(len(questions), (QUESTIONS,), generator=generator).tolist()
            batch = [questions[row] for row in rows]
        optimizer.zero_grad(set_to_none=True)
        loss = encoder.loss(document, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
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
    given = lmm.tokenizer.decode(ids[max(0, start - 4) : start]) if start else ""
    text = lmm.tokenizer.decode(ids[start : start + PIECE])
    example = Example(f"{REPEAT} {given}".strip(), (), context=True, answer=lambda _: text)
    return lmm.encode([example])[0]
