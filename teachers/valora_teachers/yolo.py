"""Ultralytics' models: YOLO (boxes or classes) and YOLO-World (boxes of labels or phrases).

Ultralytics is AGPL-3.0 and optional: it is imported only when one of its models is used, never by
the serving side. A `.pt` file is a pickle, and loading it runs whatever code it holds: load only
files that you trust, on the machine where you train; bundles contain none.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from PIL import Image
from pydantic import Field

from valora_data.hashing import place_hash
from valora_data.schema import Answer, Sample
from valora_data.wording import first_line
from valora_teachers import base
from valora_teachers.base import Count, OnEpoch, Share, Teacher, TeacherError, TeacherOptions

if TYPE_CHECKING:
    from torch import Tensor

ULTRALYTICS = "AGPL-3.0"  # of its weights, architectures and trainer
BOX_MODELS = ["detect", "segment", "pose"]
MIN_CONFIDENCE = 0.01
MAX_SIDE = 1280  # pixels that a YOLO is trained at: at 5,000, six pictures took 18 GB
MIN_BOX = 12  # least pixels of the shorter side of nine in ten boxes that a YOLO is trained on
TEXT_ENCODER = "openai/clip-vit-base-patch32"  # Ultralytics' own, which it would download
TEXT_WIDTH = 512


class YoloOptions(TeacherOptions):
    """How a small YOLO is trained; the defaults suit 96-pixel scenes and two cores."""

    size: Annotated[int, Field(ge=32, multiple_of=32)] = 96  # least side of images: `image_size`
    width: Annotated[float, Field(gt=0)] = 0.25  # channels as a share of the full width
    epochs: Count = 18  # passes over the training images
    batch: Annotated[int, Field(ge=2)] = 16  # images per step
    lr: Share = 3e-3  # peak learning rate of AdamW; it warms up and falls along a cosine
    weight_decay: Share = 0.01  # decay of AdamW
    scale: Share = 0.3  # largest change of size in augmentation, as a share
    shift: Share = 0.15  # largest shift in augmentation, as a share of the side
    jitter: Share = 0.25  # largest relative change of brightness and of saturation
    seed: Annotated[int, Field(ge=0)] = 0  # seed of weights, order and augmentation


class Yolo(Teacher):
    """Loads any `.pt` of Ultralytics; trains small detectors."""

    options_type = YoloOptions
    artefact: ClassVar[str | None] = "teacher.pt"
    license: ClassVar[str | None] = ULTRALYTICS
    trainable: ClassVar[bool] = True
    reads_prompt: ClassVar[bool] = False
    batch = 64

    def load(self, weights: Path | str) -> None:
        spec = self.task.spec
        self._classifies = spec.choice and spec.labels == "required" and not spec.video
        if not spec.detects and not self._classifies:
            raise TeacherError(
                f"a YOLO gives no answers for task {self.task}: use it for detection, "
                "classification or counting, or yolo_world for grounding"
            )
        path = Path(weights)
        self._model, kind = open_weights(path)
        wanted = ["classify"] if self._classifies else BOX_MODELS
        if kind not in wanted:
            raise TeacherError(
                f"{path.name} is a model for {kind!r}, which does not answer task {self.task}: "
                f"give one that was trained with task {wanted[0]!r}"
            )
        if extra := {"segment": "masks", "pose": "keypoints"}.get(kind):
            self.remark = f"{path.name} also gives {extra}, which are dropped: only boxes are kept"
        self.match_classes(path.name, self._model.names)

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        if self._classifies:
            found = predict(self._model, samples)
            return [self.choose(result.probs.data.tolist()) for result in found]
        results = predict(self._model, samples, classes=sorted(self.label_of))
        return [read_boxes(result, self.label_of) for result in results]

    def train(
        self, samples: Sequence[Sample], folder: Path, on_epoch: OnEpoch | None = None,
        validation: Sequence[Sample] = (),
    ) -> dict[str, Any]:  # fmt: skip
        if not self.task.spec.detects:
            raise TeacherError(
                f"a YOLO is trained here for detection only, not for {self.task}: choose teacher "
                "small"
            )
        self.check_labelled(samples, lambda sample: [box.label for box in sample.answer.boxes])
        if not any(sample.answer.boxes for sample in samples):
            raise TeacherError("no training image has a box: a YOLO has nothing to learn from")
        load_ultralytics()
        from valora_teachers.yolo_training import train_yolo

        known = [x for x in validation if {box.label for box in x.answer.boxes} <= {*self.labels}]
        path = folder / str(self.artefact)
        options = self.options.model_copy(update={"size": image_size(samples, self.options.size)})
        with threads_kept():
            return train_yolo(samples, self.labels, options, path, on_epoch, known)


def image_size(samples: Sequence[Sample], least: int) -> int:
    """Side in pixels, a multiple of 32, at which most boxes are large enough, if memory allows."""
    wanted = sorted(
        min(MIN_BOX / max(min(box.x1 - box.x0, box.y1 - box.y0), 1), 1) * max(sample.image.size)
        for sample in samples for box in sample.answer.boxes
    )  # fmt: skip
    return max(least, min(MAX_SIDE, round(-(-wanted[len(wanted) * 9 // 10] // 32) * 32)))


class YoloWorldOptions(TeacherOptions):
    """Options of a YOLO-World."""

    text_encoder: str = TEXT_ENCODER  # folder, or name on the hub, of CLIP's text encoder


class YoloWorld(Teacher):
    """Detects a domain's labels, which it looks for together, or each sample's phrase, alone."""

    options_type = YoloWorldOptions
    artefact: ClassVar[str | None] = "teacher.pt"
    license: ClassVar[str | None] = ULTRALYTICS
    reads_prompt: ClassVar[bool] = False

    @classmethod
    def inputs(
        cls, weights: str | None, options: Mapping[str, Any], cache: Path | None
    ) -> dict[str, str]:
        encoder = place_hash(options.get("text_encoder", TEXT_ENCODER))
        return super().inputs(weights, options, cache) | {"text_encoder": encoder}

    def load(self, weights: Path | str) -> None:
        path = Path(weights)
        self._model, _ = open_weights(path)
        kind = type(self._model.model).__name__
        if kind != "WorldModel":
            raise TeacherError(
                f"{path.name} is a {kind}, which cannot be asked for a phrase: give a YOLO-World"
            )
        if self.task.spec.detects:
            self._phrases = self.find_phrases(path.name)
        self._encode = text_encoder(self.options.text_encoder)
        self._prompted: list[str] = []

    def answer_batch(self, samples: Sequence[Sample]) -> list[Answer]:
        if self.task.spec.detects:
            return self._find(samples, self._phrases)
        asked = [base.phrase_of(sample) for sample in samples]
        answers = [Answer()] * len(samples)
        for phrase in dict.fromkeys(asked):
            rows = [row for row, one in enumerate(asked) if one == phrase]
            found = self._find([samples[row] for row in rows], {phrase: phrase})
            for row, answer in zip(rows, found, strict=True):
                answers[row] = Answer(answer.boxes[:1])
        return answers

    def _find(self, samples: Sequence[Sample], phrases: Mapping[str, str]) -> list[Answer]:
        if list(phrases) != self._prompted:  # as `WorldModel.set_classes`, with our text encoder
            self._prompted = list(phrases)
            network = self._model.model
            network.txt_feats = self._encode(self._prompted)[None]
            network.model[-1].nc = len(phrases)
            network.names = dict(enumerate(phrases))
            self._model.predictor = None
        label_of = dict(enumerate(phrases.values()))
        return [read_boxes(found, label_of) for found in predict(self._model, samples)]


@cache
def text_encoder(name: str) -> Callable[[Sequence[str]], Tensor]:
    """CLIP's text encoder: phrases to embeddings, (phrases, 512) float32, each of length 1."""
    import torch
    from transformers import AutoTokenizer, CLIPTextModelWithProjection

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = CLIPTextModelWithProjection.from_pretrained(name, use_safetensors=True).eval()
        if (width := model.config.projection_dim) != TEXT_WIDTH:
            raise ValueError(f"it gives {width} numbers, expected {TEXT_WIDTH}")  # noqa: TRY301
    except (OSError, ValueError) as error:
        raise TeacherError(
            f"the text encoder {name} of YOLO-World cannot be loaded ({first_line(error)}): set "
            f"teacher.options.text_encoder to a folder that holds {TEXT_ENCODER}"
        ) from error

    @torch.no_grad()
    def encode(phrases: Sequence[str]) -> Tensor:
        inputs = tokenizer(list(phrases), padding=True, truncation=True, return_tensors="pt")
        return torch.nn.functional.normalize(model(**inputs).text_embeds.float(), dim=-1)

    return encode


