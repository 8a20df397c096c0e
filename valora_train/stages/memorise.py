"""Stage `memorise`: trains an encoder that compresses documents to memory tokens.

The encoder learns from all documents of the task: first to make memory tokens from which the frozen
base model reconstructs them, then such that it answers questions about them (offline context
learning §3.2 and §3.3, with the frozen decoder of ICAE). The memory tokens that fusion trains begin
as what it makes, and the bundle holds it, so that a server can compress documents that nobody has
trained on. Output: `encoder/` (in PEFT's format, with its queries) and `memories/NAME.safetensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from valora_data import shards
from valora_data.contract.base_model import base_hash, processor_hash
from valora_train.fusion.samples import make_deterministic
from valora_train.model import memory
from valora_train.model.encoder import ContextEncoder, train_encoder
from valora_train.model.lmm import Lmm
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest, intact
from valora_train.stages.distill import TAUGHT
from valora_train.tasks.registry import make_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Document
    from valora_train.model.prompts import Encoded
    from valora_train.reporting.progress import Step
    from valora_train.settings import Settings
    from valora_train.stages.fuse import DomainInputs

ENCODER = "encoder"
MEMORIES = "memories"


def memorise_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that trains an encoder."""
    context = settings.context
    inputs = {
        "base": base_hash(settings.model.id),
        "processor": processor_hash(settings.model.id),
    }
    for item in domains:
        inputs[f"{item.settings.name}/taught"] = digest(item.distilled / TAUGHT)
    values: dict[str, Any] = {
        "tokens": context.tokens,
        "steps": context.encoder_steps,
        "model": as_dict(settings.model),
        "lora": as_dict(settings.train.lora),
        "lr": settings.train.lr,
        "seed": settings.train.seed,
        "prompts": {item.settings.name: item.settings.prompt for item in domains},
    }
    return Stage(f"memorise-{settings.task.name}", 1, values, inputs)


def build_memories(
    settings: Settings, domains: Sequence[DomainInputs], folder: Path, on_step: Step
) -> None:
    """Train the encoder, and write it and the memory of each document."""
    make_deterministic(settings.train.threads)
    lmm = Lmm(settings.model, settings.train.lora)
    asked: dict[str, tuple[Document, Sequence[Encoded]]] = {}
    for item in domains:
        task = make_task(item.settings.domain(), settings.heads, lmm)
        samples = shards.read(intact(item.distilled / TAUGHT))
        task.prepare(samples)
        document = samples[0].document
        assert document is not None, "`prepare` checks it"
        encoded = lmm.encode([task.training_example(sample) for sample in samples])
        asked[item.settings.name] = document, encoded
    steps, seed = settings.context.encoder_steps, settings.train.seed
    module = ContextEncoder(lmm, settings.context.tokens, seed, None)
    train_encoder(
        module, lmm, asked, reconstruct=steps, steps=steps, lr=settings.train.lr, seed=seed,
        on_step=on_step,
    )  # fmt: skip
    base = base_hash(settings.model.id)
    for name, (document, _) in asked.items():
        with torch.no_grad():
            made = memory.MemoryTokens(module.encode(document).embeddings)
        memory.stored(made, base, torch.float32).write(folder / MEMORIES / f"{name}.safetensors")
    module.save(folder / ENCODER, settings.model.id)
