"""The settings of `valora-train`, whose values and defaults are in the files of `conf/`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Annotated, Any, Literal, Self

from omegaconf import DictConfig, OmegaConf
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from valora_data.contract.files import expanded
from valora_data.schema import Domain, Task
from valora_data.sources.base import Source, SourceFormat
from valora_data.sources.registry import FORMATS
from valora_data.sources.shelf import read_shelf
from valora_train.errors import SettingsError, explain, without_passwords
from valora_train.removed import refuse_removed

LABELS = "labels"  # value of `domains.*.teacher`: the labels are used instead of a teacher
RANKS = (4, 8, 16, 32, 64, 128, 256)
SHELF_SHARE = 0.97  # share of its teacher's accuracy that a domain of a shelf must keep by default
_SHELF_PROMPTS = {Task.DETECTION: "detect", Task.CLASSIFICATION: "classify"}


def _distinct(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("something is listed twice: list it once")
    return values


Split = Literal["train", "unlabelled", "val", "test"]
Count = Annotated[int, Field(gt=0, le=1_000_000_000)]  # what is larger would never end
Whole = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
HomePath = Annotated[Text, AfterValidator(os.path.expanduser)]  # `~` is the home folder
Names = Annotated[list[Text], AfterValidator(_distinct)]


class Section:
    """A part of the settings, which `from_config` checks."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class SourceSettings(Section):
    """The source of a domain's samples."""

    kind: str = "scenes"  # format of the data set (`valora_data.sources.registry`)
    path: str | None = None  # of the file or folder, or name of the data set on the hub
    images: str | None = None  # folder of the images, for formats whose files name them
    columns: dict[str, str] = field(default_factory=dict)  # by field, if named otherwise
    frames: Annotated[int, Field(gt=0, le=10_000)] = 8  # taken of each video
    counts: dict[Split, Whole] = field(default_factory=dict)  # of images, for `scenes`
    fractions: dict[Split, Share] = field(default_factory=dict)  # of what is not split yet
    seed: Seed = 0  # for drawing and splitting
    max_faulty: Share = 0.05  # of the images, that may be skipped in whole or in part
    # An image in two splits: refuse it, or keep the copy in the later one (of train, unlabelled,
    # val, test), or the other copy.
    leaks: Literal["refuse", "keep_test", "keep_train"] = "refuse"
    unlabelled: str | None = None  # folder of images; null: the source's own, or a part of train
    document: str | None = None  # id, for files of several documents
    entries: Annotated[int, Field(gt=0, le=900)] = 30  # of a drawn document or album

    @property
    def format(self) -> SourceFormat:
        """The data-set format that `kind` names; a `DataError` lists all."""
        if self.kind not in FORMATS:
            refuse_removed(f"source.kind={self.kind}")
        return FORMATS[self.kind]()

    @model_validator(mode="after")
    def _some_split(self) -> Self:
        if self.fractions and not any(self.fractions.values()):
            raise ValueError("fractions are all zero: raise one of them")
        return self


@dataclass(frozen=True)
class TeacherSettings(Section):
    """How small models are trained and run (stages `teach` and `distill`)."""

    kind: str = "yolo"  # key of `valora_teachers.registry`
    min_confidence: Share = 0.05  # boxes below are dropped at once
    # Confidence from which boxes and answers become training samples; null for the threshold with
    # the best F1 on validation (boxes), or for all answers.
    threshold: Share | None = None
    labelled: bool = False  # train the LMM on the labelled training split, too
    options: dict[str, Any] = field(default_factory=dict)  # of this kind


