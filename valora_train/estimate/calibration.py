"""Measures on this machine what the parts of a run cost, on a few samples of every domain.

The very functions of the stages are timed, on the real base model, device and batch shapes; what
they write goes to a temporary folder. Only data that is not drawn here is read for good, as its
number of samples is not known otherwise: the run then skips that stage.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import math
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from valora_data import shards
from valora_data.contract.base_model import base_folder
from valora_data.hashing import hash_path
from valora_data.schema import Answer, Split
from valora_teachers.base import TeacherError
from valora_teachers.registry import KINDS, train_teacher
from valora_train.fusion.history import History
from valora_train.fusion.loading import TAUGHT, load_domain, make_deterministic
from valora_train.fusion.packing import make_plan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.trainer import Trainer, head_inputs_bytes
from valora_train.model.lmm import Lmm
from valora_train.processes import preparing_processes, threads_beside
from valora_train.reporting.fusion_report import FusionReport
from valora_train.reporting.progress import stopwatch
from valora_train.reporting.tracking import NoTracker, Tracker
from valora_train.settings import LABELS, FusionSettings
from valora_train.stages import data as data_stages
from valora_train.stages import distill as distill_stages
from valora_train.stages.data import TRUTH
from valora_train.stages.fuse import DomainInputs, fuse_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from valora_data.schema import Sample
    from valora_train.fusion.samples import DomainData
    from valora_train.reporting.progress import Display
    from valora_train.settings import DomainSettings, Settings, TeacherSettings

SAMPLES = 64
"""Samples of a split that are measured: one batch of the frozen base model."""
FEW = 8
"""Samples of a split whose time tells what a stage takes without any."""
ANY = 0.5
"""Required accuracy where only the teacher's counts, which is not known yet."""
STEP_SECONDS = 6.0
"""Seconds after which enough training steps were measured."""
STEPS = (4, 12)
"""Fewest and most training steps that are measured."""


class _EnoughError(Exception):
    """Enough was measured."""


@dataclass(frozen=True)
class Line:
    """What grows with the number of samples.

    Attributes:
        fixed: Value without any sample.
        each: Value of one sample.
    """

    fixed: float = 0.0
    each: float = 0.0

    def at(self, count: float) -> float:
        """Value for a number of samples."""
        return self.fixed + self.each * count

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> Line:
        """The line through two measurements of count and value; neither part is negative."""
        each = max(0.0, (many[1] - few[1]) / max(many[0] - few[0], 1))
        each = min(each, many[1] / max(many[0], 1))
        return cls(max(0.0, many[1] - each * many[0]), each)


@dataclass
class TeacherCosts:
    """What a domain's small model costs.

    Attributes:
        start: Seconds before its first step.
        epochs: Number of its epochs; 0 if nothing is trained.
        epoch: Seconds of an epoch for each sample.
        load: Seconds until it answers.
        answer: Seconds for each sample that it answers.
        size: Bytes of its file.
    """

    start: float = 0.0
    epochs: int = 0
    epoch: float = 0.0
    load: float = 0.0
    answer: float = 0.0
    size: int = 0


@dataclass
class DomainCosts:
    """What a domain costs before the fusion.

    Attributes:
        settings: The domain.
        counts: Number of samples of each split, and of `TAUGHT`.
        folder: Output folder of stage `data` if it is up to date, else None.
        data: Seconds of stage `data`; None if it is up to date.
        read: Whether stage `data` was run for good just now.
        distilled: Output folder of stage `distill` if it is up to date, else None.
        teacher: What the small model costs; None if `distill` is up to date.
        stored: Bytes on disk of one sample.
        decoded: Bytes in memory of one sample's images.
        reading: Seconds to read and decode a sample.
        samples: A few samples by split, and of `TAUGHT`.
    """

    settings: DomainSettings
    counts: dict[str, int] = field(default_factory=dict)
    folder: Path | None = None
    data: float | None = None
    read: bool = False
    distilled: Path | None = None
    teacher: TeacherCosts | None = None
    stored: float = 0.0
    decoded: float = 0.0
    reading: float = 0.0
    samples: dict[str, list[Sample]] = field(default_factory=dict)


