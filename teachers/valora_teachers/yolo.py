"""Teachers for object detection: YOLO models of Ultralytics.

Ultralytics is AGPL-3.0, so it is an optional plug-in: imported only when a YOLO is trained or
loaded, and never by the serving side.

A `.pt` file is a pickle, and loading it runs whatever code it holds. Load only files that you
trust, on the machine where you train; bundles contain none.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor, nn
from torch.nn import functional

from valora_data.cpu import cpu_multiplies_bfloat16
from valora_data.schema import Answer, Box, Task
from valora_teachers.base import BatchTeacher, TeacherError, map_classes
from valora_teachers.progress import LOOK_SAMPLES, Progress
from valora_teachers.ultralytics_plugin import load_ultralytics, open_weights, threads_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from valora_data.schema import Sample
    from valora_teachers.base import OnEpoch

FILE_NAME = "teacher.pt"
STRIDE = 16
GREY = (114, 114, 114)
"""Colour with which Ultralytics pads images."""
BOX_TASKS = frozenset({"detect", "segment", "pose"})
PREDICT_BATCH = 64
MIN_CONFIDENCE = 0.01
MIN_VISIBLE = 0.3
"""Share of a box that augmentation must leave inside the image for the box to be kept."""


@dataclass(frozen=True, slots=True)
class YoloSettings:
    """How a small YOLO is trained; the defaults suit 96-pixel scenes and two cores.

    Attributes:
        size: Side in pixels that images are resized to; a multiple of 16.
        width: Channels as a share of Ultralytics' full width; YOLO11n has 0.25.
        epochs: Passes over the training images.
        batch: Images per step.
        lr: Peak learning rate of AdamW; it warms up and falls along a cosine.
        weight_decay: Decay of AdamW.
        scale: Largest change of size in augmentation: by a factor from 1/(1 + scale) to 1 + scale.
        shift: Largest shift in augmentation, as a share of the side.
        jitter: Largest relative change of brightness; half of it for each channel.
        seed: Seed of weights, order and augmentation.
    """

    size: int = 96
    width: float = 0.25
    epochs: int = 18
    batch: int = 16
    lr: float = 3e-3
    weight_decay: float = 0.01
    scale: float = 0.3
    shift: float = 0.15
    jitter: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if self.size < 2 * STRIDE or self.size % STRIDE:
            raise TeacherError(f"size of a YOLO must be a multiple of {STRIDE}, got {self.size}")
        if self.epochs < 1 or self.batch < 2:
            raise TeacherError(
                "training a YOLO needs epochs >= 1 and batch >= 2, "
                f"got {self.epochs} and {self.batch}"
            )


@dataclass(frozen=True, slots=True)
class YoloReport:
    """Report of a training.

    Attributes:
        loss: Mean training loss of the last epoch.
        epochs: Passes over the training images.
        images: Number of training images.
        seconds: Wall time.
    """

    loss: float
    epochs: int
    images: int
    seconds: float


class YoloTeacher(BatchTeacher):
    """An Ultralytics detector that answers with a domain's labels."""

    def __init__(self, model: Any, label_of: Mapping[int, str], labels: Sequence[str]) -> None:
        """Wrap a loaded model; use `load` for a file.

        Args:
            model: An `ultralytics.YOLO`.
            label_of: Label for each class index of the model; other classes are left out.
            labels: Labels in the order of the class indices.
        """
        super().__init__(Task.DETECTION, labels, PREDICT_BATCH)
        self._model = model
        self._label_of = dict(label_of)

    @classmethod
    def load(
        cls,
        path: Path,
        labels: Sequence[str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> YoloTeacher:
        """Load a `.pt` file. It is a pickle: loading runs its code, so load only what you trust.

        Args:
            path: The file, trained here or by any Ultralytics version that the installed one reads.
            labels: Labels of the domain; the model's class names if None.
            names: Label for a class name of the model, where the two differ.

        Raises:
            TeacherError: If Ultralytics is missing, the file is missing or no YOLO, its task gives
                no boxes, or a label is none of its classes.
        """
        model, task, classes = open_weights(path)
        if task not in BOX_TASKS:
            raise TeacherError(
                f"{path.name} is a model for {task!r}, which gives no boxes: "
                "give one that was trained with task 'detect'"
            )
        label_of = map_classes(path.name, classes, labels, names)
        return cls(model, label_of, labels or tuple(dict.fromkeys(label_of.values())))

    def _answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        return self.predict([sample.image for sample in samples])

    def predict(self, images: Sequence[Image]) -> list[Answer]:
        """Find objects in RGB images of any size.

        Returns:
            One answer per image; boxes in its pixels, after non-maximum suppression, most
            confident first.
        """
        answers = []
        with threads_kept():
            for start in range(0, len(images), PREDICT_BATCH):
                results = self._model.predict(
                    [image.convert("RGB") for image in images[start : start + PREDICT_BATCH]],
                    conf=MIN_CONFIDENCE,
                    iou=0.5,
                    classes=sorted(self._label_of),
                    device="cpu",
                    save=False,
                    verbose=False,
                )
                answers += [read_boxes(result, self._label_of) for result in results]
        return answers


def read_boxes(result: Any, label_of: Mapping[int, str]) -> Answer:
    """Boxes of one of Ultralytics' results, inside the image, most confident first.

    Args:
        result: An `ultralytics.engine.results.Results`.
        label_of: Label for each class index.
    """
    height, width = result.orig_shape
    edges = result.boxes.xyxy.clamp_min(0).tolist()
    found = zip(edges, result.boxes.cls.tolist(), result.boxes.conf.tolist(), strict=True)
    boxes = [
        Box(x0, y0, min(x1, width), min(y1, height), label_of[int(index)], confidence)
        for (x0, y0, x1, y1), index, confidence in found
        if min(x1, width) > x0 and min(y1, height) > y0
    ]
    return Answer(tuple(sorted(boxes, key=lambda box: -box.confidence)))


def train_yolo(
    train_samples: Sequence[Sample],
    labels: Sequence[str],
    out: Path,
    *,
    settings: YoloSettings | None = None,
    on_epoch: OnEpoch | None = None,
    validation: Sequence[Sample] = (),
) -> YoloReport:
    """Train a small YOLO from scratch and save it as `out`/teacher.pt.

    Model, loss and file format are those of Ultralytics, so its tools open the file. The loop is
    ours: the images stay in memory, and Ultralytics' settings, callbacks and `runs/` folder are
    left alone. On CPUs that have instructions for it, layers compute in bfloat16; weights, their
    updates and the loss stay in float32.

    Args:
        train_samples: Training samples, with images of any size.
        labels: Labels in the order of the class indices.
        out: Folder to write to; created if missing.
        settings: Training settings; the defaults if None.
        on_epoch: Called after each epoch, see `base.OnEpoch`.
        validation: Samples whose loss `on_epoch` gets.

    Raises:
        TeacherError: If Ultralytics is missing, there are too few samples, or a box has
            a label outside `labels`.
    """
    settings = settings or YoloSettings()
    started = time.perf_counter()
    _check(train_samples, labels)
    batch_size = min(settings.batch, len(train_samples))
    data = _TrainingImages.of(train_samples, labels, settings.size)
    rng = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        # With channels last, convolutions on a CPU take a sixth less time.
        model = _new_model(labels, settings).to(memory_format=torch.channels_last)
    average = _Average(model)
    optimiser = torch.optim.AdamW(
        [
            {
                "params": [p for p in model.parameters() if p.ndim > 1],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=settings.lr,
        fused=True,
    )
    steps = settings.epochs * (len(train_samples) // batch_size)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _lr_share(step, steps))
    out.mkdir(parents=True, exist_ok=True)
    parts = {"model": model, "average": average.model, "optimiser": optimiser, "schedule": schedule}
    look = _look(average.model, validation, labels, settings)
    progress = Progress(out, "a YOLO", parts, rng, on_epoch, look)
    model.train()
    fast = cpu_multiplies_bfloat16()
    for step in progress.steps(settings.epochs, len(train_samples), batch_size):
        batch = data.augmented(step.chosen, settings, rng)
        with torch.autocast("cpu", torch.bfloat16, enabled=fast):
            found = model(batch["img"])
        total = model.loss(batch, _in_float32(found))[0].sum() / batch_size
        optimiser.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimiser.step()
        schedule.step()
        average.follow(step.number)
        step.loss = total.item()
    _save(average.model, settings, out / FILE_NAME)
    progress.finish()
    return YoloReport(
        loss=progress.mean,
        epochs=settings.epochs,
        images=len(train_samples),
        seconds=progress.spent + time.perf_counter() - started,
    )


def _in_float32(found: Any) -> Any:
    """What a detector returns, for a loss in float32."""
    if isinstance(found, Tensor):
        return found.float()
    if isinstance(found, dict):
        return {name: _in_float32(part) for name, part in found.items()}
    return [_in_float32(part) for part in found]


def _look(
    model: nn.Module, validation: Sequence[Sample], labels: Sequence[str], settings: YoloSettings
) -> Callable[[], dict[str, float]] | None:
    """Measures a model in training on validation samples; None if there are none."""
    known = [
        sample
        for sample in validation[:LOOK_SAMPLES]
        if all(box.label in labels for box in sample.answer.boxes)
    ]
    if not any(sample.answer.boxes for sample in known):
        return None
    data = _TrainingImages.of(known, labels, settings.size)
    still = replace(settings, scale=0.0, shift=0.0, jitter=0.0)
    batch = data.augmented(torch.arange(len(known)), still, torch.Generator().manual_seed(0))

    def look() -> dict[str, float]:
        with torch.no_grad():
            return {"validation loss": float(model(batch)[0].sum()) / len(known)}

    return look


def _check(train_samples: Sequence[Sample], labels: Sequence[str]) -> None:
    if len(train_samples) < 2:
        raise TeacherError(
            "training a YOLO needs at least 2 training images, "
            f"got {len(train_samples)}: add samples"
        )
    for sample in train_samples:
        for box in sample.answer.boxes:
            if box.label not in labels:
                raise TeacherError(
                    f"sample {sample.id} has label {box.label!r}, which is none of "
                    f"{', '.join(labels)}: correct the label or add it"
                )
    if not any(sample.answer.boxes for sample in train_samples):
        raise TeacherError("no training image has a box: a YOLO has nothing to learn from")


@dataclass(frozen=True, slots=True)
class _TrainingImages:
    """A labelled data set in memory, every image padded to a square.

    Attributes:
        pixels: (n, 3, size, size) uint8.
        boxes: Per image (m, 4) float32, (x0, y0, x1, y1) in shares of the square.
        classes: Per image (m, 1) float32 class indices.
    """

    pixels: Tensor
    boxes: list[Tensor]
    classes: list[Tensor]

    @classmethod
    def of(cls, samples: Sequence[Sample], labels: Sequence[str], size: int) -> _TrainingImages:
        pixels, boxes, classes = [], [], []
        index_of = {label: index for index, label in enumerate(labels)}
        for sample in samples:
            squared = ImageOps.pad(sample.image, (size, size), color=GREY)
            pixels.append(np.asarray(squared))
            width, height = sample.image.size
            side = max(width, height)
            margin = torch.tensor([(side - width) / 2, (side - height) / 2]).repeat(2)
            edges = torch.tensor([box.xyxy for box in sample.answer.boxes]).reshape(-1, 4)
            boxes.append((edges + margin) / side)
            indices = [index_of[box.label] for box in sample.answer.boxes]
            classes.append(torch.tensor(indices, dtype=torch.float32).reshape(-1, 1))
        stacked = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
        return cls(stacked, boxes, classes)

    def augmented(
        self, chosen: Tensor, settings: YoloSettings, rng: torch.Generator
    ) -> dict[str, Tensor]:
        """A batch as Ultralytics' loss takes it: mirrored, scaled, shifted and recoloured."""
        count = len(chosen)

        def spread(*shape: int) -> Tensor:
            return torch.rand(count, *shape, generator=rng) * 2 - 1

        factor = torch.exp(spread(1) * math.log(1 + settings.scale))
        factor = factor.repeat(1, 2)
        factor[:, 0] *= torch.where(torch.rand(count, generator=rng) < 0.5, -1.0, 1.0)
        shift = spread(2) * 2 * settings.shift
        # A point p in [-1, 1]² goes to factor·p + shift; sampling wants the inverse.
        inverse = torch.cat([torch.diag_embed(1 / factor), (-shift / factor)[..., None]], dim=-1)
        shape = [count, 3, settings.size, settings.size]
        grid = functional.affine_grid(inverse, shape, align_corners=False)
        pixels = functional.grid_sample(
            self.pixels[chosen].float() / 255, grid, padding_mode="border", align_corners=False
        )
        pixels = pixels * (1 + settings.jitter * spread(1, 1, 1))
        pixels = pixels * (1 + settings.jitter / 2 * spread(3, 1, 1))
        boxes, classes, places = [], [], []
        for place, index in enumerate(chosen.tolist()):
            corners = (self.boxes[index] * 2 - 1).reshape(-1, 2, 2) * factor[place] + shift[place]
            low, high = corners.amin(1), corners.amax(1)
            seen_low, seen_high = low.clamp(-1, 1), high.clamp(-1, 1)
            share = (seen_high - seen_low).prod(1) / (high - low).prod(1)
            kept = share > MIN_VISIBLE
            centre_size = torch.cat([(seen_low + seen_high + 2) / 4, (seen_high - seen_low) / 2], 1)
            boxes.append(centre_size[kept])
            classes.append(self.classes[index][kept])
            places.append(torch.full((int(kept.sum()),), float(place)))
        return {
            "img": pixels.clamp(0, 1).contiguous(memory_format=torch.channels_last),
            "bboxes": torch.cat(boxes),
            "cls": torch.cat(classes),
            "batch_idx": torch.cat(places),
        }


def _lr_share(step: int, steps: int) -> float:
    """Warm-up over the first tenth, then a cosine down to a fiftieth."""
    warm = min(1.0, (step + 1) / (0.1 * steps))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


class _Average:
    """Averaged weights, which follow those of a model, faster in the beginning.

    Args:
        model: The model.

    Attributes:
        model: A copy of the model with the averaged weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval()
        pairs = list(
            zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        )
        self._weights = [pair for pair in pairs if pair[0].is_floating_point()]
        self._others = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Move towards the model's weights after a step, from 1."""
        keep = min(0.98, (1 + step) / (10 + step))
        averaged, now = zip(*self._weights, strict=True)
        torch._foreach_lerp_(averaged, now, 1 - keep)
        for old, new in self._others:
            old.copy_(new)


def _new_model(labels: Sequence[str], settings: YoloSettings) -> Any:
    load_ultralytics()
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(_architecture(len(labels), settings.width), verbose=False)
    model.names = dict(enumerate(labels))
    model.args = get_cfg(overrides={"task": "detect", "imgsz": settings.size})
    return model


def _save(model: Any, settings: YoloSettings, path: Path) -> None:
    import ultralytics

    slim = copy.deepcopy(model).half().to(memory_format=torch.contiguous_format)
    slim.criterion = None
    arguments = {"task": "detect", "imgsz": settings.size, "seed": settings.seed}
    torch.save(
        {
            "epoch": -1,
            "model": slim,
            "ema": None,
            "train_args": arguments,
            "train_settings": asdict(settings),
            "version": ultralytics.__version__,
        },
        path,
    )


def _architecture(classes: int, width: float) -> dict[str, Any]:
    """A YOLO11 without the 32-pixel level: nothing in a 96-pixel image needs so coarse a grid."""
    return {
        "nc": classes,
        "depth_multiple": 0.5,
        "width_multiple": width,
        "backbone": [
            [-1, 1, "Conv", [64, 3, 2]],
            [-1, 1, "Conv", [128, 3, 2]],
            [-1, 2, "C3k2", [256, False, 0.25]],
            [-1, 1, "Conv", [256, 3, 2]],
            [-1, 2, "C3k2", [512, False, 0.25]],
            [-1, 1, "Conv", [512, 3, 2]],
            [-1, 2, "C3k2", [512, True]],
            [-1, 1, "SPPF", [512, 5]],
        ],
        "head": [
            [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
            [[-1, 4], 1, "Concat", [1]],
            [-1, 2, "C3k2", [256, False]],
            [-1, 1, "Conv", [256, 3, 2]],
            [[-1, 7], 1, "Concat", [1]],
            [-1, 2, "C3k2", [512, False]],
            [[10, 13], 1, "Detect", ["nc"]],
        ],
    }
