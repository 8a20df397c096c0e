"""All settings of the factory, as typed dataclasses.

The YAML files in `conf/` hold the values; these classes hold names, types and meanings. A key that
is not here is rejected.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from valora_data.schema import Domain, Task
from valora_data.sources.base import Source
from valora_data.sources.registry import FORMATS
from valora_train.errors import SettingsError, without_passwords

if TYPE_CHECKING:
    from valora_data.sources.base import SourceFormat

LABELS = "labels"
"""Value of `domains.*.teacher`: the labels are used instead of a teacher."""
SplitName = Literal["train", "unlabelled", "val", "test"]
Count = Annotated[int, Field(gt=0)]
Whole = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Device = Annotated[
    str, BeforeValidator(lambda given: f"cuda:{given}" if str(given).isdigit() else given)
]


@dataclass(frozen=True)
class SourceSettings:
    """The source of a domain's samples.

    Attributes:
        kind: Format of the data set: `scenes` (drawn here), `coco`, `yolo`, `imagefolder`,
            `videofolder`, `llava`, `vqa`, `refcoco`, `hub`, `shards`; of documents `records` (drawn
            here), `documents`, `texts`, `album`; or one that another package registers (see
            `valora_data.sources.registry`).
        path: Path of the file or folder, or name of the data set on the hub.
        images: Folder of the images, for formats whose files name them.
        annotations: File of the annotations, for `vqa`.
        columns: Names of the columns by field, where they differ from the field's name.
        frames: Number of frames taken of each video.
        counts: Number of images drawn for each split, for `scenes`.
        fractions: Share of each split, for data sets that are not split yet.
        seed: Seed for drawing and splitting.
        max_faulty: Largest share of the images that may be skipped, in whole or in part, because of
            faults; with more, the data is refused.
        leaks: What happens if two given splits share an image: `refuse`, or leave one copy out
            (`keep_test` keeps the copy in the later of train, unlabelled, val, test; `keep_train`
            the other one).
        unlabelled: Folder of images without labels, as the unlabelled split; null if the source
            itself has that split, or it is to be taken from the training part.
        document: Id of the document, for files of several documents.
        entries: Records of a drawn document (`records`), or scenes of a drawn album
            (`drawn_album`).
    """

    kind: str = "scenes"
    path: str | None = None
    images: str | None = None
    annotations: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    frames: Count = 8
    counts: dict[SplitName, Whole] = field(default_factory=dict)
    fractions: dict[SplitName, Share] = field(default_factory=dict)
    seed: Seed = 0
    max_faulty: Share = 0.05
    leaks: Literal["refuse", "keep_test", "keep_train"] = "refuse"
    unlabelled: str | None = None
    document: str | None = None
    entries: Annotated[int, Field(gt=0, le=900)] = 30

    @property
    def format(self) -> SourceFormat:
        """The data-set format that `kind` names.

        Raises:
            DataError: There is no such format; the message lists all.
        """
        return FORMATS[self.kind]()


@dataclass(frozen=True)
class TeacherSettings:
    """How small models are trained and run (stages `teach` and `distill`).

    Attributes:
        kind: Key of `valora_teachers.registry`.
        min_confidence: Boxes with a lower confidence are dropped at once.
        threshold: Confidence from which boxes and answers become training samples; null for the
            threshold with the best F1 on validation (boxes), or for all answers.
        labelled: Whether the LMM is also trained on the labelled training split.
        options: Settings for training and loading this kind of teacher.
    """

    kind: str = "yolo"
    min_confidence: Share = 0.05
    threshold: Share | None = None
    labelled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DomainSettings:
    """A domain of a task (see `valora_data.schema.Domain`).

    Attributes:
        name: Name of the domain: letters, digits and underscores.
        task: Task type of the domain; null for that of the task.
        labels: Labels in the order of class indices; empty where answers are language.
        prompt: Prompt of the LMM, without the image; ``{}`` stands for a sample's own question.
        required: Accuracy that the domain must keep, in (0, 1]; for CIDEr in (0, 10]. Null where
            only its teacher counts.
        of_teacher: Share of its teacher's accuracy that the domain must keep as well, in (0, 1]:
            the larger of both figures counts. Null for `task.of_teacher`.
        relative: Whether `required` is such a share itself: the same as `required: null` and
            `of_teacher`.
        teacher: `train` (train a small model first), a trained model (path, name on the hub, or
            ``package.module:function``), or `labels` (use the labels instead of a teacher).
        taught_by: Teacher settings of this domain; null for those of the task.
        mirror: Whether a mirrored image has the mirrored answer, so that `train.flip` may use it;
            null for the task's habit: yes for images with boxes, a label or a count, no where
            questions or answers are words, and for videos.
        source: Source of the samples.
    """

    name: str = ""
    task: Task | None = None
    labels: list[str] = field(default_factory=list)
    prompt: str = ""
    required: float | None = 0.8
    of_teacher: ShareAboveZero | None = None
    relative: bool = False
    teacher: str = "train"
    taught_by: TeacherSettings | None = None
    mirror: bool | None = None
    source: SourceSettings = field(default_factory=SourceSettings)

    def domain(self) -> Domain:
        """The domain, with its values checked."""
        assert self.task is not None, "`Settings.chosen` fills it in"
        # Until the teacher's accuracy is known.
        required = self.of_teacher if self.required is None else self.required
        return Domain(self.name, self.task, tuple(self.labels), self.prompt, required or 0.0)

    def resolved(self, task: TaskSettings) -> DomainSettings:
        """The domain with its task type and its contract completed by those of the task."""
        required, of_teacher = self.required, self.of_teacher
        if self.relative:
            required, of_teacher = None, self.required
        elif of_teacher is None and self.teacher != LABELS:
            of_teacher = task.of_teacher
        return replace(
            self, task=self.task or task.type, required=required, of_teacher=of_teacher,
            relative=False,
        )  # fmt: skip

    def data(self) -> Source:
        """What its data are read from; `resolved` has filled in the task."""
        assert self.task is not None, "`Settings.chosen` fills it in"
        source = self.source
        return Source(
            kind=source.kind,
            task=self.task,
            labels=tuple(self.labels),
            name=self.name,
            path=source.path,
            images=source.images,
            annotations=source.annotations,
            columns=source.columns,
            frames=source.frames,
            counts={str(split): count for split, count in source.counts.items()},
            seed=source.seed,
            unlabelled=source.unlabelled,
            document=source.document,
            entries=source.entries,
        )

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
        declared = self.task is not None and self.task.spec.video
        return declared or self.source.format.video


@dataclass(frozen=True)
class TaskSettings:
    """The task whose domains are fused.

    Attributes:
        name: Name of the task and of its bundle.
        type: Task type (see `valora_data.schema.Task`) of domains without one.
        of_teacher: Share of its teacher's accuracy that every domain with a teacher must keep
            besides its own `required`, unless it sets a share itself. Null for none.
        only: Names of the domains to fuse, in this order; empty for all.
    """

    name: str = ""
    type: Task = Task.DETECTION
    of_teacher: ShareAboveZero | None = None
    only: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ModelSettings:
    """The large multimodal model.

    Attributes:
        id: `tiny` (shipped with the project), a local folder, or a name on the hub.
        device: Device in torch's terms, e.g. `cpu` or `cuda`; a number is that of a GPU.
        dtype: Data type of the frozen weights.
        precision: Data type that training multiplies matrices in, where the frozen weights are
            float32; `auto` is bfloat16 on CPUs that have instructions for it (AMX, AVX-512 BF16),
            and float32 elsewhere. Accuracy is always measured in `dtype`.
        quantize: `nf4` holds the language model in 4 bits while adapters are trained on it (QLoRA;
            needs bitsandbytes), which saves three quarters of the memory; null keeps its weights.
        batch_size: Number of images per forward pass without gradients.
        coordinates: How the model writes boxes: on a grid of 0 to 1000 (`grid1000`), or in pixels
            of the image that it sees (`pixels`).
        coordinate_step: Written coordinates are rounded to multiples of this number.
        attention: Attention implementation in transformers' terms; `auto` lets transformers choose.
        gradient_checkpointing: Whether activations are recomputed for the backward pass, which
            saves memory.
        keep_features: Whether visual features are cached while the vision tower is frozen, which
            saves time.
        shard: Whether the language model's layers are sharded over several processes (FSDP2)
            instead of copied.
    """

    id: str = "tiny"
    device: Device = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    precision: Literal["auto", "float32", "bfloat16"] = "float32"
    quantize: Literal["nf4"] | None = None
    batch_size: Count = 64
    coordinates: Literal["grid1000", "pixels"] = "grid1000"
    coordinate_step: Count = 10
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    keep_features: bool = True
    shard: bool = False


@dataclass(frozen=True)
class LoraSettings:
    """Shape of the adapters, in PEFT's terms.

    Attributes:
        rank: Rank of every target module; a power of two from 4 to 256.
        alpha: Numerator of the scaling alpha / rank.
        targets: Names of the language model's projections that get LoRA.
        vision_tower: Whether the attention of the vision tower gets LoRA too.
        projector: Whether the linear layers of the projector (or merger) get LoRA too.
        rslora: Whether the scaling is alpha / √rank instead.
        decode_only: Whether adapters act only on the last token of a prompt and on the answer, so
            that a server computes and keeps a prompt once for all adapters (activated LoRA). For
            domains whose answers are written, or read from the last token alone.
    """

    rank: Count = 8
    alpha: Count = 16
    targets: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"])
    vision_tower: bool = False
    projector: bool = False
    rslora: bool = False
    decode_only: bool = False


@dataclass(frozen=True)
class AugmentSettings:
    """Augmented views of the training images, besides mirroring (`train.flip`).

    Crops, rotations and shifts apply to detection, classification and video only: where the answer
    counts objects or is written, they could make it wrong. All frames of a video change alike.

    Attributes:
        views: Augmented views of each training image, encoded once; 0 for none. Every other one
            is mirrored where `train.flip` and the domain allow it.
        color: Largest relative change of brightness, contrast and saturation.
        crop: Largest share of the area that is cut off before the image is enlarged again, in
            [0, 1).
        rotate: Largest angle, in degrees.
        shift: Largest shift, as a share of width and height, in [0, 1).
        blur: Largest standard deviation of a Gaussian blur, in pixels.
        noise: Standard deviation of Gaussian noise, as a share of white.
        jpeg: Largest loss by JPEG, in [0, 1]; 1 is quality 10.
        least_visible: Boxes of which a smaller share is left inside the image are dropped.
        memory_gb: Largest memory for the views of one domain, in GB; there are fewer views if they
            would take more.
    """

    views: int = 0
    color: float = 0.0
    crop: float = 0.0
    rotate: float = 0.0
    shift: float = 0.0
    blur: float = 0.0
    noise: float = 0.0
    jpeg: float = 0.0
    least_visible: float = 0.3
    memory_gb: float = 4.0


@dataclass(frozen=True)
class TrainSettings:
    """How an attempt is trained.

    Attributes:
        steps: Optimiser steps for a domain in a new adapter.
        steps_per_new: Additional steps for each further domain that is new in the same attempt;
            null for as many as `steps`.
        steps_per_held: Additional steps for each domain that is rehearsed.
        best_of: Steps of which the best on validation is kept: the last one, and others evenly
            before it in the second half; 1 keeps the last without a comparison.
        patience: Comparisons without a better step after which training ends; 0 for never.
        batch_size: Samples per optimiser step.
        micro_batch: Samples per forward pass; 0 for the whole batch at once.
        group_by_length: Whether the samples of a batch have similar lengths, which saves padding.
        rehearsal_share: Largest share of a batch for all rehearsed domains together; none of them
            gets a larger share than the new domain.
        lr: Peak learning rate of the LoRA weights.
        head_lr: Peak learning rate of the heads.
        warmup: Share of the steps in which the learning rate rises, before it falls along a cosine.
        weight_decay: Weight decay of AdamW on the LoRA weights.
        clip: Largest norm of the gradients.
        flip: Whether mirrored images are trained on too, in domains that allow it.
        probe_steps: Optimiser steps of a head on the frozen base model (head-only accuracy).
        probe_samples: Largest number of training samples, evenly taken, for such a head.
        threads: Number of CPU cores, each of which computes a part of a batch; fixed because
            results depend on it; 0 for all of them.
        seed: Seed of weights, batches and a random order.
        checkpoint_seconds: Seconds between checkpoints within an attempt; 0 for one at every step.
        validations: Looks at the validation split within an attempt, for its curve in MLflow; they
            change nothing that is trained. 0 for none.
        validation_samples: Largest number of samples of each domain in such a look.
        validation_share: Largest share of an attempt's time for all of them.
        lora: Shape of the adapters.
        augment: Augmented views of the training images.
    """

    steps: Count = 220
    steps_per_new: Whole | None = None
    steps_per_held: Whole = 60
    best_of: Count = 1
    patience: Whole = 0
    batch_size: Count = 16
    micro_batch: Whole = 0
    group_by_length: bool = False
    rehearsal_share: ShareBelowOne = 0.5
    lr: Positive = 4e-3
    head_lr: Positive = 4e-3
    warmup: ShareBelowOne = 0.1
    weight_decay: Weight = 0.01
    clip: Positive = 1.0
    flip: bool = True
    probe_steps: Count = 300
    probe_samples: Count = 2000
    threads: Whole = 2
    seed: Seed = 0
    checkpoint_seconds: Weight = 30.0
    validations: Whole = 4
    validation_samples: Whole = 48
    validation_share: Share = 0.05
    lora: LoraSettings = field(default_factory=LoraSettings)
    augment: AugmentSettings = field(default_factory=AugmentSettings)

    def steps_for(self, new: int, rehearsed: int) -> int:
        """Optimiser steps of an attempt with a number of new and of rehearsed domains."""
        each = self.steps if self.steps_per_new is None else self.steps_per_new
        return self.steps + each * (new - 1) + self.steps_per_held * rehearsed

    def candidates(self, steps: int) -> set[int]:
        """Steps, from 1, of which the best on validation is kept; empty to keep the last.

        Args:
            steps: Optimiser steps of the attempt.
        """
        if self.best_of == 1:
            return set()
        half = steps / 2
        return {round(half + half * n / self.best_of) for n in range(1, self.best_of + 1)}


@dataclass(frozen=True)
class HeadSettings:
    """Heads (VaLoRA §4.2.2) and written answers.

    Attributes:
        pooling: Pooling of label heads: `last` (the last token), `visual_mean` (the mean of the
            visual tokens), `attention` (their weighted mean), `grid` (their means in 4 × 4 parts of
            the image), or `auto`, which chooses on validation.
        soft: Weight of the teacher's soft labels in the loss of label heads, in [0, 1].
        temperature: Temperature of the soft labels and of the logits compared with them.
        max_tokens: Largest number of tokens of a written answer.
        objectness: What the objectness of box heads learns: `presence` (1 where there is an
            object) or `iou` (how well the predicted box fits it, so that confidences put tight
            boxes first).
        objectness_weight: Weight of the objectness loss of box heads.
        box_weight: Weight of the generalised-IoU loss.
        class_weight: Weight of the class cross-entropy.
        nms_iou: IoU above which the less confident of two boxes is suppressed.
        most: Largest number of boxes per image.
        options: Settings that a task type declares itself (`DomainTask.options_type`), by the name
            of the task type.
    """

    objectness_weight: Weight = 1.0
    box_weight: Weight = 1.0
    class_weight: Weight = 1.0
    objectness: Literal["presence", "iou"] = "presence"
    nms_iou: Share = 0.5
    most: Count = 32
    pooling: Literal["auto", "last", "visual_mean", "attention", "grid"] = "auto"
    soft: Share = 0.5
    temperature: Positive = 2.0
    max_tokens: Count = 64
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ContextSettings:
    """How documents are remembered (task `context`).

    Attributes:
        form: `prefix` (trained keys and values), `memory_tokens` (trained input embeddings), or
            `adapter` (LoRA alone, closed book). With a memory, LoRA is added where the memory alone
            does not keep what is required.
        tokens: Tokens of a memory.
        logits: Weight of the divergence from the base model's logits with the document in its
            prompt.
        hidden: Weight of the distance from its hidden states.
        answers: Weight of the cross entropy of the answers.
        encoder_steps: Steps in which an encoder of memory tokens learns to reconstruct all
            documents, and as many in which it learns from questions; 0 for no encoder.
        start: Folder of memories to begin with, by name of the domain; null for the documents'
            beginnings, or for what the encoder makes.
    """

    form: Literal["prefix", "memory_tokens", "adapter"] = "prefix"
    tokens: Count = 64
    encoder_steps: Whole = 0
    start: str | None = None
    logits: Weight = 1.0
    hidden: Weight = 1.0
    answers: Weight = 0.0


@dataclass(frozen=True)
class FusionSettings:
    """How domains are packed into adapters (VaLoRA §4.2.1).

    Attributes:
        strategy: Name of the strategy: `paper`, `first_fit`, `rehearsal`, `joint`, `affinity`, or
            one that another package registers (see `valora_train.fusion.strategies.registry`).
        order: Order of the domains: `given` (as they are listed), `random` (drawn with
            `train.seed`) or `probe` (first those that the frozen base model fails by most).
        margin: Added to every requirement when decisions are made on the validation split, up to
            half of what lies between the requirement and the metric's largest value.
        head_only: Whether a domain that keeps its requirement without LoRA takes no adapter.
        of_dedicated: Share of what each domain reaches in an adapter of its own that it must keep,
            instead of its contract; those adapters are trained first, side by side. Null for the
            contracts.
        processes: Processes that train those adapters side by side, each on one CPU thread; on a
            GPU they share it. 0 for as many as there are cores.
        unreachable: What happens when a domain misses its requirement even alone: `fail` stops the
            fusion, `keep` flags the domain and continues, also a fusion that `fail` has stopped.
        parent: Folder of a bundle to extend: its unchanged domains keep their adapters and heads.
            Null to fuse all domains.
    """

    strategy: str = "rehearsal"
    order: Literal["given", "random", "probe"] = "given"
    margin: Share = 0.02
    head_only: bool = True
    of_dedicated: Annotated[float, Field(gt=0, le=1)] | None = None
    processes: Whole = 0
    unreachable: Literal["fail", "keep"] = "fail"
    parent: str | None = None


@dataclass(frozen=True)
class PushSettings:
    """Where `command=push` uploads a bundle.

    Attributes:
        repo: Repository of a Hugging Face hub, ``owner/name``; made if there is none.
        bundle: Folder of the bundle; null for that of the task.
        private: Whether a new repository is private.
        revision: Branch; null for the main one.
    """

    repo: str | None = None
    bundle: str | None = None
    private: bool = True
    revision: str | None = None


@dataclass(frozen=True)
class PathSettings:
    """Folders of outputs, relative to the working directory.

    Attributes:
        work: Folder for the outputs of stages.
        bundles: Folder for exported bundles.
        tracking: MLflow's tracking URI; null for MLflow's default, SQLite in the working directory.
    """

    work: str = ".valora"
    bundles: str = "bundles"
    tracking: str | None = None


@dataclass(frozen=True)
class Settings:
    """All settings of `valora-train`.

    Attributes:
        command: The last stage to run: `teach`, `distill`, `fuse` or `export`; or `push`, which
            uploads the bundle.
        processes: Domains that are prepared side by side (data, small models, labels), each in a
            process of its own; 0 for as many as there are cores, at most four, and for one domain
            after the other beside a GPU.
        task: The task.
        shelf: Folder that Ultralytics trains into (`runs/`); each of its models becomes a domain
            with that model as teacher, and `domains` may change its settings. Null for none.
        domains: The domains of the task, by name.
        teacher: Teacher settings of domains without their own.
        model: The large multimodal model.
        fusion: How domains are packed.
        heads: Heads and written answers.
        context: How documents are remembered; `heads.options.context` of task `context`.
        train: Training of adapters.
        push: Where `command=push` uploads a bundle.
        paths: Folders of outputs.
    """

    command: Literal["teach", "distill", "fuse", "export", "push"] = "export"
    processes: Whole = 1
    task: TaskSettings = field(default_factory=TaskSettings)
    shelf: str | None = None
    domains: dict[str, DomainSettings] = field(default_factory=dict)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    fusion: FusionSettings = field(default_factory=FusionSettings)
    heads: HeadSettings = field(default_factory=HeadSettings)
    context: ContextSettings = field(default_factory=ContextSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    push: PushSettings = field(default_factory=PushSettings)
    paths: PathSettings = field(default_factory=PathSettings)

    def chosen(self) -> list[DomainSettings]:
        """The domains to fuse, in order.

        Raises:
            SettingsError: If `task.only` names an unknown domain, or there is no domain.
        """
        for name in self.task.only:
            if name not in self.domains:
                known = ", ".join(self.domains)
                raise SettingsError(
                    f"unknown domain {name!r} of task {self.task.name}: choose from {known}"
                )
        chosen = [self.domains[name].resolved(self.task) for name in self.task.only or self.domains]
        if not chosen:
            raise SettingsError(
                f"task {self.task.name} has no domain left to fuse: list at least one"
            )
        return chosen


def as_dict(settings: Any) -> dict[str, Any]:
    """A dataclass of settings as JSON values."""
    return asdict(settings, dict_factory=_plain_dict)


def _plain_dict(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # OmegaConf, which writes the configuration for MLflow, takes no subclass of str.
    values = {key: str(value) if isinstance(value, Task) else value for key, value in items}
    if values.get("tracking"):  # bundles and runs hold it
        values["tracking"] = without_passwords(values["tracking"])
    return values
