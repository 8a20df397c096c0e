"""Shows a fusion while it runs: in the terminal, in MLflow and in pictures."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from valora_data.schema import Split
from valora_data.wording import plural
from valora_train.errors import TrackingError, UnreachableError
from valora_train.fusion.decision import Verdict
from valora_train.fusion.history import attempt_as_json
from valora_train.reporting import pictures
from valora_train.reporting.attempt_text import (
    attempt_page,
    outcome_of,
    rejected_lines,
    tried,
    verdict_of,
)
from valora_train.reporting.domain_table import (
    BESIDE_OTHERS,
    PACKING,
    by_adapter,
    domain_table,
)
from valora_train.reporting.text import duration, fitting, markdown_table
from valora_train.reporting.tracking import NOTE_LENGTH, DataSet
from valora_train.stage import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image

    from valora_train.fusion.decision import Attempt, HeadOnlyDecision
    from valora_train.fusion.packing import Outcome
    from valora_train.fusion.plan import FusionPlan
    from valora_train.fusion.requirement import Requirement
    from valora_train.fusion.state import FusionState
    from valora_train.fusion.trainer import Trainer
    from valora_train.reporting.progress import Display, Step
    from valora_train.reporting.tracking import AttemptRun, Curve, Tracker
    from valora_train.tasks.base import Evaluation

SHEET_IMAGES = 12  # images on a contact sheet
TIMED_STEPS = 10  # of the first attempt, after its first step
COLOURS = {"committed": "green", "rolled back": "red", "unreachable": "magenta"}


class FusionReport:
    """Reports one fusion.

    Args:
        tracker: The fusion's runs in MLflow, started; None for the processes of a team that do
            not lead.
        display: The terminal.
        trainer: Holds the samples that the contact sheets show.
        required: Accuracy that each domain must keep.
        data_sets: Samples with distilled labels, then samples with true labels, by domain.
    """

    def __init__(
        self,
        tracker: Tracker | None,
        display: Display,
        trainer: Trainer,
        required: Mapping[str, float],
        data_sets: Mapping[str, tuple[Path, Path]],
    ) -> None:
        self._tracker = tracker
        self._display = display
        self._trainer = trainer
        self._required = required
        self._folders = data_sets
        self._told: Callable[[], Sequence[Mapping[str, Any]]] = list
        self._timed: tuple[int, float] | None = None

    def follow(self, told: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Follow the attempts of a fusion.

        Args:
            told: Returns all attempts that were decided (see `fusion.history.History.told`).
        """
        self._told = told

    @contextmanager
    def running(self) -> Iterator[None]:
        """End the MLflow run as failed or killed if the fusion does not get to its end."""
        if (tracker := self._tracker) is None:
            yield
            return
        self._display.note("fuse", f"every step, live (make ui): {tracker.link}")
        tracker.log_data_sets(
            [
                item
                for name in self._required
                for item in (self._taught(name, "training"), self._labelled(name))
            ]
        )
        try:
            yield
        except UnreachableError as error:
            with suppress(TrackingError):
                tracker.finish("FAILED", str(error))
            raise
        except BaseException:
            with suppress(TrackingError):  # the first error counts
                tracker.finish("KILLED")
            raise

    @contextmanager
    def head_only(self, domain: str) -> Iterator[TrainingReport]:
        """Report the training of a head on the frozen base model while it runs."""
        curve = self._tracker.curve() if self._tracker else None
        with self._display.work("fuse", f"without LoRA: {domain}") as on_step:
            yield TrainingReport(curve, on_step, f"/without LoRA/{domain}")
        if curve is not None:
            curve.finish()

    def head_only_measured(
        self, domain: str, val: float, requirement: Requirement, seconds: float
    ) -> None:
        """Report what a domain reaches on the frozen base model.

        Args:
            domain: The domain.
            val: Accuracy on the validation split.
            requirement: What the domain must reach.
            seconds: Duration of the measurement, in seconds.
        """
        sign = "≥" if requirement.met_by(val) else "<"
        line = f"{domain}: without LoRA {val:.3f} {sign} {requirement.text}"
        self._display.done("fuse", line, seconds)

    def placed_without_adapter(self, decision: HeadOnlyDecision, pictures: Path) -> None:
        """Log the decision that a domain takes no adapter.

        Args:
            decision: The decision.
            pictures: Folder of the contact sheets of what domains reach without LoRA.
        """
        if self._tracker is not None:
            self._tracker.log_head_only(decision, pictures / f"{decision.domain}.png")

    def log_baselines(self, baselines: Mapping[str, Mapping[str, float | None]]) -> None:
        """Log what is known of the domains before the first attempt.

        Args:
            baselines: Accuracy by domain, by name of the metric; None is left out.
        """
        if self._tracker is not None:
            self._tracker.log_metrics(
                {
                    f"{metric}/{domain}": accuracy
                    for metric, by_domain in baselines.items()
                    for domain, accuracy in by_domain.items()
                    if accuracy is not None
                }
            )

    def resumed(self, attempts: int) -> None:
        """Report that decisions of an interrupted fusion were read from disk."""
        if attempts:
            self._display.note("fuse", f"continuing after attempt {attempts}")

    @contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[AttemptReport]:
        """Report an attempt while it runs; its MLflow run is abandoned on an error."""
        run = None if self._tracker is None else self._start_run(self._tracker, attempt)
        try:
            with self._display.work("fuse", attempt.name) as on_step:
                yield AttemptReport(self, run, on_step, len(attempt.new))
        except BaseException:
            if run is not None:
                with suppress(TrackingError):
                    run.abandon()
            raise

    def _start_run(self, tracker: Tracker, attempt: Attempt) -> AttemptRun:
        data_sets = [self._taught(name, "training") for name in attempt.new]
        if attempt.rehearse:
            data_sets += [self._taught(name, "rehearsal") for name in attempt.held]
        data_sets += [self._labelled(name, "validation") for name in attempt.domains]
        note = f"**Running**: {tried(attempt_as_json(attempt))}."
        return tracker.start_attempt(attempt, self._required, data_sets, note)

    def time_step(self, step: int, steps: int, new: int) -> None:
        """Say once how long attempts take, by the first steps that this process trains.

        Args:
            step: Number of the step, from 1.
            steps: Number of steps of the attempt.
            new: Number of domains that are new in it.
        """
        now = time.monotonic()
        first, began = self._timed = self._timed or (step, now)
        if step - first != TIMED_STEPS:
            return
        self._timed = (-TIMED_STEPS, now)  # no later step is so far from it
        rate, all_steps = (now - began) / TIMED_STEPS, steps // new * len(self._required)
        self._display.note(
            "fuse",
            f"{steps} steps × {rate:.3g} s = {duration(steps * rate)} for this attempt; one for "
            f"each of {plural(len(self._required), 'domain')}: {duration(all_steps * rate)}",
        )

    def _taught(self, name: str, context: str) -> DataSet:
        folder = self._folders[name][0]
        return DataSet(f"{name} (taught)", digest(folder), folder, context)

    def _labelled(self, name: str, context: str = "validation, test") -> DataSet:
        folder = self._folders[name][1]
        return DataSet(f"{name} (labelled)", digest(folder), folder, context)

    def log_progress(self, plan: FusionPlan, state: FusionState) -> None:
        """Log the latest decision and redraw the summary of all decisions."""
        if self._tracker is None:
            return
        told = self._told()
        self._tracker.log_summary(plan.decisions, state.seconds, self._required, told)
        # Later attempts change where the domains of earlier ones went.
        self._tracker.describe_attempts({one["number"]: attempt_page(one) for one in told})
        latest = plan.decisions[-1]  # what it rolled back stands in its own run
        self._tracker.log_metrics(
            {
                f"accuracy/{name}": latest.accuracy[name]
                for name in latest.accuracy.keys() & latest.kept
            }
            | {f"required/{name}": self._required[name] for name in latest.accuracy},
            step=latest.attempt.number,
        )

    @contextmanager
    def measuring(self, domain: str) -> Iterator[None]:
        """Show that a domain is being measured on the test split."""
        with self._display.work("fuse", f"measuring {domain} on test"):
            yield

    def test_measured(self, domain: str, test: Evaluation) -> Image:
        """Log the contact sheet of a domain's test split and return it."""
        sheet = self.contact_sheet(domain, test, Split.TEST)
        if self._tracker is not None:
            self._tracker.log_picture(sheet, f"pictures/{domain}.png")
        return sheet

    def contact_sheet(self, domain: str, evaluation: Evaluation, split: Split) -> Image:
        """The first samples of a split with the answers that were evaluated."""
        samples = self._trainer.samples(domain, split)[:SHEET_IMAGES]
        answers = [one.answer for one in evaluation.predictions[:SHEET_IMAGES]]
        if evaluation.threshold is None:
            return pictures.answer_sheet(samples, answers, self._trainer.task(domain).domain)
        boxes = [answer.boxes for answer in answers]
        return pictures.contact_sheet(samples, boxes, evaluation.threshold)

    def show_outcome(self, outcome: Outcome) -> None:
        """Write the line of a decided attempt."""
        decision, told = outcome.decision, self._told()[-1]
        verdict = f"[{COLOURS[decision.verdict]}]{verdict_of(told)}[/]"
        reached = ", ".join(
            f"{name} {evaluation.accuracy:.3f}" for name, evaluation in outcome.evaluations.items()
        )
        line = f"{decision.attempt.name} {verdict}: {outcome_of(told)}"
        line += (f" ({reached})" if reached else "") + (
            "; nothing was trained, it is the dedicated adapter" if told["dedicated"] else ""
        )
        self._display.done("fuse", line, outcome.seconds)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the result and end the MLflow run.

        Args:
            result: Content of `fusion.json`.
        """
        if self._tracker is not None:
            log_result(self._tracker, result)


def log_result(tracker: Tracker, result: Mapping[str, Any]) -> None:
    """Log the result of a fusion and end its MLflow run.

    Args:
        tracker: The fusion's runs in MLflow, started.
        result: Content of `fusion.json`.
    """
    verdicts = [attempt["verdict"] for attempt in result["attempts"]]
    tracker.log_metrics(
        _metrics(result)
        | {
            "adapters": len(result["packing"]),
            "attempts": len(verdicts),
            "rolled_back": verdicts.count(Verdict.ROLLED_BACK),
            "fusion_seconds": sum(result["seconds"]),
        }
    )
    tracker.log_metrics(
        {f"accuracy/{name}": facts["accuracy"]["val"] for name, facts in result["domains"].items()},
        step=len(verdicts) + 1,  # after those of all attempts
    )
    for name, facts in result["domains"].items():
        if "per_class" in facts["accuracy"]:
            tracker.log_classes(name, facts["accuracy"])
    bars = pictures.accuracy_bars(result["domains"], result.get("adapters", {}))
    tracker.log_figure(bars, "accuracy.png")
    tracker.finish("FINISHED", fusion_page(result, tracker.run_id))


class TrainingReport:
    """Shows a training in the terminal and in MLflow while it runs.

    Args:
        curve: Logs its figures, if it is logged.
        show_step: Shows a training step in the terminal.
        name: Part of the names of its figures in a run that has several trainings.
    """

    def __init__(self, curve: Curve | None, show_step: Step, name: str = "") -> None:
        self._curve = curve
        self._show_step = show_step
        self._name = name
        self._figures: dict[str, float] = {}

    def on_figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Remember figures beside the loss of a step.

        Args:
            step: Number of the step, from 1.
            figures: Values by name, such as ``lr``.
        """
        self._figures = dict(figures)

    def on_step(self, step: int, steps: int, loss: float) -> None:
        """Report a training step.

        Args:
            step: Number of the step, from 1.
            steps: Number of steps of the training.
            loss: Loss of the step.
        """
        figures = {"loss": loss} | self._figures
        if self._curve is not None:
            self._curve.add(step, {f"{key}{self._name}": value for key, value in figures.items()})
        self._show_step(step, steps, loss, self._figures)


