"""A small classifier that is trained here: a ResNet of transformers for images or short clips.

It gives domains without a teacher of their own something to distill. The frames of a clip go in
as further channels. A trained one is a folder that transformers can open.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from valora_data.schema import Answer, Task
from valora_data.sources.formats.videos import frame_places
from valora_teachers.base import BatchTeacher, TeacherError, choice_answer, map_classes
from valora_teachers.progress import LOOK_SAMPLES, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Sample
    from valora_teachers.base import OnEpoch

FOLDER = "teacher"
PREDICT_BATCH = 64


@dataclass(frozen=True, slots=True)
class SmallSettings:
    """How a small classifier is trained; the defaults suit 96-pixel scenes and one core.

    Attributes:
        size: Side in pixels that images are resized to.
        width: Channels of the first stage; each further one has twice as many.
        depth: Blocks of each of the three stages.
        frames: Frames that are taken of a clip; images have one.
        epochs: Passes over the training samples.
        batch: Samples per step.
        lr: Peak learning rate of AdamW; it warms up and falls along a cosine.
        weight_decay: Decay of AdamW.
        shift: Largest shift in augmentation, as a share of the side.
        jitter: Largest relative change of brightness, and half of it for each channel.
        seed: Seed of weights, order and augmentation.
    """

    size: int = 64
    width: int = 24
    depth: int = 1
    frames: int = 4
    epochs: int = 24
    batch: int = 32
    lr: float = 6e-3
    weight_decay: float = 0.05
    shift: float = 0.12
    jitter: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 2 or self.size < 16 or self.frames < 1:
            raise TeacherError(
                "a small classifier needs epochs >= 1, batch >= 2, size >= 16 and frames >= 1, got "
                f"{self.epochs}, {self.batch}, {self.size} and {self.frames}"
            )


@dataclass(frozen=True, slots=True)
class SmallReport:
    """Report of a training.

    Attributes:
        loss: Mean training loss of the last epoch.
        epochs: Passes over the training samples.
        images: Number of training samples.
        seconds: Wall time.
    """

    loss: float
    epochs: int
    images: int
    seconds: float


class SmallTeacher(BatchTeacher):
    """A trained small classifier with calibrated-by-training probabilities for every label."""

    def __init__(self, model: Any, task: Task, labels: Sequence[str], to_labels: Tensor) -> None:
        """Wrap a loaded model; use `load` for a folder."""
        super().__init__(task, labels, PREDICT_BATCH)
        self._model = model
        self._to_labels = to_labels

    @classmethod
    def load(
        cls,
        folder: Path,
        task: Task,
        labels: Sequence[str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> SmallTeacher:
        """Load what `train_small` saved.

        Args:
            folder: The model's folder.
            task: The domain's task.
            labels: Labels of the domain; the model's classes if None.
            names: Label for a class name of the model, where the two differ.

        Raises:
            TeacherError: If it is no such folder, or a label is none of its classes.
        """
        from transformers import ResNetForImageClassification

        try:
            model = ResNetForImageClassification.from_pretrained(folder, use_safetensors=True)
            model.config.image_size, model.config.frames  # noqa: B018
        except (AttributeError, OSError, ValueError) as error:
            raise TeacherError(
                f"{folder} holds no small classifier that was trained here: give its folder, or "
                "use teacher huggingface for others"
            ) from error
        classes = {int(index): str(name) for index, name in model.config.id2label.items()}
        mapped = map_classes(folder.name, classes, labels, names)
        chosen = tuple(dict.fromkeys(mapped.values())) if labels is None else tuple(labels)
        to_labels = torch.zeros(len(classes), len(chosen))
        for index, label in mapped.items():
            to_labels[index, chosen.index(label)] = 1.0
        return cls(model.eval(), task, chosen, to_labels)

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        config = self._model.config
        pixels = _pixels(samples, config.image_size, config.frames).float() / 127.5 - 1
        with torch.inference_mode():
            soft = self._model(pixels).logits.softmax(-1) @ self._to_labels
        return [choice_answer(self.task, self.labels, row) for row in soft.tolist()]


def train_small(
    train_samples: Sequence[Sample],
    task: Task,
    labels: Sequence[str],
    out: Path,
    *,
    settings: SmallSettings | None = None,
    on_epoch: OnEpoch | None = None,
    validation: Sequence[Sample] = (),
) -> SmallReport:
    """Train a small classifier from scratch and save it as `out`/teacher.

    Where samples have soft labels, it learns those.

    Args:
        train_samples: Training samples, with images of any size.
        task: Classification, video or counting.
        labels: Labels in the order of the class indices.
        out: Folder to write to; created if missing.
        settings: Training settings; the defaults if None.
        on_epoch: Called after each epoch, see `base.OnEpoch`.
        validation: Samples whose loss and accuracy `on_epoch` gets.

    Raises:
        TeacherError: If the task is another one, there are too few samples, or a sample
            has a label outside `labels`.
    """
    settings = settings or SmallSettings()
    started = time.perf_counter()
    targets = _targets(train_samples, task, labels)
    frames = settings.frames if task.spec.video else 1
    pixels = _pixels(train_samples, settings.size, frames)
    rng = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = _new_model(labels, settings, frames).to(memory_format=torch.channels_last)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
    )
    batch = min(settings.batch, len(pixels))
    steps = settings.epochs * (len(pixels) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _lr_share(step, steps))
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress(
        out,
        "a small classifier",
        {"model": model, "optimiser": optimiser, "schedule": schedule},
        rng,
        on_epoch,
        _look(model, validation, task, labels, settings.size, frames),
    )
    model.train()
    for step in progress.steps(settings.epochs, len(pixels), batch):
        logits = model(_augmented(pixels[step.chosen], settings, rng)).logits
        loss = F.cross_entropy(logits, targets[step.chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        step.loss = loss.item()
    mean = progress.mean
    _save(model, out / FOLDER)
    progress.finish()
    seconds = progress.spent + time.perf_counter() - started
    return SmallReport(mean, settings.epochs, len(train_samples), seconds)


def _look(
    model: Any,
    validation: Sequence[Sample],
    task: Task,
    labels: Sequence[str],
    size: int,
    frames: int,
) -> Callable[[], dict[str, float]] | None:
    """Measures a model in training on validation samples; None if there are none."""
    known = [sample for sample in validation if sample.answer.choice in labels][:LOOK_SAMPLES]
    if len(known) < 2:
        return None
    pixels = _pixels(known, size, frames).float() / 127.5 - 1
    targets = _targets(known, task, labels)

    def look() -> dict[str, float]:
        model.eval()
        with torch.inference_mode():
            logits = model(pixels).logits
        model.train()
        right = logits.argmax(-1) == targets.argmax(-1)
        return {
            "validation loss": float(F.cross_entropy(logits, targets)),
            "validation accuracy": float(right.float().mean()),
        }

    return look


def _targets(samples: Sequence[Sample], task: Task, labels: Sequence[str]) -> Tensor:
    """Probabilities, (samples, labels) float32."""
    if not task.spec.choice or task.spec.labels != "required":
        raise TeacherError(
            f"a small classifier cannot do task {task}: let labels stand in for a teacher "
            "(teacher: labels), or name a trained one"
        )
    if len(samples) < 2:
        raise TeacherError(f"training a teacher needs at least 2 samples, got {len(samples)}")
    rows = torch.zeros(len(samples), len(labels))
    for row, sample in zip(rows, samples, strict=True):
        choice = sample.answer.choice
        if choice not in labels:
            raise TeacherError(
                f"sample {sample.id}: label {choice!r} is not one of {', '.join(labels)}"
            )
        row[labels.index(choice)] = 1.0
        if sample.answer.soft:
            row.copy_(torch.tensor(sample.answer.soft))
    return rows


def _pixels(samples: Sequence[Sample], size: int, frames: int) -> Tensor:
    """(samples, 3 · frames, size, size) uint8."""
    rows = []
    for sample in samples:
        images = [sample.images[i] for i in frame_places(len(sample.images), frames)]
        small = [
            np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR))
            for image in images
        ]
        rows.append(np.concatenate(small, axis=-1))
    stacked = torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, size, size, 3 * frames)
    return stacked.permute(0, 3, 1, 2)


def _augmented(pixels: Tensor, settings: SmallSettings, rng: torch.Generator) -> Tensor:
    """Shifted and recoloured, all frames of a clip alike; nothing is mirrored or turned."""
    count, channels = pixels.shape[:2]

    def spread(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=rng) * 2 - 1

    theta = torch.eye(2, 3).repeat(count, 1, 1)
    theta[:, :, 2] = spread(2) * 2 * settings.shift
    grid = F.affine_grid(theta, list(pixels.shape), align_corners=False)
    moved = F.grid_sample(pixels.float(), grid, padding_mode="border", align_corners=False)
    factor = 1 + settings.jitter * spread(1) + settings.jitter / 2 * spread(3)
    moved = moved * factor.repeat(1, channels // 3)[..., None, None]
    return (moved.clamp(0, 255) / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def _lr_share(step: int, steps: int) -> float:
    """Warm-up over the first tenth, then a cosine down to a hundredth."""
    warm = min(1.0, (step + 1) / (0.1 * steps))
    return warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _new_model(labels: Sequence[str], settings: SmallSettings, frames: int) -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

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
    from transformers import ViTImageProcessor

    folder.mkdir(parents=True, exist_ok=True)
    model.eval().to(memory_format=torch.contiguous_format).save_pretrained(folder)
    if model.config.frames == 1:  # other tools open it as any image classifier
        side = model.config.image_size
        processor = ViTImageProcessor(size={"height": side, "width": side}, resample=2)
        processor.save_pretrained(folder)