@dataclass
class ModelCosts:
    """What a domain costs on the base model.

    Attributes:
        encode: Seconds to encode a sample.
        encoded: Bytes of an encoded sample: features on the device, or pixels on the host.
        on_device: Whether encoded samples are on the device.
        held: Bytes of the hidden states that a head alone reads of a sample.
        pass_: Seconds of a forward pass without gradients for each sample.
        head_step: Seconds of a step of the head alone.
        step: Seconds of a training step of an adapter.
        evaluate: Seconds to evaluate samples.
        sheet: Seconds of a contact sheet.
    """

    encode: float = 0.0
    encoded: float = 0.0
    on_device: bool = True
    held: float = 0.0
    pass_: float = 0.0
    head_step: float = 0.0
    step: float = 0.0
    evaluate: Line = field(default_factory=Line)
    sheet: float = 0.0


@dataclass
class MachineCosts:
    """What the base model costs, whatever the domain.

    Attributes:
        load: Seconds to load the base model.
        hashing: Seconds to hash its weights.
        program: Seconds to start another process that can load it.
        adapter: Bytes of an adapter with its optimiser.
        weights: Bytes of an adapter's weights alone.
        snapshot: Seconds to copy an adapter.
        resting: Bytes on the GPU of the base model.
        training: Most bytes on the GPU in training steps, on top of what rests there.
        head_inputs: Most bytes of what a head alone reads that stay on the GPU.
        passing: Most bytes on the GPU without gradients, on top of what rests there.
        memory: Most bytes of memory of this process so far.
    """

    load: float = 0.0
    hashing: float = 0.0
    program: float = 0.0
    adapter: int = 0
    weights: int = 0
    snapshot: float = 0.0
    resting: int = 0
    head_inputs: float = math.inf
    training: int = 0
    passing: int = 0
    memory: int = 0


@dataclass
class TrackingCosts:
    """What MLflow costs.

    Attributes:
        start: Seconds to make a store and start a run.
        attempt: Seconds to log an attempt.
    """

    start: float = 0.0
    attempt: float = 0.0


@dataclass
class Calibration:
    """Everything that was measured.

    Attributes:
        domains: What each domain costs before the fusion, by name.
        model: What each domain costs on the base model, by name.
        machine: What the base model costs.
        tracking: What MLflow costs.
        memory: Most bytes of memory of this process after each stage was measured, by stage.
        fused: Whether stage `fuse` is up to date.
        began: Seconds from the start of this process to the measurements: imports and checks.
        seconds: What measuring took.
        processes: Processes that will prepare domains side by side.
    """

    domains: dict[str, DomainCosts] = field(default_factory=dict)
    model: dict[str, ModelCosts] = field(default_factory=dict)
    machine: MachineCosts = field(default_factory=MachineCosts)
    tracking: TrackingCosts = field(default_factory=TrackingCosts)
    memory: dict[str, int] = field(default_factory=dict)
    fused: bool = False
    began: float = 0.0
    seconds: float = 0.0
    processes: int = 1


