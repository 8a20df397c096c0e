"""Small classifiers and their training, which continues to the bit after a kill."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from valora_data.checkpoint import Checkpoint
from valora_data.schema import Sample
from valora_data.sources.formats.videos import frame_places
from valora_teachers.base import CHECKPOINT, OnEpoch


def probabilities(
    model: Any, samples: Sequence[Sample], size: int, frames: int
) -> list[list[float]]:
    """The probability of each class for each sample."""
    with torch.inference_mode():
        logits = model(_pixels(samples, size, frames) / 127.5 - 1).logits
        return list(logits.softmax(-1).tolist())


def train(
    samples: Sequence[Sample], labels: Sequence[str], settings: Any, frames: int, folder: Path,
    on_epoch: OnEpoch | None, validation: Sequence[Sample],
) -> dict[str, Any]:  # fmt: skip
    """Train a classifier and save it in a folder; what fills no batch comes another time."""
    started = time.perf_counter()
    targets, pixels = _targets(samples, labels), _pixels(samples, settings.size, frames)
    batch = min(settings.batch, len(samples))
    steps = len(samples) // batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new_model(labels, settings, frames).to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    total: int = settings.epochs * steps

    def rate(step: int) -> float:  # warms up over a tenth, then a cosine down to a hundredth
        warm = min(1.0, (step + 1) / (0.1 * total))
        return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / total)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    rng = torch.Generator().manual_seed(settings.seed)
    parts = {"model": model, "optimiser": optimiser, "schedule": schedule}
    checkpoint = Checkpoint(folder.with_name(CHECKPOINT))
    training = f"a small classifier by epochs: {settings.epochs} of {len(samples)} by {batch}"
    done, loss = 0, math.nan
    if state := checkpoint.load(training):
        done = state["epochs"]
        rng.set_state(state["random"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(done + 1, settings.epochs + 1):
        model.train()
        losses = []
        for chosen in torch.randperm(len(samples), generator=rng)[: steps * batch].split(batch):
            logits = model(_augmented(pixels[chosen], settings, rng)).logits
            losses.append(functional.cross_entropy(logits, targets[chosen]))
            optimiser.zero_grad()
            losses[-1].backward()
            optimiser.step()
            schedule.step()
        loss = sum(one.item() for one in losses) / steps
        if on_epoch is not None:
            figures = {"lr": float(schedule.get_last_lr()[0])}
            figures |= _validated(model, validation, labels, settings.size, frames)
            on_epoch(epoch, settings.epochs, loss, figures)
        if epoch < settings.epochs:
            state = {"epochs": epoch, "random": rng.get_state()}
            state |= {name: part.state_dict() for name, part in parts.items()}
            checkpoint.save(training, state.copy)
    _save(model, folder)
    seconds = checkpoint.spent + time.perf_counter() - started
    checkpoint.discard()
    return {"loss": loss, "epochs": settings.epochs, "images": len(samples), "seconds": seconds}


def _validated(
    model: Any, samples: Sequence[Sample], labels: Sequence[str], size: int, frames: int
) -> dict[str, float]:
    """Figures of a model in training on validation samples."""
    if len(samples) < 2:
        return {}
    model.eval()
    shares = torch.tensor(probabilities(model, samples, size, frames))
    targets = _targets(samples, labels)
    right = shares.argmax(-1) == targets.argmax(-1)
    return {
        "validation loss": float(functional.cross_entropy(shares.log(), targets)),
        "validation accuracy": float(right.float().mean()),
    }


def _targets(samples: Sequence[Sample], labels: Sequence[str]) -> Tensor:
    """Probabilities, (samples, labels) float32."""
    rows = torch.zeros(len(samples), len(labels))
    for row, sample in zip(rows, samples, strict=True):
        if sample.answer.soft:
            row.copy_(torch.tensor(sample.answer.soft))
        else:
            row[labels.index(str(sample.answer.choice))] = 1.0
    return rows


def _pixels(samples: Sequence[Sample], size: int, frames: int) -> Tensor:
    """(samples, 3 · frames, size, size) uint8."""

    def small(image: Image.Image) -> Any:
        return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))

    rows = [
        np.concatenate([small(one.images[i]) for i in frame_places(len(one.images), frames)], -1)
        for one in samples
    ]
    return torch.from_numpy(np.stack(rows)).permute(0, 3, 1, 2)


def _augmented(pixels: Tensor, settings: Any, rng: torch.Generator) -> Tensor:
    """Shifted and recoloured, all frames of a clip alike; nothing is mirrored or turned."""
    count, channels = pixels.shape[:2]

    def spread(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=rng) * 2 - 1

    theta = torch.eye(2, 3).repeat(count, 1, 1)
    theta[:, :, 2] = spread(2) * 2 * settings.shift
    grid = functional.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = functional.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    factor = 1 + settings.jitter * spread(1) + settings.jitter / 2 * spread(3)
    moved = moved * factor.repeat(1, channels // 3)[..., None, None]
    found: Tensor = moved.clamp(0, 255) / 127.5 - 1
    return found.contiguous(memory_format=torch.channels_last)


def _new_model(labels: Sequence[str], settings: Any, frames: int) -> Any:
    config = ResNetConfig(
        num_channels=3 * frames,
        embedding_size=settings.width,
        hidden_sizes=[settings.width, 2 * settings.width, 4 * settings.width],
        depths=[settings.depth] * 3,
        layer_type="basic",
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    config.image_size, config.frames = settings.size, frames
    return ResNetForImageClassification(config)


def _save(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.eval().to(memory_format=torch.contiguous_format).save_pretrained(folder)
    if model.config.frames == 1:  # other tools open it as any image classifier
        side = model.config.image_size
        processor = ViTImageProcessor(size={"height": side, "width": side}, resample=2)
        processor.save_pretrained(folder)