@dataclass(frozen=True)
class DomainSettings(Section):
    """A domain of a task (see `valora_data.schema.Domain`)."""

    name: str  # letters, digits and underscores
    task: Task | None = None  # null for that of the task
    labels: list[Text] = field(default_factory=list)  # by class index; empty for language
    prompt: str = ""  # without the image; ``{}`` stands for a sample's own question
    # Accuracy to keep, in (0, 1], for CIDEr in (0, 10]; null where only the teacher counts.
    required: float | None = 0.8
    # Share of the teacher's accuracy to keep as well; null for `task.of_teacher`.
    of_teacher: ShareAboveZero | None = None
    # Or `labels`, a path, a name on the hub, ``package.module:function``.
    teacher: HomePath = "train"
    taught_by: TeacherSettings | None = None  # null for those of the task
    # Licences of data and teacher, for the bundle; null: what their files say.
    license: Text | None = None
    teacher_license: Text | None = None
    mirror: bool | None = None  # mirrored images have mirrored answers; null: see `mirrors`
    source: SourceSettings = SourceSettings()

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        place = f"domains.{self.name}"
        if self.teacher == LABELS and self.of_teacher is not None:
            raise SettingsError(
                f"{place}.of_teacher={self.of_teacher} asks for a share of the teacher's accuracy, "
                f"but the domain learns from labels: set {place}.required alone, or "
                f"{place}.teacher=train"
            )
        return self

    @property
    def task_type(self) -> Task:
        """The domain's task type, which `resolved` has filled in."""
        assert self.task is not None, "`Settings.chosen` fills it in"
        return self.task

    def domain(self) -> Domain:
        """The domain, with its values checked."""
        # Until the teacher's accuracy is known.
        required = self.of_teacher if self.required is None else self.required
        return Domain(self.name, self.task_type, tuple(self.labels), self.prompt, required or 0.0)

    def resolved(self, task: TaskSettings) -> DomainSettings:
        """The domain with its task type, contract and prompt completed by those of the task."""
        share, kind = self.of_teacher, self.task or task.type
        if share is None and self.teacher != LABELS:
            share = task.of_teacher and max(task.of_teacher, task.stricter.get(self.name, 0.0))
        prompt = self.prompt
        if task.prompt is not None and "{}" not in prompt:
            heads = kind.spec.detects or (kind.spec.choice and self.labels)
            prompt = task.prompt if kind is task.type and heads else prompt
        return replace(self, task=kind, of_teacher=share, prompt=prompt)

    def data(self) -> Source:
        """What its data are read from."""
        given = {key: value for key, value in asdict(self.source).items()
                 if key not in ("fractions", "max_faulty", "leaks")}  # fmt: skip
        return Source(name=self.name, task=self.task_type, labels=tuple(self.labels), **given)

    @property
    def mirrors(self) -> bool:
        """Whether a mirrored image has the mirrored answer."""
        if self.mirror is not None or self.task is None:
            return bool(self.mirror)
        spec = self.task.spec
        return not self.video and (spec.detects or spec.answer in ("label", "count"))

    @property
    def video(self) -> bool:
        """Whether samples are videos."""
        return self.source.format.video or (self.task is not None and self.task.spec.video)


@dataclass(frozen=True)
class TaskSettings(Section):
    """The task whose domains are fused."""

    name: Annotated[str, Field(pattern=r"^\w[\w.@+-]{0,99}$")] = ""  # of a folder and of the bundle
    type: Task = Task.DETECTION  # of domains without one
    # Share of its teacher's accuracy that a domain with a teacher must keep besides `required`.
    of_teacher: ShareAboveZero | None = None
    stricter: dict[str, ShareAboveZero] = field(default_factory=dict)  # the same, by domain
    only: Names = field(default_factory=list)  # domains to fuse, in this order; empty: all
    # One prompt for all domains of `type` that heads answer, in place of their own: those in one
    # adapter then read one pass of the model, where an image is asked about several of them.
    prompt: Text | None = None