@cache
def load_ultralytics() -> Any:
    """Import Ultralytics, which is optional."""
    import torch

    # It writes settings when imported; a folder of this process alone keeps the user's as they are.
    settings_folder = tempfile.mkdtemp(prefix="valora-ultralytics-")
    atexit.register(shutil.rmtree, settings_folder, ignore_errors=True)
    wanted = {
        "YOLO_CONFIG_DIR": settings_folder, "YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0",
        "YOLO_VERBOSE": "0",
        # It would set 1 for every process that we start.
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
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


def open_weights(path: Path) -> tuple[Any, str]:
    """The `ultralytics.YOLO` of a `.pt` file, and its task."""
    if not path.is_file():
        raise TeacherError(f"teacher {path} is no file: check the path")
    ultralytics = load_ultralytics()
    try:
        with threads_kept():
            model = ultralytics.YOLO(str(path))
            if not isinstance(model.model, ultralytics.nn.tasks.BaseModel):
                raise TypeError(f"it holds a {type(model.model).__name__}")  # noqa: TRY301
            return model, model.task
    except (Exception, SystemExit) as error:  # a pickle may raise anything
        reason = " ".join(str(error).removeprefix("ERROR ❌️ ").split()) or type(error).__name__
        raise TeacherError(
            f"{path.name} is no YOLO that Ultralytics {ultralytics.__version__} can load "
            f"({reason}): give one of its .pt files"
        ) from error


def predict(model: Any, samples: Sequence[Sample], **settings: Any) -> list[Any]:
    """Ultralytics' results for the images of samples, after non-maximum suppression."""
    images = [sample.image.convert("RGB") for sample in samples]
    settings |= {"conf": MIN_CONFIDENCE, "iou": 0.5, "device": "cpu", "save": False}
    with threads_kept():
        return list(model.predict(images, verbose=False, **settings))


def read_boxes(result: Any, label_of: Mapping[int, str]) -> Answer:
    """Boxes of one of Ultralytics' results, inside the image, most confident first."""
    found = result.boxes
    labels = [label_of[int(index)] for index in found.cls]
    height, width = result.orig_shape
    return base.boxes_inside(found.xyxy.tolist(), labels, found.conf.tolist(), (width, height))