class AttemptReport(TrainingReport):
    """Reports one attempt.

    Args:
        report: The report of the fusion.
        run: The attempt's run in MLflow, if it is logged.
        show_step: Shows a training step in the terminal.
        new: Number of domains that are new in the attempt.
    """

    def __init__(
        self, report: FusionReport, run: AttemptRun | None, show_step: Step, new: int
    ) -> None:
        super().__init__(run.curve if run else None, show_step)
        self._report = report
        self._run = run
        self._new = new

    def on_step(self, step: int, steps: int, loss: float) -> None:
        """Report a training step."""
        super().on_step(step, steps, loss)
        self._report.time_step(step, steps, self._new)

    def finish(self, outcome: Outcome) -> None:
        """Report the outcome and end the attempt's MLflow run."""
        if self._run is not None:
            self._log(self._run, outcome)
        self._report.show_outcome(outcome)

    def _log(self, run: AttemptRun, outcome: Outcome) -> None:
        details: dict[str, float] = {}
        sheets = {}
        for name, evaluation in outcome.evaluations.items():
            details |= {f"{key}/{name}": value for key, value in evaluation.details.items()}
            sheets[name] = self._report.contact_sheet(name, evaluation, Split.VAL)
        classes = {
            name: evaluation.classes
            for name, evaluation in outcome.evaluations.items()
            if evaluation.classes is not None
        }
        run.finish(outcome.decision, outcome.seconds, sheets, details, classes)