@dataclass(frozen=True)
class ModelSettings(Section):
    """The large multimodal model."""

    id: Text = "tiny"  # shipped with the project; or a local folder, or a name on the hub
    device: Annotated[
        str, BeforeValidator(lambda given: f"cuda:{given}" if str(given).isdigit() else given)
    ] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the frozen weights
    # What training multiplies float32 matrices in; auto: bfloat16 on CPUs with instructions for it
    # (AMX, AVX-512 BF16). Accuracy is always measured in `dtype`.
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    quantize: Literal["nf4"] | None = None  # train on a language model in 4 bits (QLoRA)
    batch_size: Count = 64  # images per forward pass without gradients
    # How it writes boxes: on a grid of 0 to 1000, or in pixels of the image that it sees.
    coordinates: Literal["grid1000", "pixels"] = "grid1000"
    coordinate_step: Count = 10  # written coordinates are rounded to multiples of it
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    keep_features: bool = True  # cache visual features while the vision tower is frozen
    shard: bool = False  # the language model's layers over several processes (FSDP2)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.quantize is not None and self.shard:
            raise SettingsError(
                "model.shard=true cannot divide a base model in 4 bits among processes: set "
                "model.shard=false, or model.quantize=null"
            )
        return self


@dataclass(frozen=True)
class LoraSettings(Section):
    """Shape of the adapters, in PEFT's terms."""

    rank: Count = 8
    alpha: Count = 16
    targets: Annotated[Names, Field(min_length=1)] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    vision_tower: bool = False  # adapt its attention, too
    projector: bool = False  # or merger: adapt its linear layers, too
    rslora: bool = False  # scale by alpha / √rank
    # Act only on a prompt's last token and the answer (activated LoRA), so that a server computes
    # a prompt once for all adapters: for answers that are written, or read from that token.
    decode_only: bool = False

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.rank not in RANKS:
            raise SettingsError(
                f"train.lora.rank must be one of {', '.join(map(str, RANKS))}, got {self.rank}"
            )
        if self.decode_only and (self.vision_tower or self.projector):
            raise SettingsError(
                "train.lora.decode_only=true leaves prompts and their images as they are, but "
                "train.lora adapts how images are encoded: set vision_tower and projector to false "
                "(train=default)"
            )
        return self


@dataclass(frozen=True)
class AugmentSettings(Section):
    """Augmented views of the training images, besides mirroring (`train.flip`)."""

    views: int = 0  # of each image, encoded once; every other one is mirrored where that is allowed
    color: float = 0.0  # largest relative change of brightness, contrast and saturation
    crop: float = 0.0  # largest share of the area that is cut off
    zoom_out: float = 0.0  # largest grey border around half the views, as a share of the sides
    stretch: float = 0.0  # largest change of the ratio of width to height, as a logarithm
    rotate: float = 0.0  # largest angle, in degrees
    shift: float = 0.0  # largest shift, as a share of width and height
    blur: float = 0.0  # largest standard deviation of a Gaussian blur, in pixels
    noise: float = 0.0  # standard deviation, as a share of white
    jpeg: float = 0.0  # largest loss; 1 is quality 10
    least_visible: float = 0.3  # boxes of which less is left inside the image are dropped
    memory_gb: float = 4.0  # for the views of one domain, of which there are fewer if need be

    @model_validator(mode="after")
    def _within_limits(self) -> Self:
        changes = {"color": 1, "crop": 0.95, "zoom_out": 3, "stretch": 1, "rotate": 180,
                   "shift": 0.95, "blur": 10, "noise": 1, "jpeg": 1}  # fmt: skip
        limits = {**changes, "least_visible": 1, "views": 100, "memory_gb": float("inf")}
        for name, most in limits.items():
            if not 0 <= (value := getattr(self, name)) <= most:
                raise SettingsError(f"train.augment.{name} must lie in [0, {most:g}], got {value}")
        changed = any(getattr(self, name) for name in changes)
        if self.views and not changed:
            raise SettingsError(
                f"train.augment.views={self.views} asks for views that nothing changes: set "
                f"train/augment=light, or one of {', '.join(changes)}"
            )
        if changed and not self.views:
            raise SettingsError(
                "train.augment changes nothing without views: set train.augment.views=2"
            )
        return self


