"""Every setting of the factory, typed; Hydra's configuration becomes these dataclasses once.

The yaml files in `conf/` hold the values, these classes hold the names, types and meaning. What is
not here is refused.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from valora_data.schema import Domain, Task
from valora_train.errors import SettingsError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class SourceSettings:
    """Where a domain's samples come from.

    Attributes:
        kind: `scenes` (drawn here), or what people have: `coco`, `yolo`, `imagefolder`,
            `videofolder`, `llava`, `vqa`, `refcoco`, `hub`, `shards` (see
            `valora_data.sources.registry`).
        path: File or folder, or a name on the hub.
        images: Folder of the images, where the file names them.
        annotations: File of the annotations, for `vqa`.
        columns: A column's name for a field, where it differs.
        frames: Frames to take of each video.
        counts: Images to draw for each split, for `scenes`.
        fractions: Share of each split where a labelled set comes unsplit.
        seed: Seed of the drawing or splitting.
    """

    kind: str = "scenes"
    path: str | None = None
    images: str | None = None
    annotations: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    frames: int = 8
    counts: dict[str, int] = field(default_factory=dict)
    fractions: dict[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class TeacherSettings:
    """How small models are trained and asked (stages `teach` and `distill`).

    Attributes:
        kind: Key of `valora_teachers.registry`.
        min_confidence: Boxes below it are not even stored.
        threshold: Boxes, and answers of classifiers, that are less sure do not teach; null for the
            best F1 on validation for boxes, and for all answers.
        labelled: Whether the LMM also learns from the labelled training split.
        options: Settings of the kind's training and loading.
    """

    kind: str = "yolo"
    min_confidence: float = 0.05
    threshold: float | None = None
    labelled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DomainSettings:
    """A domain of a task (see `valora_data.schema.Domain`).

    Attributes:
        name: Identifier.
        task: Its task type; null for that of the task.
        labels: Label set in the order of class indices; empty where answers are language.
        prompt: What the LMM is asked, without the image; ``{}`` stands for a sample's own words.
        required: Accuracy to keep, in (0, 1], of CIDEr in (0, 10].
        relative: Whether `required` is a share of the teacher's accuracy.
        teacher: `train` (train a small model first), a trained one (path, name on the hub, or
            ``package.module:function``), or `labels` (labels stand in for a teacher).
        taught_by: Teacher of this domain alone; null for that of the task.
        mirror: Whether a mirrored image has the mirrored answer, so that `train.flip` may use it.
        source: Where the samples come from.
    """

    name: str = ""
    task: Task | None = None
    labels: list[str] = field(default_factory=list)
    prompt: str = ""
    required: float = 0.8
    relative: bool = False
    teacher: str = "train"
    taught_by: TeacherSettings | None = None
    mirror: bool = True
    source: SourceSettings = field(default_factory=SourceSettings)

    def domain(self) -> Domain:
        """The checked domain."""
        assert self.task is not None, "`Settings.chosen` fills it in"
        return Domain(
            self.name, self.task, tuple(self.labels), self.prompt, self.required, self.relative
        )

    @property
    def video(self) -> bool:
        """Whether its samples are videos."""
        return self.task is Task.VIDEO or self.source.kind == "videofolder"


@dataclass(frozen=True)
class TaskSettings:
    """The task whose domains are fused.

    Attributes:
        name: Name of the task and of its bundle.
        type: Task type (`valora_data.schema.Task`) of domains that name none.
        only: Fuse only these of the listed domains, in this order; empty for all.
    """

    name: str = ""
    type: Task = Task.DETECTION
    only: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ModelSettings:
    """The large multimodal model.

    Attributes:
        id: `tiny` (shipped), a local folder, or a name on the hub.
        device: In torch's terms, such as `cpu` or `cuda`.
        dtype: Of the frozen weights.
        batch_size: Images per forward pass without gradients.
        coordinates: How it writes boxes: on a grid of 0 to 1000, or in the pixels that it sees.
        coordinate_step: What the numbers of boxes are multiples of.
        attention: Attention backend in transformers' terms; `auto` for its own choice.
        gradient_checkpointing: Whether layers are computed again for their gradients, which saves
            memory.
        keep_features: Whether encoded images are kept while the vision side is frozen, which
            saves time.
        shard: Whether several processes part the language model's layers among them (FSDP2)
            instead of holding a copy each.
    """

    id: str = "tiny"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    batch_size: int = 64
    coordinates: Literal["grid1000", "pixels"] = "grid1000"
    coordinate_step: int = 10
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    keep_features: bool = True
    shard: bool = False


@dataclass(frozen=True)
class LoraSettings:
    """Shape of the adapters, in PEFT's terms.

    Attributes:
        rank: Rank of every target; a power of two from 4 to 256.
        alpha: Numerator of the scaling alpha / rank.
        targets: Projections of the language model.
        vision_tower: Whether the attention of the vision tower gets LoRA too.
        projector: Whether the projector's (or merger's) linears get LoRA too.
        rslora: Scale by alpha / √rank.
    """

    rank: int = 8
    alpha: int = 16
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    vision_tower: bool = False
    projector: bool = False
    rslora: bool = False


@dataclass(frozen=True)
class TrainSettings:
    """How an attempt is trained.

    Attributes:
        steps: Optimiser steps for a domain in a new adapter.
        steps_per_held: Further steps for each domain that is rehearsed.
        batch_size: Samples per step.
        micro_batch: Samples that go through the model at once; 0 for all of a step.
        group_by_length: Whether samples of a step shall be of like length, so that less is padded.
        rehearsal_share: Share of a batch that held domains get together at most; each gets no more
            than the new one.
        lr: Peak learning rate of the LoRA weights.
        head_lr: Peak learning rate of the heads.
        warmup: Share of the steps with rising learning rate; then it falls along a cosine.
        weight_decay: AdamW's, on the LoRA weights.
        clip: Gradient norm limit.
        flip: Whether mirrored images are used too, in domains that allow it.
        probe_steps: Steps of the head on the frozen base (head-only accuracy).
        threads: CPU threads; fixed, because results depend on it. 0 for all cores.
        seed: Seed of everything that is drawn.
    """

    steps: int = 220
    steps_per_held: int = 60
    batch_size: int = 16
    micro_batch: int = 0
    group_by_length: bool = False
    rehearsal_share: float = 0.5
    lr: float = 4e-3
    head_lr: float = 4e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    flip: bool = True
    probe_steps: int = 300
    threads: int = 2
    seed: int = 0
    lora: LoraSettings = field(default_factory=LoraSettings)


@dataclass(frozen=True)
class HeadSettings:
    """Heads (VaLoRA §4.2.2) and written answers.

    Attributes:
        pooling: What linear heads look at: `last` (token), `visual_mean`, `attention` (weighted
            visual tokens), `grid` (their means at 4 × 4 places of the image), or `auto`, which
            chooses on validation.
        soft: Share of the teacher's soft labels in the loss of linear heads.
        temperature: That soft labels and logits are divided by before they are compared.
        max_tokens: Longest written answer.
        objectness_weight: Of the detection head's loss, beside the box losses.
        box_weight: Of the generalised-IoU loss.
        class_weight: Of the class cross entropy.
        nms_iou: Overlap above which the less sure of two boxes goes.
        most: Boxes per image at most.
    """

    objectness_weight: float = 1.0
    box_weight: float = 1.0
    class_weight: float = 1.0
    nms_iou: float = 0.5
    most: int = 32
    pooling: Literal["auto", "last", "visual_mean", "attention", "grid"] = "auto"
    soft: float = 0.5
    temperature: float = 2.0
    max_tokens: int = 64


@dataclass(frozen=True)
class FusionSettings:
    """How domains are packed into adapters (VaLoRA §4.2.1).

    Attributes:
        strategy: Name of the strategy: `paper`, `first_fit`, `rehearsal`, or one that another
            package registers (see `valora_train.fusion.strategies.registry`).
        order: Order of the domains: `given` (as they are listed), `random` (drawn with
            `train.seed`) or `probe` (first those that the frozen base model fails by most).
        margin: Added to every requirement when an attempt is judged on the validation split.
        unreachable: What happens to a domain that misses its requirement even alone: `fail` stops
            the fusion, `keep` gives it a flagged adapter of its own.
        parent: Folder of a bundle to extend: its unchanged domains keep their adapters and heads.
            Null to fuse all domains.
    """

    strategy: str = "rehearsal"
    order: Literal["given", "random", "probe"] = "given"
    margin: float = 0.02
    unreachable: Literal["fail", "keep"] = "fail"
    parent: str | None = None


@dataclass(frozen=True)
class PathSettings:
    """Where things go, relative to the working directory.

    Attributes:
        work: Outputs of stages.
        bundles: Exported bundles.
        tracking: MLflow tracking URI; null for MLflow's default, SQLite in the working directory.
    """

    work: str = ".valora"
    bundles: str = "bundles"
    tracking: str | None = None


@dataclass(frozen=True)
class Settings:
    """Everything that `valora-train` needs to know.

    Attributes:
        command: Run the stages up to this one: `teach`, `distill`, `fuse` or `export`.
    """

    command: Literal["teach", "distill", "fuse", "export"] = "export"
    task: TaskSettings = field(default_factory=TaskSettings)
    domains: dict[str, DomainSettings] = field(default_factory=dict)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    fusion: FusionSettings = field(default_factory=FusionSettings)
    heads: HeadSettings = field(default_factory=HeadSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    paths: PathSettings = field(default_factory=PathSettings)

    def chosen(self) -> list[DomainSettings]:
        """The domains to fuse, in their order.

        Raises:
            SettingsError: If one that is asked for does not exist, or none is left.
        """
        for name in self.task.only:
            if name not in self.domains:
                known = ", ".join(self.domains)
                raise SettingsError(
                    f"unknown domain {name!r} of task {self.task.name}: choose from {known}"
                )
        chosen = [
            replace(domain, task=domain.task or self.task.type)
            for domain in (self.domains[name] for name in self.task.only or self.domains)
        ]
        if not chosen:
            raise SettingsError(
                f"task {self.task.name} has no domain left to fuse: list at least one"
            )
        return chosen


_POSITIVE = (
    "model.batch_size", "train.steps", "train.batch_size", "train.lr", "train.head_lr",
    "train.lora.rank", "train.lora.alpha", "heads.most", "heads.temperature", "heads.max_tokens",
)  # fmt: skip


def from_config(config: DictConfig) -> Settings:
    """Turn Hydra's configuration into settings.

    Raises:
        SettingsError: For a key that does not exist, a value of the wrong type or out of range.
    """
    from omegaconf import OmegaConf
    from pydantic import TypeAdapter, ValidationError

    try:
        settings = TypeAdapter(Settings).validate_python(
            OmegaConf.to_container(config, resolve=True), extra="forbid"
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(
            f"bad setting {where}={first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from error
    for key in _POSITIVE:
        if (value := _look_up(settings, key)) <= 0:
            raise SettingsError(f"{key} must be greater than 0, got {value}")
    if not 0.0 <= settings.train.rehearsal_share < 1.0:
        raise SettingsError(
            f"train.rehearsal_share must lie in [0, 1), got {settings.train.rehearsal_share}"
        )
    if not 0.0 <= settings.heads.soft <= 1.0:
        raise SettingsError(f"heads.soft must lie in [0, 1], got {settings.heads.soft}")
    for domain in settings.chosen():
        domain.domain()  # checks itself
    return settings


def _look_up(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def as_dict(settings: Any) -> dict[str, Any]:
    """A dataclass of settings as plain, ordered values that JSON can hold."""
    return asdict(settings)
