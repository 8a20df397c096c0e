"""Ultralytics' trainer on images in memory, which continues to the bit after a kill."""

from __future__ import annotations

import copy
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ultralytics import __version__
from ultralytics.cfg import get_cfg
from ultralytics.data.dataset import YOLODataset
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.torch_utils import init_seeds

from valora_data.checkpoint import Checkpoint
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_data.schema import Sample
from valora_teachers.base import CHECKPOINT, OnEpoch

ARGUMENTS = {
    "task": "detect", "model": "yolo11.yaml", "optimizer": "AdamW", "momentum": 0.9, "cos_lr": True,
    "lrf": 0.02, "warmup_bias_lr": 0.0, "mosaic": 0.0, "close_mosaic": 0, "patience": 0,
    "device": "cpu", "amp": False, "plots": False, "verbose": False, "cache": "ram",
}  # fmt: skip
# YOLO11 without its 32-pixel level: nothing in a 96-pixel image needs so coarse a grid, and whole
# YOLO11n takes 70 % more time.
YOLO11 = {
    "depth_multiple": 0.5,
    "backbone": [
        [-1, 1, "Conv", [64, 3, 2]], [-1, 1, "Conv", [128, 3, 2]],
        [-1, 2, "C3k2", [256, False, 0.25]], [-1, 1, "Conv", [256, 3, 2]],
        [-1, 2, "C3k2", [512, False, 0.25]], [-1, 1, "Conv", [512, 3, 2]],
        [-1, 2, "C3k2", [512, True]], [-1, 1, "SPPF", [512, 5]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]], [[-1, 4], 1, "Concat", [1]],
        [-1, 2, "C3k2", [256, False]], [-1, 1, "Conv", [256, 3, 2]],
        [[-1, 7], 1, "Concat", [1]], [-1, 2, "C3k2", [512, False]],
        [[10, 13], 1, "Detect", ["nc"]],
    ],
}  # fmt: skip


def train_yolo(
    samples: Sequence[Sample],
    labels: Sequence[str],
    settings: Any,
    path: Path,
    on_epoch: OnEpoch | None,
    validation: Sequence[Sample],
) -> dict[str, Any]:
    """Train a detector and save it as a `.pt`, its checkpoint beside; `on_epoch` gets losses."""
    started = time.perf_counter()
    with _global_state_kept(), tempfile.TemporaryDirectory() as folder:
        threads = torch.get_num_threads()
        trainer = _Trainer(samples, validation, labels, settings, folder, path.parent / CHECKPOINT)
        torch.set_num_threads(threads)  # it lowers them
        if on_epoch is not None:
            trainer.set_callback("on_fit_epoch_end", lambda _: on_epoch(*trainer.figures()))
        trainer.train()
        trainer.export(path)
    seconds = trainer.checkpoint.spent + time.perf_counter() - started
    trainer.checkpoint.discard()
    return {"loss": trainer.mean_loss(), "epochs": settings.epochs, "images": len(samples),
            "seconds": seconds}  # fmt: skip