@dataclass(frozen=True)
class TrainSettings(Section):
    """How an attempt is trained."""

    steps: Count = 220  # of the optimiser, for a domain in a new adapter
    steps_per_new: Whole | None = None  # for each further new domain in it; null: as `steps`
    steps_per_held: Whole = 60  # for each domain that is rehearsed
    best_of: Count = 1  # steps, evenly in the second half, of which the best on validation is kept
    patience: Whole = 0  # comparisons without a better step after which training ends; 0: never
    batch_size: Count = 16
    micro_batch: Whole = 0  # samples per forward pass; 0: the whole batch at once
    group_by_length: bool = False  # samples of a batch have similar lengths, which saves padding
    # Largest share of a batch for all rehearsed domains; none gets more than the new domain.
    rehearsal_share: ShareBelowOne = 0.5
    lr: Positive = 4e-3  # peak, of the LoRA weights
    head_lr: Positive = 4e-3  # peak, of the heads
    warmup: ShareBelowOne = 0.1  # of the steps, before the learning rate falls along a cosine
    weight_decay: Weight = 0.01  # of the LoRA weights
    clip: Positive = 1.0  # largest norm of the gradients
    flip: bool = True  # train on mirrored images, too, in domains that allow it
    probe_steps: Count = 300  # of a head on the frozen base model (head-only accuracy)
    probe_samples: Count = 2000  # at most, evenly taken, for such a head
    # CPU cores, each for a part of a batch; results depend on it; 0 for all.
    threads: Annotated[int, Field(ge=0, le=1024)] = 2
    seed: Seed = 0  # of weights, batches and a random order
    checkpoint_seconds: Weight = 30.0  # between checkpoints within an attempt; 0: at every step
    validations: Whole = 4  # looks at the validation split within an attempt, for MLflow
    validation_samples: Whole = 48  # of each domain in such a look, at most
    validation_share: Share = 0.05  # of the time of an attempt for all of them, about
    lora: LoraSettings = LoraSettings()
    augment: AugmentSettings = AugmentSettings()

    def steps_for(self, new: int, rehearsed: int) -> int:
        """Optimiser steps of an attempt with a number of new and of rehearsed domains."""
        each = self.steps if self.steps_per_new is None else self.steps_per_new
        return self.steps + each * (new - 1) + self.steps_per_held * rehearsed

    def candidates(self, steps: int) -> set[int]:
        """Steps, of 1 to `steps`, of which the best on validation is kept; empty for the last."""
        if self.best_of == 1:
            return set()
        half = steps / 2
        return {round(half + half * n / self.best_of) for n in range(1, self.best_of + 1)}


@dataclass(frozen=True)
class HeadSettings(Section):
    """Heads (VaLoRA §4.2.2) and written answers."""

    objectness_weight: Weight = 1.0  # in the loss of box heads
    box_weight: Weight = 1.0  # of the generalised IoU
    class_weight: Weight = 1.0  # of the class cross-entropy
    # What objectness is: 1 where there is an object, or how well the predicted box fits it.
    objectness: Literal["presence", "iou"] = "presence"
    nms_iou: Share = 0.5  # above it, the less confident of two boxes is suppressed
    most: Count = 32  # boxes per image
    # Of label heads: the last token, the (weighted) mean of the visual tokens, or their means in
    # 4 × 4 parts of the image; auto chooses on validation.
    pooling: Literal["auto", "last", "visual_mean", "attention", "grid"] = "auto"
    soft: Share = 0.5  # weight of the teacher's soft labels in the loss of label heads
    temperature: Positive = 2.0  # of the soft labels and of the logits compared with them
    max_tokens: Count = 64  # of a written answer
    # Of task types (`DomainTask.options_type`), by name.
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ContextSettings(Section):
    """How documents are remembered (task `context`)."""

    # Trained keys and values, trained input embeddings, or LoRA alone (closed book). With a memory,
    # LoRA is added where the memory alone does not keep what is required.
    form: Literal["prefix", "memory_tokens", "adapter"] = "prefix"
    tokens: Count = 64  # of a memory
    # In which an encoder of memory tokens learns to reconstruct documents, and then from questions.
    encoder_steps: Whole = 0
    # Folder of memories to begin with, by name of the domain; null for the documents' beginnings,
    # or for what the encoder makes.
    start: HomePath | None = None
    logits: Weight = 1.0  # of the divergence from the base model with the document in its prompt
    hidden: Weight = 1.0  # of the distance from its hidden states
    answers: Weight = 0.0  # of the cross entropy of the answers

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.encoder_steps and self.form != "memory_tokens":
            raise SettingsError(
                f"context.encoder_steps={self.encoder_steps} trains an encoder of memory tokens, "
                f"but context.form={self.form}: set context.form=memory_tokens, or encoder_steps=0"
            )
        return self


