"""Shows a fusion while it runs: in the terminal and in MLflow, a nested run for each attempt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Dataset, DatasetInput, InputTag
from PIL.Image import Image

from valora_data.schema import Split
from valora_data.wording import plural
from valora_train.errors import TrackingError, UnreachableError
from valora_train.fusion.decision import Attempt, AttemptDecision, HeadOnlyDecision, Verdict
from valora_train.fusion.packing import Outcome
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.state import FusionState
from valora_train.fusion.trainer import OnStep, Trainer
from valora_train.reporting import pictures, texts, tracking
from valora_train.reporting.progress import Display
from valora_train.reporting.trace import Trace
from valora_train.reporting.tracking import ATTEMPT, FUSION, HEAD_ONLY, NOTE, PARENT, storing
from valora_train.settings import Settings, as_dict
from valora_train.stage import Span, digest
from valora_train.tasks.base import Evaluation

SHEET_IMAGES = 12  # images on a contact sheet
TIMED_STEPS = 10  # of the first attempt, after its first step
REPEATED = 0.005  # seconds; a step before a checkpoint, which is only repeated, takes less
COLOURS = {"committed": "green", "rolled back": "red", "unreachable": "magenta"}


def _logged(method: Callable[..., None]) -> Callable[..., None]:
    """Do what only logs, if there is a run: processes that do not lead their team have none."""

    @wraps(method)
    def guarded(self: FusionReport, *arguments: Any) -> None:
        if self.run_id:
            with storing():
                method(self, *arguments)

    return guarded


class FusionReport:
    """Reports one fusion; `data_sets` have distilled and true labels, `records` gives attempts."""

    def __init__(
        self,
        display: Display,
        trainer: Trainer,
        required: Mapping[str, float],
        data_sets: Mapping[str, tuple[Path, Path]],
    ) -> None:
        self.display, self._trainer = display, trainer
        self._required, self._folders = required, data_sets
        self._timed: tuple[int, float] | None = None
        self._latest = 0.0  # time of the latest step
        self._steps = 0  # of the latest attempt
        self._key = ""
        self.records: Callable[[], Sequence[Mapping[str, Any]]] = list
        self.run_id = ""
        self._trace: Trace | None = None

    @contextmanager
    def running(
        self, settings: Settings, key: str, state: FusionState, before: Sequence[Span]
    ) -> Iterator[None]:
        """Log the fusion (the stage of a key) into its run; its trace begins with `before`."""
        self._key = key
        note = f"Packs {', '.join(self._required)} into the fewest adapters."
        with _fusion_run(settings, key, note, state.mlflow_run_id) as self.run_id:
            state.mlflow_run_id = self.run_id
            state.save()
            link = tracking.find_run(self.run_id)
            self.display.note("fuse", f"every step, live (make ui): {link}")
            uses = ("training", "validation, test")
            self._log_data_sets([(name, use) for name in self._required for use in uses])
            with storing():
                earlier = sum(state.seconds)
                self._trace = Trace(f"fuse {settings.task.name}", self._required, before, earlier)
            try:
                yield
            except BaseException as error:
                with suppress(TrackingError), storing():
                    self._trace.end(error=str(error) or type(error).__name__)
                    if isinstance(error, UnreachableError):
                        mlflow.set_tag(NOTE, str(error))
                raise

    @_logged
    def resumed(self, decisions: Sequence[AttemptDecision], seconds: Sequence[float]) -> None:
        """Add the attempts before an interruption to the trace."""
        assert self._trace is not None
        self._trace.add_earlier(decisions, seconds)

    @_logged
    def log_stages(self, stages: Sequence[tuple[Path, str]]) -> None:
        """Log the stages before the fusion, each with a note, as nested runs."""
        for folder, note in stages:
            tracking.log_stage(self.run_id, folder, note)

    @_logged
    def _log_data_sets(self, uses: Sequence[tuple[str, str]]) -> None:
        """Log what the active run does with domains."""
        inputs = []
        for name, use in uses:
            labelled = use.startswith("validation")
            folder = self._folders[name][labelled]
            kind, source = "labelled" if labelled else "taught", json.dumps({"uri": str(folder)})
            data = Dataset(f"{name} ({kind})", digest(folder)[:36], "local", source)
            inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", use)]))
        mlflow.MlflowClient().log_inputs(tracking.active(), inputs)

    @contextmanager
    def _nested(self, name: str, key: str, tags: Mapping[str, str]) -> Iterator[None]:
        """A nested run, in the place of one with the same value of the tag `key`."""
        mine = f"tags.`{PARENT}` = '{self.run_id}' and tags.`{key}` = '{tags[key]}'"
        with storing():
            for run in tracking.search(mine):
                mlflow.delete_run(run.info.run_id)
        with tracking.open_run(name, {FUSION: self._key, **tags}):
            yield

    @contextmanager
    def training(self, what: str, name: str = "", new: int = 0) -> Iterator[OnStep]:
        """Show a training in terminal and MLflow; names end with `name`, `new` ones are timed."""
        figures: dict[str, float] = {}
        self._steps = 0
        with ExitStack() as stack:
            if not new and self._trace is not None:  # attempts have spans with more facts
                stack.enter_context(self._trace.around(what))
            log = stack.enter_context(tracking.curve()) if self.run_id else None
            show = stack.enter_context(self.display.work("fuse", what))

            def on_step(step: int, steps: int, loss: float, found: Mapping[str, float]) -> None:
                figures.update(found)
                self._steps = step
                if log is not None:
                    values = {"loss": loss} | figures
                    log(step, {f"{key}{name}": value for key, value in values.items()})
                show(step, steps, loss, figures)
                if new:
                    self._time_step(new, step, steps)

            yield on_step

    @_logged
    def placed_without_adapter(self, decision: HeadOnlyDecision, pictures: Path) -> None:
        """Log that a domain takes no adapter, with its contact sheet in a folder of pictures."""
        name = decision.domain
        tags = {HEAD_ONLY: name, "valora.domain": name, "valora.decision": "no adapter"}
        tags[NOTE] = f"**no adapter**: {decision.reason}"
        with self._nested(f"{name} (no adapter)", HEAD_ONLY, tags):
            mlflow.log_metric(f"accuracy/{name}", decision.accuracy)
            mlflow.log_artifact(str(pictures / f"{name}.png"), "pictures")
            mlflow.end_run("FINISHED" if decision.met else "FAILED")

    @_logged
    def log_baselines(self, baselines: Mapping[str, Mapping[str, float | None]]) -> None:
        """Log what is known before the first attempt: accuracies by metric and domain."""
        known = {f"{metric}/{name}": value for metric, found in baselines.items()
                 for name, value in found.items() if value is not None}  # fmt: skip
        mlflow.log_metrics(known)

    @contextmanager
    def attempt(self, attempt: Attempt) -> Iterator[OnStep]:
        """Report an attempt while it runs, in a nested run that replaces an interrupted one."""
        tags = {
            ATTEMPT: str(attempt.number),
            "valora.domain": ", ".join(attempt.new),
            "valora.adapter": attempt.adapter,
            NOTE: f"**Running**: {texts.tried(attempt.as_json())}.",
        }
        uses = [(name, "training") for name in attempt.new]
        uses += [(name, "rehearsal") for name in attempt.held if attempt.rehearse]
        uses += [(name, "validation") for name in attempt.domains]
        with ExitStack() as stack:
            if self.run_id:
                stack.enter_context(self._nested(attempt.name, ATTEMPT, tags))
            self._log_data_sets(uses)
            yield stack.enter_context(self.training(attempt.name, new=len(attempt.new)))

    def _time_step(self, new: int, step: int, steps: int) -> None:
        """Say once how long attempts take, by the first steps that this process trains."""
        now = time.monotonic()
        repeated, self._latest = now - self._latest < REPEATED, now
        if self._timed is None or (repeated and self._timed[0] > 0):
            self._timed = (step, now)
        first, began = self._timed
        if step - first != TIMED_STEPS:
            return
        self._timed = (-TIMED_STEPS, now)  # no later step is so far from it
        rate, count = (now - began) / TIMED_STEPS, len(self._required)
        one, each = (timedelta(seconds=round(rate * n)) for n in (steps, steps // new * count))
        message = f"{steps} steps × {rate:.3g} s = {one} for this attempt; one for each of "
        self.display.note("fuse", f"{message}{plural(count, 'domain')}: {each}")

    def attempted(self, outcome: Outcome) -> None:
        """Log and write the outcome of the attempt that is running."""
        self._log_outcome(outcome)
        decision, record = outcome.decision, self.records()[-1]
        verdict = f"[{COLOURS[decision.verdict]}]{texts.verdict_of(record)}[/]"
        line = f"{decision.attempt.name} {verdict}: {texts.outcome_of(record)}"
        if outcome.evaluations:
            reached = [f"{name} {one.accuracy:.3f}" for name, one in outcome.evaluations.items()]
            line += f" ({', '.join(reached)})"
        if record["dedicated"]:
            line += "; nothing was trained, it is the dedicated adapter"
        self.display.done("fuse", line, outcome.seconds)

    @_logged
    def _log_outcome(self, outcome: Outcome) -> None:
        decision = outcome.decision
        values = {"seconds": outcome.seconds, "steps": float(self._steps)}
        assert self._trace is not None
        self._trace.add_attempt(outcome.span, decision, outcome.spans, self._steps)
        for name, evaluation in outcome.evaluations.items():
            values |= {f"{key}/{name}": value for key, value in evaluation.details.items()}
            sheet = self.contact_sheet(name, evaluation, Split.VAL)
            mlflow.log_image(sheet, f"pictures/{name}.png")
            if evaluation.classes is not None:
                tracking.log_classes(name, evaluation.classes.as_json())
        for name, accuracy in decision.accuracy.items():
            values |= {f"accuracy/{name}": accuracy, f"required/{name}": self._required[name]}
        mlflow.log_metrics(values)
        mlflow.set_tags({"valora.decision": decision.verdict, "valora.reason": decision.reason})
        name = f"{decision.attempt.name} ({texts.verdict_of(self.records()[-1])})"
        mlflow.MlflowClient().update_run(tracking.active(), name=name)
        if decision.verdict is Verdict.UNREACHABLE:
            mlflow.end_run("FAILED")

    @_logged
    def log_progress(self, plan: FusionPlan) -> None:
        """Log the latest decision, and where it moves the domains of earlier attempts."""
        pages = {
            str(one["number"]): texts.attempt_page(one)[: texts.NOTE_LENGTH]
            for one in self.records()
        }
        for run in tracking.search(f"tags.`{PARENT}` = '{self.run_id}'"):
            page = pages.get(run.data.tags.get(ATTEMPT, ""))
            if page is not None and run.data.tags.get(NOTE) != page:
                mlflow.MlflowClient().set_tag(run.info.run_id, NOTE, page)
        latest = plan.decisions[-1]  # what it rolled back stands in its own run
        kept = latest.accuracy.keys() & latest.kept
        values = {f"accuracy/{name}": latest.accuracy[name] for name in kept}
        values |= {f"required/{name}": self._required[name] for name in latest.accuracy}
        mlflow.log_metrics(values, step=latest.attempt.number)

    @_logged
    def log_sheet(self, domain: str, sheet: Image) -> None:
        """Log the contact sheet of a domain's test split."""
        mlflow.log_image(sheet, f"pictures/{domain}.png")

    def contact_sheet(self, domain: str, evaluation: Evaluation, split: Split) -> Image:
        """The first samples of a split with the answers that were evaluated."""
        samples = self._trainer.samples(domain, split)[:SHEET_IMAGES]
        answers = [one.answer for one in evaluation.predictions[:SHEET_IMAGES]]
        if evaluation.threshold is None:
            return pictures.answer_sheet(samples, answers, self._trainer.task(domain).domain)
        boxes = [answer.boxes for answer in answers]
        return pictures.contact_sheet(samples, boxes, evaluation.threshold)

    @_logged
    def finish(self, result: Mapping[str, Any]) -> None:
        """Log the result of the fusion, the content of `fusion.json`."""
        assert self._trace is not None
        _log_result(result)
        attempts = {one["name"]: f"{one['verdict']}: {one['reason']}" for one in result["attempts"]}
        without = result.get("head_only", [])
        self._trace.end(packing=result["packing"], without_adapter=without, attempts=attempts)


