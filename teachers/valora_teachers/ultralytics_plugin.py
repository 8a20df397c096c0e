"""Ultralytics as an optional plug-in: kept offline, quiet, and away from the user's settings.

It is AGPL-3.0, so it is imported only when one of its models is trained or loaded, and never by the
serving side.

A `.pt` file is a pickle, and loading it runs whatever code it holds. Load only files that you
trust, on the machine where you train; bundles contain none.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import tempfile
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from PIL import Image

from valora_data.schema import Answer, Box
from valora_teachers.base import TeacherError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from valora_data.schema import Sample

MIN_CONFIDENCE = 0.01


@cache
def load_ultralytics() -> Any:
    """Import Ultralytics, which is optional."""
    import torch

    # It writes settings when imported; a folder of this process alone keeps the user's as they are.
    settings_folder = tempfile.mkdtemp(prefix="valora-ultralytics-")
    atexit.register(shutil.rmtree, settings_folder, ignore_errors=True)
    wanted = {
        "YOLO_CONFIG_DIR": settings_folder,
        "YOLO_OFFLINE": "1",
        "YOLO_AUTOINSTALL": "0",
        "YOLO_VERBOSE": "0",
        # It would set 1 for every process that we start.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    # It replaces PIL's Image.open by one that asks for a HEIF reader when an image is broken.
    opens = Image.open
    try:
        import ultralytics
        import ultralytics.utils.patches
    except ImportError as error:
        raise TeacherError(
            "Ultralytics is not installed (it is AGPL-3.0 and optional): "
            "run pip install 'valora[yolo]'"
        ) from error
    finally:
        Image.open = opens
        for name in added:
            if name != "YOLO_OFFLINE":  # read again on every use
                del os.environ[name]
    return ultralytics


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which Ultralytics lowers when it picks the CPU."""
    import torch

    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def open_weights(path: Path) -> tuple[Any, str, dict[int, str]]:
    """The `ultralytics.YOLO` of a `.pt` file, its task, and the names of its classes."""
    if not path.is_file():
        raise TeacherError(f"teacher {path} does not exist: check the path")
    ultralytics = load_ultralytics()
    try:
        with threads_kept():
            model = ultralytics.YOLO(str(path))
            if not isinstance(model.model, ultralytics.nn.tasks.BaseModel):
                raise TypeError(f"it holds a {type(model.model).__name__}")  # noqa: TRY301
            return model, model.task, dict(model.names)
    except (
        AttributeError, EOFError, ImportError, KeyError, OSError, RuntimeError, TypeError,
        ValueError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        reason = " ".join(str(error).removeprefix("ERROR ❌️ ").split()) or type(error).__name__
        raise TeacherError(
            f"{path.name} is no YOLO that Ultralytics {ultralytics.__version__} can load "
            f"({reason}): give one of its .pt files"
        ) from error


def predict(model: Any, samples: Sequence[Sample], **settings: Any) -> list[Any]:
    """Ultralytics' results for the images of samples, after non-maximum suppression."""
    with threads_kept():
        found: list[Any] = model.predict(
            [sample.image.convert("RGB") for sample in samples],
            conf=MIN_CONFIDENCE,
            iou=0.5,
            device="cpu",
            save=False,
            verbose=False,
            **settings,
        )
    return found


def read_boxes(result: Any, label_of: Mapping[int, str]) -> Answer:
    """Boxes of one of Ultralytics' results, inside the image, most confident first."""
    height, width = result.orig_shape
    edges = result.boxes.xyxy.clamp_min(0).tolist()
    found = zip(edges, result.boxes.cls.tolist(), result.boxes.conf.tolist(), strict=True)
    boxes = [
        Box(x0, y0, min(x1, width), min(y1, height), label_of[int(index)], confidence)
        for (x0, y0, x1, y1), index, confidence in found
        if min(x1, width) > x0 and min(y1, height) > y0
    ]
    return Answer(tuple(sorted(boxes, key=lambda box: -box.confidence)))