@dataclass(frozen=True)
class FusionSettings(Section):
    """How domains are packed into adapters (VaLoRA §4.2.1)."""

    strategy: str = "rehearsal"  # see `valora_train.fusion.strategies.registry`
    # As listed, drawn with `train.seed`, or the first that the base model fails by most.
    order: Literal["given", "random", "probe"] = "given"
    # Added to requirements on the validation split, up to half of what lies between the requirement
    # and the metric's largest value.
    margin: Share = 0.02
    head_only: bool = True  # a domain that keeps its requirement without LoRA takes no adapter
    # Share of what each domain reaches in an adapter of its own that it must keep, instead of its
    # contract; those adapters are trained first, side by side.
    of_dedicated: ShareAboveZero | None = None
    processes: Whole = 0  # that train those adapters; 0 for as many as there are cores
    # A domain that misses its requirement even alone stops the fusion, or is flagged.
    unreachable: Literal["fail", "keep"] = "fail"
    # Bundle to extend: its unchanged domains keep adapters and heads.
    parent: HomePath | None = None


@dataclass(frozen=True)
class PushSettings(Section):
    """Where `command=push` uploads a bundle."""

    repo: str | None = None  # of a Hugging Face hub, ``owner/name``; made if there is none
    bundle: HomePath | None = None  # folder; null for that of the task
    private: bool = True  # a new repository
    revision: str | None = None  # branch; null for the main one


@dataclass(frozen=True)
class PathSettings(Section):
    """Folders of outputs, relative to the working directory."""

    work: HomePath = ".valora"  # outputs of stages
    bundles: HomePath = "bundles"
    tracking: str | None = None  # MLflow's URI; null: SQLite in the working directory


@dataclass(frozen=True)
class Settings(Section):
    """All settings of `valora-train`."""

    command: Literal["teach", "distill", "fuse", "export", "push"] = "export"  # the last stage
    processes: Whole = 1  # that prepare domains side by side; 0: see `preparing_processes`
    task: TaskSettings = TaskSettings()
    shelf: HomePath | None = None  # folder that Ultralytics trains into (see `_with_shelf`)
    domains: dict[str, DomainSettings] = field(default_factory=dict)
    teacher: TeacherSettings = TeacherSettings()  # of domains without their own
    model: ModelSettings = ModelSettings()
    base_license: Text | None = None  # of the base model, for the bundle; null: what its card says
    fusion: FusionSettings = FusionSettings()
    heads: HeadSettings = HeadSettings()
    context: ContextSettings = ContextSettings()  # `heads.options.context` of task `context`
    train: TrainSettings = TrainSettings()
    push: PushSettings = PushSettings()
    paths: PathSettings = PathSettings()

    def chosen(self) -> list[DomainSettings]:
        """The domains to fuse, in order, of which there must be one."""
        names = self.task.only or list(self.domains)
        if unknown := [n for n in (*names, *self.task.stricter) if n not in self.domains]:
            raise SettingsError(
                f"unknown domain {unknown[0]!r} of task {self.task.name}: choose from "
                f"{', '.join(self.domains)}"
            )
        if not names:
            raise SettingsError(
                f"task {self.task.name} has no domain left to fuse: list at least one"
            )
        return [self.domains[name].resolved(self.task) for name in names]

    @model_validator(mode="after")
    def _domains_fit(self) -> Self:
        chosen = self.chosen() if self.domains else []
        for domain in chosen:
            if domain.required is None and domain.of_teacher is None:
                raise SettingsError(
                    f"domain {domain.name} has no contract: set domains.{domain.name}.required to "
                    "the accuracy that it must keep"
                )
            domain.domain()  # raises for invalid values
            _ = domain.source.format  # raises for an unknown kind
            if self.train.lora.decode_only:
                self._check_decode_only(domain)
        share = self.task.of_teacher
        if chosen and share is not None and all(one.teacher == LABELS for one in chosen):
            raise SettingsError(
                f"task.of_teacher={share} asks for nothing, because every domain of task "
                f"{self.task.name} learns from labels, without a teacher: set "
                "domains.NAME.required, or task.of_teacher=null"
            )
        return self

    def _check_decode_only(self, domain: DomainSettings) -> None:
        """Check that what adapters at decoding only change is all that answers are read from."""
        spec = domain.domain().task.spec
        choice = spec.choice and bool(domain.labels)
        if spec.detects or (choice and self.heads.pooling != "last"):
            raise SettingsError(
                f"domain {domain.name} ({domain.task}) is answered by a head that reads the whole "
                "prompt, where an adapter at decoding only changes nothing: set "
                f"train.lora.decode_only=false{' or heads.pooling=last' if choice else ''}"
            )