@contextmanager
def _fusion_run(settings: Settings, key: str, note: str, earlier: str | None) -> Iterator[str]:
    """The run of the fusion of a key, continued where an earlier process was interrupted."""
    tracking.connect(settings.paths, f"valora/{settings.task.name}")
    with storing():
        runs = tracking.search(f"tags.`{FUSION}` = '{key}'")
        begun = [one for one in runs if tracking.is_fusion(one)]
        known = [one.info.run_id for one in begun if one.info.status != "FINISHED"]
        known += [one.info.run_id for one in begun if one.info.run_id == earlier]
        for run in runs:  # attempts that a killed process left running
            if run.info.status == "RUNNING" and run.info.run_id not in known[:1]:
                mlflow.MlflowClient().set_terminated(run.info.run_id, "KILLED")
    name = f"{settings.task.name} · {settings.fusion.strategy} · seed {settings.train.seed}"
    tags = {FUSION: key, NOTE: note}
    with tracking.open_run(name, tags, known[0] if known else None, system=True) as run_id:
        if not known:
            domains = {one.name: as_dict(one) for one in settings.chosen()}
            tracking.log_config(as_dict(settings) | {"domains": domains})
        yield run_id


def run_of(settings: Settings, fused: Path, result: Mapping[str, Any]) -> str:
    """The run of a finished fusion; if the store has lost it, the result is logged anew."""
    key = fused.name.rpartition("-")[2]
    tracking.connect(settings.paths, f"valora/{settings.task.name}")
    with storing():
        runs = tracking.search(f"tags.`{FUSION}` = '{key}' and attributes.status = 'FINISHED'")
    found = [run.info.run_id for run in runs if tracking.is_fusion(run)]
    if found:
        return str(result["mlflow_run_id"] if result["mlflow_run_id"] in found else found[0])
    note = "The result of an earlier fusion, whose run this store does not have."
    with _fusion_run(settings, key, note, None) as run_id, storing():
        mlflow.log_artifacts(str(fused / "pictures"), "pictures")
        _log_result(result)
    return run_id


