"""From measured costs and counted attempts to what a run will take."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from valora_data.schema import Split
from valora_data.wording import plural
from valora_train.estimate.courses import Course, Courses
from valora_train.fusion.loading import TAUGHT
from valora_train.metrics.speed import BATCH, ROUNDS, SECONDS
from valora_train.processes import trial_processes
from valora_train.settings import LABELS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_train.estimate.calibration import Calibration, DomainCosts, ModelCosts
    from valora_train.fusion.decision import Attempt
    from valora_train.settings import Settings

NONE = Course((), 0)
"""The course of a fusion that is up to date."""
ANSWERED_BY_TEACHERS = (Split.UNLABELLED, Split.VAL, Split.TEST)


@dataclass(frozen=True)
class Row:
    """What a stage will take.

    Attributes:
        stage: Name of the stage, or of a part of it.
        seconds: Duration in seconds.
        memory: Most bytes of memory of the process.
        gpu: Most bytes that torch allocates on the GPU; 0 without one.
        disk: Bytes that stay on the disk.
        note: What the figures rest on.
    """

    stage: str
    seconds: float
    memory: float
    gpu: float
    disk: float
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A fusion at best, as expected or at worst.

    Attributes:
        name: `best`, `expected` or `worst`.
        attempts: Number of attempts.
        adapters: Number of adapters at the end.
        seconds: Duration of the whole run, in seconds.
    """

    name: str
    attempts: float
    adapters: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What a run will take.

    Attributes:
        rows: The stages in order, as expected.
        cases: The whole run at best, as expected and at worst.
        attempt: Seconds of an attempt: on a new adapter, and the mean of the expected course; zeros
            if the fusion is up to date.
        measured: Seconds that measuring took.
    """

    rows: tuple[Row, ...]
    cases: tuple[Case, Case, Case]
    attempt: tuple[float, float]
    measured: float

    @property
    def seconds(self) -> float:
        """Duration of the whole run as expected, in seconds."""
        return self.cases[1].seconds

    @property
    def memory(self) -> float:
        """Most bytes of memory of the process."""
        return max(row.memory for row in self.rows)

    @property
    def gpu(self) -> float:
        """Most bytes that torch allocates on the GPU."""
        return max(row.gpu for row in self.rows)

    @property
    def disk(self) -> float:
        """Bytes that stay on the disk."""
        return sum(row.disk for row in self.rows)


def predict(settings: Settings, found: Calibration, courses: Courses) -> Prediction:
    """Return what a run of all stages will take.

    Args:
        settings: All settings.
        found: What the parts of a run cost.
        courses: The attempts that it may make.
    """
    if found.fused:
        courses = Courses(NONE, (NONE,), NONE)
    model = _Costs(settings, found)
    before = [Row("start", found.began, 0, 0, 0, "imports and checks"), *_before_fusion(found)]
    if settings.fusion.of_dedicated is not None and not found.fused:
        before.append(model.dedicated(trial_processes(settings.oracle.processes)))
    alone, after, export = model.heads_alone(), model.measuring(), model.export()
    if found.fused:
        alone, after = (replace(row, seconds=0.0, note="up to date") for row in (alone, after))
    fixed = sum(row.seconds for row in [*before, alone, after, export])

    def case(name: str, some: Sequence[Course]) -> Case:
        return Case(
            name,
            statistics.mean(len(course.attempts) for course in some),
            statistics.mean(course.adapters for course in some),
            fixed + statistics.mean(map(model.attempts, some)),
        )

    cases = (
        case("best", [courses.best]),
        case("expected", courses.expected),
        case("worst", [courses.worst]),
    )
    expected = cases[1]
    attempts = Row(
        "attempts",
        expected.seconds - fixed,
        model.memory,
        model.gpu_of_attempts(expected.adapters),
        found.machine.adapter * (expected.adapters + 1) + found.machine.weights * expected.adapters,
        "up to date",
    )
    first = mean = 0.0
    if not found.fused:
        first = model.attempt(courses.best.attempts[0])
        mean = attempts.seconds / expected.attempts
        attempts = replace(attempts, note=f"{expected.attempts:.1f} of {mean:.1f} s")
    return Prediction(
        (*before, alone, attempts, after, export),
        cases,
        (first, mean),
        found.seconds,
    )


def _before_fusion(found: Calibration) -> list[Row]:
    domains = found.domains.values()
    memory = found.memory
    parts = [_preparation(one) for one in domains]
    beside = found.processes
    # Domains share the processes: each stage takes its share of the time until the last is ready.
    spent = [sum(part) for part in parts]
    share = _side_by_side(spent, beside) / max(sum(spent), 1e-9)
    data, teach, distill = (share * sum(part[stage] for part in parts) for stage in range(3))
    made = [one for one in domains if one.data is not None and not one.read]
    notes = [f"{len(made)} of {len(domains)} domains drawn"] if made else []
    notes += ["read now, and kept"] if any(one.read for one in domains) else []
    notes += [f"{beside} domains side by side"] if beside > 1 else []
    written = sum(one.stored * _count(one, *Split) for one in made)
    note = ", ".join(notes) or "up to date"
    rows = [Row("data", data, beside * memory["data"], 0, written, note)]
    taught = [one for one in domains if one.teacher is not None]
    trained = [one for one in taught if one.teacher is not None and one.teacher.epochs]
    if trained:
        most = max(_count(one, Split.TRAIN) * one.decoded for one in trained)
        size = sum(one.teacher.size for one in taught if one.teacher is not None)
        used = beside * (memory["teach"] + 2 * most)
        rows.append(Row("teach", teach, used, 0, size, "small models"))
    missing = [one for one in domains if one.distilled is None]
    if missing:
        most = max(_count(one, *ANSWERED_BY_TEACHERS) * one.decoded for one in missing)
        written = sum(one.stored * _count(one, TAUGHT) for one in missing)
        rows.append(Row("distill", distill, beside * (memory["distill"] + most), 0, written))
    if beside > 1:  # each process imports what this one does
        rows[0] = replace(rows[0], seconds=rows[0].seconds + found.began)
    return rows


def _preparation(one: DomainCosts) -> tuple[float, float, float]:
    """Seconds of stages `data`, `teach` and `distill` of a domain; 0 for what is up to date."""
    data = one.data or 0.0 if not one.read else 0.0
    teach = distill = 0.0
    if (costs := one.teacher) is not None:
        if costs.epochs:
            train = _count(one, Split.TRAIN)
            teach = costs.start + train * (one.reading + costs.epochs * costs.epoch)
        answered = _count(one, *ANSWERED_BY_TEACHERS)
        distill = costs.load + answered * (one.reading + costs.answer)
    if one.distilled is None:
        distill += _count(one, TAUGHT) * one.reading
        if one.settings.teacher == LABELS:
            distill += _count(one, Split.TRAIN) * one.reading
    return data, teach, distill


def _side_by_side(seconds: Sequence[float], processes: int) -> float:
    """Time until the last job is done, where each process takes the next one when it is free."""
    free = [0.0] * processes
    for job in seconds:
        first = free.index(min(free))
        free[first] += job
    return max(free)


def _count(costs: DomainCosts, *splits: str) -> int:
    """Number of samples of some splits together."""
    return sum(costs.counts[split] for split in splits)


def _pace(costs: ModelCosts) -> float:
    """Seconds in which the speed of a domain is measured, see `measure_speed`."""
    each = costs.encode + costs.evaluate.each
    batch = each * max(1, min(BATCH, int(SECONDS / max(each, 1e-9))))
    return each + batch * min(ROUNDS, math.ceil(SECONDS / max(batch, 1e-9)))


class _Costs:
    """Costs of the fusion and the export.

    Args:
        settings: All settings.
        found: What the parts of a run cost.
    """

    def __init__(self, settings: Settings, found: Calibration) -> None:
        self._train, self._gpu = settings.train, settings.model.device.startswith("cuda")
        self._domains, self._model, self._machine = found.domains, found.model, found.machine
        self._tracking = found.tracking

    def _learnt(self, name: str) -> int:
        """Number of samples that are trained on, with mirrored ones and views."""
        costs = self._domains[name]
        mirrored = self._train.flip and costs.settings.mirrors
        return _count(costs, TAUGHT) * (1 + mirrored + self._train.augment.views)

    def _probed(self, name: str) -> int:
        """Number of samples that a head alone is trained on."""
        return min(self._learnt(name), self._train.probe_samples)

    def _evaluation(self, name: str, *splits: Split) -> float:
        return sum(
            self._model[name].evaluate.at(self._domains[name].counts[split]) for split in splits
        )

    # --- memory -----------------------------------------------------------------------------------

    def _encoded(self, names: Sequence[str], on_device: bool) -> float:
        """Bytes of the encoded samples of domains, on the device or on the host."""
        return sum(
            self._model[name].encoded
            * (self._learnt(name) + _count(self._domains[name], Split.VAL, Split.TEST))
            for name in names
            if self._model[name].on_device == on_device
        )

    def _read(self, name: str, on_device: bool) -> float:
        """Bytes of the hidden states that a head alone reads, in parts and as a whole."""
        size = self._model[name].held * self._probed(name)
        return 2 * size if on_device == (size <= self._machine.head_inputs) else 0.0

    @property
    def memory(self) -> float:
        """Most bytes of memory of the process in the fusion."""
        names = list(self._domains)
        images = sum(
            one.decoded * _count(one, Split.VAL, Split.TEST) for one in self._domains.values()
        )
        taught = max(one.decoded * _count(one, TAUGHT) for one in self._domains.values())
        found = self._machine.memory + images + self._encoded(names, False)
        read = max(self._read(name, False) for name in names)
        if self._gpu:
            return found + max(taught, read) + 2 * self._machine.adapter
        read = max(read, *(self._read(name, True) for name in names))
        return found + self._encoded(names, True) + max(taught, read)

    def _gpu_of_heads(self) -> float:
        if not self._gpu:
            return 0.0
        names = list(self._domains)
        return (
            max(
                self._encoded(names[: n + 1], True) + self._read(name, True)
                for n, name in enumerate(names)
            )
            + self._machine.resting
            + self._machine.passing
        )

    def gpu_of_attempts(self, adapters: float) -> float:
        """Most bytes on the GPU while adapters are trained."""
        if not self._gpu:
            return 0.0
        others = max(adapters - 1, 0) * self._machine.adapter
        return (
            self._machine.resting
            + self._encoded(list(self._domains), True)
            + others
            + max(self._machine.training, self._machine.passing)
        )

    # --- time -------------------------------------------------------------------------------------

    def dedicated(self, processes: int) -> Row:
        """What training every domain in an adapter of its own takes (`fusion.of_dedicated`).

        Args:
            processes: Processes that train side by side, each on one core or with the GPU.
        """
        cores = trial_processes(0)  # a step was measured on `train.threads` of them
        cores = 1 if self._gpu else min(self._train.threads or cores, cores)
        processes, jobs = min(processes, len(self._model)), []
        for name, costs in self._model.items():
            domain, learnt = self._domains[name], self._learnt(name)
            shown = _count(domain, Split.VAL, Split.TEST)
            reading = domain.reading * (_count(domain, TAUGHT) + shown)
            encoding = costs.encode * (learnt + shown)
            training = costs.step * cores * self._train.steps_for(1, 0)
            if self._gpu:  # which the processes share
                training *= processes
            judging = self._evaluation(name, Split.VAL, Split.TEST)
            jobs.append(reading + encoding + training + judging)
        machine = self._machine
        seconds = machine.load + _side_by_side(jobs, processes)
        if processes > 1:
            seconds += machine.program
        note = f"{plural(len(jobs), 'adapter')}, {processes} side by side"
        gpu = processes * (machine.resting + machine.training) if self._gpu else 0.0
        return Row("dedicated", seconds, processes * self.memory, gpu, 0, note)

    def heads_alone(self) -> Row:
        """What the base model, encoding and the heads without LoRA take."""
        seconds = self._machine.load + self._machine.hashing + self._tracking.start
        for name, costs in self._model.items():
            domain = self._domains[name]
            learnt = self._learnt(name)
            shown = _count(domain, Split.VAL, Split.TEST)
            seconds += domain.reading * (_count(domain, TAUGHT) + shown)
            seconds += costs.encode * (learnt + shown)
            if costs.head_step:
                seconds += (
                    costs.pass_ * self._probed(name) + self._train.probe_steps * costs.head_step
                )
            seconds += self._evaluation(name, Split.VAL, Split.TEST) + costs.sheet
        return Row("fuse: without LoRA", seconds, self.memory, self._gpu_of_heads(), 0)

    def attempt(self, attempt: Attempt) -> float:
        """Seconds of an attempt with its evaluation."""
        train, rehearsed = self._train, attempt.held if attempt.rehearse else ()
        step = statistics.mean(self._model[name].step for name in attempt.new)
        if rehearsed:
            most = len(rehearsed) / (len(rehearsed) + len(attempt.new))
            share = min(train.rehearsal_share, most)
            others = statistics.mean(self._model[name].step for name in rehearsed)
            step = (1 - share) * step + share * others
        steps = train.steps_for(len(attempt.new), len(rehearsed))
        training = step * steps
        judging = sum(self._evaluation(name, Split.VAL) for name in attempt.domains)
        looks = train.validations * train.validation_samples
        looking = sum(self._model[name].evaluate.each * looks for name in attempt.domains)
        snapshot = self._machine.snapshot
        every = max(train.checkpoint_seconds, 100 * snapshot)
        return (
            training * (1 + snapshot / max(every, 1e-9))
            + min(looking, train.validation_share * training)
            + len(train.candidates(steps)) * (judging + snapshot)
            + 3 * snapshot
            + judging
            + sum(self._model[name].sheet for name in attempt.domains)
            + self._tracking.attempt
        )

    def attempts(self, course: Course) -> float:
        """Seconds of all attempts of a course."""
        return sum(map(self.attempt, course.attempts))

    def measuring(self) -> Row:
        """What measuring the finished adapters on the test split takes."""
        seconds = sum(
            self._evaluation(name, Split.VAL, Split.TEST) + costs.sheet + _pace(costs)
            for name, costs in self._model.items()
        )
        return Row("fuse: on test", seconds, self.memory, self.gpu_of_attempts(1), 0)

    def export(self) -> Row:
        """What the bundle, its golden examples and its gate take."""
        machine = self._machine
        seconds = machine.program + 2 * machine.load + 2 * machine.hashing + self._tracking.attempt
        for name, costs in self._model.items():
            test = _count(self._domains[name], Split.TEST)
            seconds += test * (self._domains[name].reading + costs.encode)
            seconds += self._evaluation(name, Split.TEST)
        gpu = machine.resting + machine.passing if self._gpu else 0.0
        note = "the gate's process needs as much again"
        return Row("export", seconds, self.memory, gpu, machine.weights, note)