@contextmanager
def _global_state_kept() -> Iterator[None]:
    """Restore what Ultralytics changes for the whole process."""
    randoms = random.getstate(), np.random.get_state()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    names = ("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(randoms[0])
        np.random.set_state(randoms[1])
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        os.environ.update(variables)


class _Images(YOLODataset):  # type: ignore[misc]
    """A labelled data set whose cache in memory is filled with the samples."""

    def get_img_files(self, img_path: Sequence[Sample]) -> list[str]:
        return [sample.id for sample in img_path]

    def check_cache_ram(self, safety_margin: float = 1.0) -> bool:
        return True

    def cache_images(self) -> None:
        for i, sample in enumerate(self.img_path):
            image, most = sample.image.convert("RGB"), max(sample.image.size)
            image = image.resize([max(1, round(n / most * self.imgsz)) for n in image.size])
            self.ims[i] = np.ascontiguousarray(np.asarray(image)[..., ::-1])  # as OpenCV has it
            self.im_hw0[i], self.im_hw[i] = sample.image.size[::-1], self.ims[i].shape[:2]

    def get_labels(self) -> list[dict[str, Any]]:
        index = {label: number for number, label in self.data["names"].items()}
        labels = []
        for sample in self.img_path:
            boxes = np.array([box.xyxy for box in sample.answer.boxes], np.float32).reshape(-1, 4)
            boxes /= np.array([*sample.image.size] * 2, np.float32)
            sizes = boxes[:, 2:] - boxes[:, :2]
            classes = np.array([index[box.label] for box in sample.answer.boxes], np.float32)
            labels.append({
                "im_file": sample.id, "shape": sample.image.size[::-1],
                "cls": classes.reshape(-1, 1),
                "bboxes": np.hstack([boxes[:, :2] + sizes / 2, sizes]),
                "segments": [], "normalized": True, "bbox_format": "xywh",
            })  # fmt: skip
        return labels


class _Model(DetectionModel):  # type: ignore[misc]
    """A detector that computes in bfloat16 where the CPU does, and its loss in float32."""

    def loss(self, batch: dict[str, Any], preds: Any = None) -> Any:
        if self.training:
            with torch.autocast("cpu", torch.bfloat16, enabled=cpu_multiplies_bfloat16()):
                preds = self.forward(batch["img"])
            preds = _in_float32(preds)
        return super().loss(batch, preds)


def _in_float32(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _in_float32(part) for name, part in found.items()}
    return [_in_float32(part) for part in found] if isinstance(found, list) else found.float()


class _Trainer(DetectionTrainer):  # type: ignore[misc]
    """Ultralytics' trainer with data in memory, our checkpoint, and a seed for each epoch."""

    def __init__(
        self, samples: Sequence[Sample], validation: Sequence[Sample], labels: Sequence[str],
        settings: Any, folder: str, checkpoint: Path,
    ) -> None:  # fmt: skip
        self.splits = {"train": samples, "val": validation or samples[:1]}
        self.labels, self.settings, self.looks = labels, settings, bool(validation)
        self.checkpoint = Checkpoint(checkpoint)
        batch = min(settings.batch, len(samples))
        self.training = f"a YOLO by Ultralytics: {settings.epochs} of {len(samples)} by {batch}"
        super().__init__(
            overrides=ARGUMENTS
            | {
                "imgsz": settings.size, "epochs": settings.epochs, "batch": batch, "nbs": batch,
                "lr0": settings.lr, "weight_decay": settings.weight_decay,
                "warmup_epochs": 0.1 * settings.epochs, "scale": settings.scale,
                "translate": settings.shift, "hsv_s": settings.jitter, "hsv_v": settings.jitter,
                "seed": settings.seed, "save_dir": folder,
            }
        )  # fmt: skip
        self.callbacks = {"on_train_epoch_start": [_Trainer.seed_epoch]}  # none of Ultralytics'

    def get_dataset(self) -> dict[str, Any]:
        names = dict(enumerate(self.labels))
        return self.splits | {"names": names, "nc": len(names), "channels": 3}

    def build_dataset(self, img_path: Any, mode: str = "train", batch: Any = None) -> _Images:
        return _Images(
            img_path, task="detect", data=self.data, imgsz=self.args.imgsz, batch_size=batch,
            augment=mode == "train", hyp=self.args, cache=self.args.cache,
        )  # fmt: skip

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
        layers = YOLO11 | {"nc": len(self.labels), "width_multiple": self.settings.width}
        # With channels last, convolutions on a CPU take a sixth less time.
        return _Model(layers, verbose=False).to(memory_format=torch.channels_last)

    def seed_epoch(self) -> None:
        seed = 1000 * self.settings.seed + self.epoch
        init_seeds(seed, deterministic=True)
        self.train_loader.generator.manual_seed(seed)
        self.train_loader.reset()

    def resume_training(self, ckpt: Any) -> None:
        # So short a training needs averages that follow faster than Ultralytics'.
        self.ema.decay = lambda step: min(0.98, (1 + step) / (10 + step))
        if state := self.checkpoint.load(self.training):
            self.start_epoch, self.ema.updates = state["epochs"], state["updates"]
            for name, part in self.parts().items():
                part.load_state_dict(state[name])

    def save_model(self) -> bool:
        if self.epoch + 1 == self.epochs:
            return False
        progress = {"epochs": self.epoch + 1, "updates": self.ema.updates}
        return self.checkpoint.save(
            self.training,
            lambda: progress | {name: part.state_dict() for name, part in self.parts().items()},
        )

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "average": self.ema.ema, "optimiser": self.optimizer}

    def validate(self) -> tuple[dict[str, float], float]:
        if not self.looks:
            return {}, 0.0
        images = self.test_loader.dataset
        batch = self.preprocess_batch(images.collate_fn([images[i] for i in range(len(images))]))
        with torch.no_grad():
            loss = float(self.ema.ema(batch)[0].sum()) / len(images)
        return {"validation loss": loss}, 0.0

    def save_metrics(self, metrics: dict[str, float]) -> None: ...  # no table

    def final_eval(self) -> None: ...

    def mean_loss(self) -> float:
        return sum(map(float, self.tloss.values()))

    def figures(self) -> tuple[int, int, float, dict[str, float]]:
        lr = {"lr": float(self.optimizer.param_groups[0]["lr"])}
        return self.epoch + 1, self.epochs, self.mean_loss(), lr | self.metrics

    def export(self, path: Path) -> None:
        model = copy.deepcopy(self.ema.ema).half().to(memory_format=torch.contiguous_format)
        model.__class__, model.criterion = DetectionModel, None
        arguments = {"task": "detect", "imgsz": self.settings.size}
        model.args = get_cfg(overrides=arguments)
        torch.save(
            {
                "epoch": -1, "model": model, "ema": None,
                "train_args": arguments | {"seed": self.settings.seed},
                "train_settings": self.settings.model_dump(), "version": __version__,
            },
            path,
        )  # fmt: skip