def _log_result(result: Mapping[str, Any]) -> None:
    """Log the result of a fusion into the active run."""
    verdicts = [texts.verdict_of(attempt) for attempt in result["attempts"]]
    values = {
        "adapters": len(result["packing"]),
        "attempts": len(verdicts),
        "rolled_back": sum(Verdict.ROLLED_BACK in verdict for verdict in verdicts),
        "fusion_seconds": sum(result["seconds"]),
    }
    for name, facts in result["domains"].items():
        for key, value in facts["accuracy"].items():
            if key.startswith(("test", "teacher")) and isinstance(value, int | float):
                values[f"{key}/{name}"] = value
        speed = result.get("speed", {}).get(name) or {}
        for kind, one in (("", speed), ("teacher_", speed.get("teacher"))):
            if one:
                values[f"{kind}images_per_second/{name}"] = one["images_per_second"]
        if "per_class" in facts["accuracy"]:
            tracking.log_classes(name, facts["accuracy"])
    mlflow.log_metrics(values)
    kept = {f"accuracy/{name}": one["accuracy"]["val"] for name, one in result["domains"].items()}
    mlflow.log_metrics(kept, step=len(verdicts) + 1)  # after those of all attempts
    bars = pictures.accuracy_bars(result["domains"], result.get("adapters", {}))
    mlflow.log_figure(bars, "accuracy.png")
    mlflow.set_tag(NOTE, texts.fusion_page(result, tracking.active()))