def peak_memory() -> int:
    """Most bytes of memory that this process had so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def calibrate(settings: Settings, display: Display) -> Calibration:
    """Measure what the parts of a run cost.

    Args:
        settings: All settings.
        display: The terminal.

    Raises:
        ValoraError: The run could not begin: its data, teacher or model cannot be used.
    """
    began = time.monotonic()
    found = Calibration(began=_since_start())
    work = Path(settings.paths.work)
    teachers: dict[Any, TeacherCosts] = {}
    with TemporaryDirectory(prefix="valora-estimate-") as scratch:
        folders = {}
        for domain in settings.chosen():
            name = domain.name
            with display.work("estimate", f"samples of {name}"):
                found.domains[name], folders[name] = _measure_data(
                    domain, settings, work, Path(scratch) / name
                )
            found.memory["data"] = peak_memory()
        waiting = sum(costs.distilled is None for costs in found.domains.values())
        found.processes = preparing_processes(settings.processes, settings.model.device, waiting)
        for name, costs in found.domains.items():
            teacher = costs.settings.taught_by or settings.teacher
            if costs.distilled is None and costs.settings.teacher != LABELS:
                with (
                    display.work("estimate", f"the small model of {name}"),
                    _threads(threads_beside(found.processes)),
                ):
                    costs.teacher = _measure_teacher(costs, teacher, teachers, Path(scratch) / name)
            _take_taught(costs, teacher, folders[name])
            found.memory["teach"] = found.memory["distill"] = peak_memory()
        found.fused = _is_fused(settings, found, work)
        # A new store keeps its artifacts below the working directory.
        with display.work("estimate", "MLflow"), contextlib.chdir(scratch):
            _measure_tracking(found.tracking, Path(scratch))
    with display.work("estimate", "steps on the base model"):
        _measure_model(settings, found)
    found.machine.memory = peak_memory()
    found.seconds = time.monotonic() - began
    return found


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Compute on some threads within a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _since_start() -> float:
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))


def _measure_tracking(costs: TrackingCosts, scratch: Path) -> None:
    """Log an attempt into a store of its own."""
    if importlib.util.find_spec("mlflow") is None:  # a run without tracking
        return
    requirements = {"domain": Requirement(0.5)}
    required = {name: one.required for name, one in requirements.items()}
    plan = make_plan(FusionSettings(), requirements, {"domain": {"val": 0.0}}, 0, None)
    attempt = plan.next()
    assert attempt is not None, "its domain has no adapter yet"
    decision = plan.tell({"domain": 1.0})
    with stopwatch() as took:
        tracker = Tracker(f"sqlite:///{scratch}/mlflow.db", "estimate", "estimate")
        tracker.start("estimate", {"command": "estimate"}, "", None)
    costs.start = took()
    with stopwatch() as took:
        run = tracker.start_attempt(attempt, required, [])
        run.finish(decision, 1.0, {"domain": Image.new("RGB", (800, 600))}, {}, {})
        told = History(requirements, {"domain": 0.0}).told(plan.decisions, plan.packing)
        tracker.log_summary(plan.decisions, [1.0], required, told)
    costs.attempt = took()
    tracker.finish("FINISHED")


# --- data and teachers ----------------------------------------------------------------------------


def _measure_data(
    domain: DomainSettings, settings: Settings, work: Path, scratch: Path
) -> tuple[DomainCosts, Path]:
    """Measure stage `data`, or read what it has left; return the folder with samples, too."""
    costs = DomainCosts(domain)
    stage = data_stages.data_stage(domain, work)
    folder = stage.folder(work)
    if folder.is_dir():
        teacher = domain.taught_by or settings.teacher
        costs.folder = folder
        costs.distilled = _distilled(domain, teacher, folder, work)
    elif domain.source.format.drawn:
        few, many = scratch / "few", scratch / "many"
        times, sizes = [], []
        for place, most in ((few, FEW), (many, SAMPLES)):
            counts = {split: min(n, most) for split, n in domain.source.counts.items()}
            small = replace(domain, source=replace(domain.source, counts=counts))
            with stopwatch() as took:
                data_stages.build_data(small, place)
                hash_path(place)
            times.append((sum(counts.values()), took()))
            sizes.append((sum(counts.values()), float(_size(place))))
        costs.counts = {str(split): n for split, n in domain.source.counts.items()}
        costs.data = Line.through(*times).at(sum(costs.counts.values()))
        costs.stored = Line.through(*sizes).each
        folder = many
    else:
        with stopwatch() as took:
            folder, _ = stage.run(work, lambda place: data_stages.build_data(domain, place))
        costs.data, costs.read = took(), True
    if not costs.counts:
        costs.counts = {str(split): len(shards.open_shard(folder / split)) for split in Split}
        costs.stored = _size(folder) / sum(costs.counts.values())
    with stopwatch() as took:
        for split in Split:
            costs.samples[split] = _some(folder / split, SAMPLES)
    costs.reading = took() / sum(map(len, costs.samples.values()))
    images = [image for one in costs.samples[Split.VAL] for image in one.images]
    total = sum(image.width * image.height * 3 for image in images)
    costs.decoded = total / len(costs.samples[Split.VAL])
    return costs, folder


def _distilled(
    domain: DomainSettings, teacher: TeacherSettings, data: Path, work: Path
) -> Path | None:
    """Output folder of stage `distill` if it is up to date."""
    stage = distill_stages.teach_stage(domain, teacher, data, work)
    taught = None
    if stage is not None:
        taught = stage.folder(work)
        if not taught.is_dir():
            return None
    folder = distill_stages.distill_stage(domain, teacher, data, taught, work).folder(work)
    return folder if folder.is_dir() else None


def _is_fused(settings: Settings, found: Calibration, work: Path) -> bool:
    """Whether stage `fuse` is up to date."""
    inputs = [
        DomainInputs(one.settings, one.folder, one.distilled)
        for one in found.domains.values()
        if one.folder is not None and one.distilled is not None
    ]
    return len(inputs) == len(found.domains) and fuse_stage(settings, inputs).folder(work).is_dir()


def _some(folder: Path, most: int) -> list[Sample]:
    """At most some samples of a shard, evenly taken."""
    shard = shards.open_shard(folder)
    count = min(most, len(shard))
    return [shard[row * len(shard) // count] for row in range(count)]


def _size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(item.stat().st_size for item in folder.rglob("*") if item.is_file())


def _take_taught(costs: DomainCosts, teacher: TeacherSettings, folder: Path) -> None:
    """Number of samples that the base model learns from, and some of them.

    Where the small model has not answered yet, true answers stand in for its own.
    """
    if costs.distilled is not None:
        shard = costs.distilled / TAUGHT
        costs.counts[TAUGHT] = len(shards.open_shard(shard))
        costs.samples[TAUGHT] = _some(shard, SAMPLES)
        return
    answered = (folder / TRUTH).is_dir()
    train, unlabelled = costs.counts[Split.TRAIN], costs.counts[Split.UNLABELLED]
    if costs.settings.teacher == LABELS:
        costs.counts[TAUGHT] = train + (unlabelled if answered else 0)
    else:
        costs.counts[TAUGHT] = unlabelled + (train if teacher.labelled else 0)
    known = _some(folder / TRUTH, SAMPLES) if answered else []
    known += [one for one in costs.samples[Split.TRAIN] if len(known) < SAMPLES]
    most = min(SAMPLES, costs.counts[TAUGHT])
    assert costs.settings.task is not None, "`Settings.chosen` fills it in"
    boxes = costs.settings.task.spec.detects  # an image without an object is an answer, too
    costs.samples[TAUGHT] = [one for one in known if boxes or one.answer != Answer()][:most]


def _measure_teacher(
    costs: DomainCosts, teacher: TeacherSettings, known: dict[Any, TeacherCosts], scratch: Path
) -> TeacherCosts:
    """Measure training and answering of a small model, once for all domains that use it alike."""
    domain = costs.settings
    trains = domain.teacher == distill_stages.TRAIN
    options = repr(sorted(teacher.options.items()))
    key = (teacher.kind, options, domain.task, None if trains else domain.teacher)
    if key not in known:
        weights: str | Path = domain.teacher
        found = TeacherCosts()
        if trains:
            weights = _train_a_little(costs, teacher, found, scratch)
        with stopwatch() as took:
            model = distill_stages.load_teacher(weights, domain, teacher)
            model.answer(costs.samples[Split.VAL][:FEW])
        found.load = took()
        with stopwatch() as took:
            model.answer(costs.samples[Split.VAL])
        found.answer = took() / len(costs.samples[Split.VAL])
        known[key] = found
    return known[key]


def _train_a_little(
    costs: DomainCosts, teacher: TeacherSettings, found: TeacherCosts, scratch: Path
) -> Path:
    """Train a small model for two epochs on a few samples; return its file."""
    domain, samples = costs.settings, costs.samples[Split.TRAIN]
    assert domain.task is not None, "`Settings.chosen` fills it in"
    began = time.monotonic()
    ends: list[float] = []

    def first(_: int, epochs: int, *__: Any) -> None:
        found.epochs = epochs
        raise _EnoughError

    def later(*_: Any) -> None:
        ends.append(time.monotonic())

    def train(folder: Path, options: dict[str, Any], on_epoch: Callable[..., None]) -> None:
        train_teacher(teacher.kind, samples, domain.labels, folder, options, on_epoch, domain.task)  # type: ignore[arg-type]

    with contextlib.suppress(_EnoughError):
        train(scratch / "first", teacher.options, first)
    kind = KINDS[teacher.kind]()
    options = dict(teacher.options)
    if "epochs" in kind.options():
        options["epochs"] = 2
    began = time.monotonic()
    train(scratch / "teacher", options, later)
    if len(ends) > 1:
        found.epoch = statistics.median(b - a for a, b in itertools.pairwise(ends))
        found.start = max(0.0, ends[0] - began - found.epoch)
        found.epoch /= len(samples)
    else:  # trained as a whole
        found.epochs, found.epoch = 1, (time.monotonic() - began) / len(samples)
    file = scratch / "teacher" / str(kind.artefact)
    if not file.exists():
        raise TeacherError(f"a teacher of kind {teacher.kind} left no {kind.artefact}: correct it")
    found.size = _size(file) if file.is_dir() else file.stat().st_size
    return file


# --- the base model -------------------------------------------------------------------------------


def _measure_model(settings: Settings, found: Calibration) -> None:
    """Measure the base model on every domain; those with prompts of one shape are measured once."""
    machine = found.machine
    make_deterministic(settings.train.threads)
    machine.hashing = _hashing(settings.model.id)
    machine.program = _program()
    with stopwatch() as took:
        lmm = Lmm(settings.model, settings.train.lora)
    machine.load = took()
    machine.resting = _allocated(lmm)
    machine.head_inputs = head_inputs_bytes(lmm.device)
    alike: dict[Any, ModelCosts] = {}
    for name, costs in found.domains.items():
        with stopwatch() as took:
            data = load_domain(
                _short_answers(settings, costs),
                costs.settings,
                costs.settings.domain().required or ANY,
                lmm,
                costs.samples.__getitem__,
            )
        _sync(lmm)
        encoded = [*data.inputs, *(one for part in data.splits.values() for one in part.inputs)]
        encode = took() / len(encoded)
        length = statistics.mean(one.length for one in encoded)
        # Lengths within a tenth of each other cost the same.
        shape = (costs.settings.task, round(10 * torch.tensor(length).log2().item() / 1.4))
        if shape not in alike:
            alike[shape] = _measure_domain(name, data, settings, lmm, machine)
        kept = encoded[0].features is not None
        model = replace(alike[shape], encode=encode, on_device=kept)
        model.encoded = sum(one.bytes for one in encoded) / len(encoded)
        found.model[name] = model
        del data, encoded


def _short_answers(settings: Settings, costs: DomainCosts) -> Settings:
    """Settings in which an untrained model writes answers no longer than the true ones."""
    answers = [one.answer for one in costs.samples[TAUGHT]]
    words = max(
        (len(text.split()) for one in answers for text in (*one.answers, *one.captions)), default=0
    )
    if not words:
        return settings
    most = min(settings.heads.max_tokens, 2 * words + 4)
    return replace(settings, heads=replace(settings.heads, max_tokens=most))


def _measure_domain(
    name: str, data: DomainData, settings: Settings, lmm: Lmm, machine: MachineCosts
) -> ModelCosts:
    costs = ModelCosts()
    train = replace(
        settings.train, validations=0, best_of=1, probe_steps=STEPS[1],
        steps=max(settings.train.steps, 99),
    )  # fmt: skip
    trainer = Trainer(lmm, {name: data}, train)
    before = _start_of_peak(lmm)
    began = time.monotonic()
    times: list[float] = []
    head = trainer.train_head_only(name, 0, lambda *_: times.append(time.monotonic()))
    if head is not None:
        costs.head_step = _median_step(times)
        costs.pass_ = max(0.0, times[0] - began - costs.head_step) / len(data.inputs)
        item = torch.empty((), dtype=lmm.dtype).element_size()
        seen = statistics.mean(int(one.visual.sum()) for one in data.inputs)
        costs.held = (seen + 1) * lmm.width * item
    # What heads read is counted for all samples later.
    held = 2 * costs.held * len(data.inputs)
    machine.passing = max(machine.passing, _peak(lmm) - before - int(held))
    before = _start_of_peak(lmm)
    trainer.open("adapter", 0)
    with stopwatch() as took:
        costs.step = _time_steps(trainer, name)
        _sync(lmm)
    machine.training = max(machine.training, _peak(lmm) - before)
    with stopwatch() as took:
        snapshot = trainer.snapshot("adapter")
    machine.snapshot = took()
    tensors = {key: t.nelement() * t.element_size() for key, t in snapshot.items()}
    machine.adapter = sum(tensors.values())
    machine.weights = sum(size for key, size in tensors.items() if key.startswith("lora/"))
    before = _start_of_peak(lmm)
    points = []
    count = len(data.splits[Split.VAL].samples)
    for most in (min(FEW, count), min(FEW, count), count):  # the first one warms up
        with stopwatch() as took:
            shown = trainer.evaluate("adapter", name, Split.VAL, most=most)
        points.append((most, took()))
    costs.evaluate = Line.through(points[1], points[2])
    machine.passing = max(machine.passing, _peak(lmm) - before)
    report = FusionReport(NoTracker(), None, trainer, {}, {})  # type: ignore[arg-type]
    with stopwatch() as took:
        report.contact_sheet(name, shown, Split.VAL)
    costs.sheet = took()
    trainer.close("adapter")
    return costs


def _time_steps(trainer: Trainer, name: str) -> float:
    """Median seconds of the training steps of an adapter."""
    times: list[float] = [time.monotonic()]

    def on_step(*_: Any) -> None:
        times.append(time.monotonic())
        made = len(times) - 1
        if made >= STEPS[1] or (made >= STEPS[0] and times[-1] - times[0] > STEP_SECONDS):
            raise _EnoughError

    with contextlib.suppress(_EnoughError):
        trainer.train("adapter", [name], held=(), rehearse=False, seed=0, on_step=on_step)
    return _median_step(times[1:])


def _median_step(times: Sequence[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times))


def _hashing(base: str) -> float:
    """Seconds to hash the weights of a base model, from one of their files."""
    folder = Path(base_folder(base))
    files = sorted(folder.glob("model*.safetensors"))
    if not files:  # a name on the hub whose weights are not here yet
        return 0.0
    smallest = min(files, key=lambda file: file.stat().st_size)
    with stopwatch() as took:
        hash_path(smallest)
    total = sum(file.stat().st_size for file in files)
    return took() * total / max(smallest.stat().st_size, 1)


def _program() -> float:
    """Seconds to start another Python that can load the base model."""
    code = (
        "import valora_train.stages.gate, peft\nfrom transformers import AutoProcessor, "
        "AutoModelForImageTextToText"
    )
    with stopwatch() as took:
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    return took()


def _sync(lmm: Lmm) -> None:
    if lmm.device.type == "cuda":
        torch.cuda.synchronize(lmm.device)


def _allocated(lmm: Lmm) -> int:
    return torch.cuda.memory_allocated(lmm.device) if lmm.device.type == "cuda" else 0


def _start_of_peak(lmm: Lmm) -> int:
    """Forget the largest use of the GPU so far; return what is used now."""
    gc.collect()
    if lmm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(lmm.device)
    return _allocated(lmm)


def _peak(lmm: Lmm) -> int:
    return torch.cuda.max_memory_allocated(lmm.device) if lmm.device.type == "cuda" else 0