def as_dict(settings: Any) -> dict[str, Any]:
    """Settings as JSON values, without passwords: bundles and runs hold them."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    if uri := values.get("paths", {}).get("tracking"):
        values["paths"]["tracking"] = without_passwords(uri)
    return values


def _paths(values: dict[str, Any]) -> Iterator[str]:
    """The names of settings and sections, with those of the sections around them."""
    for name, value in values.items():
        yield name
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _paths(value))


@cache
def _reader() -> TypeAdapter[Settings]:
    return TypeAdapter(Settings)  # which takes a tenth of a second


def from_config(config: DictConfig) -> Settings:
    """Turn Hydra's configuration into settings; a `ValoraError` names what cannot be."""
    values: Any = OmegaConf.to_container(config, resolve=True)
    if values.get("shelf"):
        values["domains"] = _with_shelf(values)
    try:
        # Strictly, dataclasses can be made of JSON only.
        settings = _reader().validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        refuse_removed(f"{'.'.join(map(str, first['loc']))}={first['input']}")
        known = {name for part in Section.__subclasses__() for name in part.__annotations__}
        if len(first["loc"]) == 1:  # such as seed instead of train.seed
            known = {*_paths(asdict(Settings())), "experiment"}
        raise SettingsError(explain(error, known)) from error
    refuse_removed(f"fusion.strategy={settings.fusion.strategy}")
    settings.chosen()  # raises if there is none
    return settings


def _with_shelf(values: dict[str, Any]) -> Any:
    """Domains of a shelf, changed and completed by settings; each keeps a share of its teacher."""
    teacher = values.get("teacher") or {}
    taken = {key: teacher[key] for key in ("min_confidence", "threshold") if key in teacher}
    found = {
        name: {
            "name": name,
            "task": str(model.task),
            "labels": list(model.labels),
            "prompt": f"{_SHELF_PROMPTS[model.task]} {name.replace('_', ' ')}",
            "required": None,
            "of_teacher": (values.get("task") or {}).get("of_teacher") or SHELF_SHARE,
            "teacher": str(model.weights),
            "taught_by": {"kind": "yolo", **taken},
            "source": {
                "kind": model.kind,
                "path": str(model.data),
                "fractions": {"train": 0.3, "unlabelled": 0.4, "val": 0.15, "test": 0.15},
            },
        }
        for name, model in read_shelf(expanded(str(values["shelf"]))).models.items()
    }
    return OmegaConf.to_container(OmegaConf.merge(found, values.get("domains") or {}))