def _metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Metrics on the test split, ours beside the teachers', by the names that MLflow shows."""
    found: dict[str, float] = {}
    for name, facts in result["domains"].items():
        for key, value in facts["accuracy"].items():
            if key.startswith(("test", "teacher")) and isinstance(value, int | float):
                found[f"{key}/{name}"] = value
        speed = result.get("speed", {}).get(name) or {}
        for kind, one in (("", speed), ("teacher_", speed.get("teacher") or {})):
            if one:
                found[f"{kind}images_per_second/{name}"] = one["images_per_second"]
    return found


def fusion_page(result: Mapping[str, Any], run_id: str) -> str:
    """The description of a fusion in markdown: the packing, and what it was chosen over.

    Args:
        result: Content of `fusion.json`.
        run_id: Id of the fusion's run.
    """
    adapters, attempts = result.get("adapters", {}), result["attempts"]
    speed = result.get("speed", {})
    domains = by_adapter(
        {name: facts | {"speed": speed.get(name)} for name, facts in result["domains"].items()},
        adapters,
    )
    met = sum(facts["status"] == "met" for facts in domains.values())
    counts = Counter(attempt["verdict"] for attempt in attempts)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    head = [
        f"**{plural(len(domains), 'domain')} in {plural(len(result['packing']), 'adapter')}** "
        f"after {plural(len(attempts), 'attempt')}{f' ({verdicts})' if verdicts else ''}, strategy "
        f"`{result['strategy']}`; {met} of {len(domains)} at their requirement on test.",
        "",
    ]
    rejected = rejected_lines(attempts)
    alone = [
        f"- **{name}**: {facts['reason']}"
        for name, facts in domains.items()
        if facts["adapter"] is None and facts.get("reason")
    ]
    sections = [
        head,
        markdown_table(*domain_table(domains, adapters, PACKING)),
        ["", f"![accuracy](get-artifact?path=accuracy.png&run_uuid={run_id})", ""],
        ["**Rejected**", "", *rejected, ""] if rejected else [],
        ["**Without an adapter**", "", *alone, ""] if alone else [],
        markdown_table(*domain_table(domains, adapters, ("domain", *BESIDE_OTHERS))),
    ]
    return fitting(sections, NOTE_LENGTH, "see the table steps.json")
