"""A fusion in MLflow: attempts lie below its run, which is continued and shows what was kept."""

import re
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
from mlflow import MlflowClient
from PIL import Image
from rich.console import Console

from tests.unit.valora_train.fusion.test_plan import DECISIONS, PACKING, START
from tests.unit.valora_train.reporting.test_texts import DOMAINS, result
from tests.unit.valora_train.reporting.test_tracking import paths, status  # noqa: F401
from valora_train.errors import UnreachableError
from valora_train.fusion.decision import HeadOnlyDecision, attempts_as_json
from valora_train.fusion.state import FusionState
from valora_train.reporting.fusion_report import FusionReport, run_of
from valora_train.reporting.progress import Display
from valora_train.reporting.ui import latest_fusions, main
from valora_train.settings import DomainSettings, Settings, TaskSettings
from valora_train.stage import Span


@pytest.fixture
def report(paths, tmp_path, monkeypatch):  # noqa: F811
    """Makes reports of the same fusion, as processes that continue each other have them."""
    monkeypatch.setattr("valora_train.reporting.fusion_report.digest", str)
    monkeypatch.setattr(FusionReport, "contact_sheet", lambda *_: Image.new("RGB", (9, 9)))
    domains = {name: DomainSettings(name=name, labels=[name]) for name in START}
    task = TaskSettings(name="detection", type="detection")
    settings = Settings(task=task, domains=domains, paths=paths)
    state = FusionState(tmp_path, {})
    folders = {name: (Path(f"taught-{name}"), Path(f"labelled-{name}")) for name in START}

    def made(key="a1"):
        display = Display(Console(file=StringIO()))
        made = FusionReport(display, None, dict.fromkeys(START, 0.5), folders)
        now = time.time_ns()
        before = [Span("teach person", now - 3_000_000_000, now - 1_000_000_000)]
        return made, made.running(settings, key, state, before)

    made.settings = settings
    return made


def outcome(decision):
    now = time.time_ns()
    inside = (Span("train", now - 2000, now - 1000), Span("evaluate person", now - 1000, now))
    span = Span(decision.attempt.name, now - 2000, now)
    return SimpleNamespace(decision=decision, seconds=2.0, evaluations={}, span=span, spans=inside)


def nested(parent):
    found = mlflow.search_runs(output_format="list", search_all_experiments=True)
    below = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent]
    return {run.info.run_name: run for run in below}


def records(decisions):
    return lambda: attempts_as_json(decisions, PACKING)


def test_every_attempt_is_a_nested_run_and_the_parent_shows_what_was_kept(report, tmp_path):
    shown, running = report()
    with running:
        for count, decision in enumerate(DECISIONS, 1):
            shown.records = records(DECISIONS[:count])
            with shown.attempt(decision.attempt) as on_step:
                on_step(1, 2, 0.5, {"lr": 0.1})
                shown.attempted(outcome(decision))
            plan = SimpleNamespace(decisions=DECISIONS[:count])
            shown.log_progress(plan)
            if count == 2:
                metrics = mlflow.get_run(shown.run_id).data.metrics
                assert metrics["accuracy/person"] == 0.95  # 0.91 was rolled back
                assert "accuracy/bicycle" not in metrics
        Image.new("RGB", (9, 9)).save(tmp_path / "plate.png")
        shown.placed_without_adapter(HeadOnlyDecision("plate", 0.4, False, "a reason"), tmp_path)
        shown.finish(result())
    parent, runs = mlflow.get_run(shown.run_id), nested(shown.run_id)
    kept = DOMAINS["bicycle"]["accuracy"]["val"]
    assert parent.data.metrics["accuracy/bicycle"] == kept
    assert parent.data.metrics["images_per_second/people_count"] == 140.0
    assert parent.data.tags["mlflow.note.content"].startswith("**3 domains in 2 adapters**")
    assert list(runs)[::-1] == [f"{one.attempt.name} ({one.verdict})" for one in DECISIONS] + [
        "plate (no adapter)"
    ]
    back = runs["02 bicycle → adapter-1 (rolled back)"]
    assert back.data.metrics == {
        "accuracy/person": 0.91, "accuracy/bicycle": 0.85, "required/person": 0.5,
        "required/bicycle": 0.5, "loss": 0.5, "lr": 0.1, "seconds": 2.0, "steps": 1.0,
    }  # fmt: skip
    assert back.data.tags["valora.decision"] == "rolled back"
    # What became of its domain later is said, too.
    assert "bicycle went to adapter-1 with attempt 07" in back.data.tags["mlflow.note.content"]
    uses = [(one.dataset.name, one.tags[0].value) for one in back.inputs.dataset_inputs]
    assert sorted(uses) == [
        ("bicycle (labelled)", "validation"), ("bicycle (taught)", "training"),
        ("person (labelled)", "validation"), ("person (taught)", "rehearsal"),
    ]  # fmt: skip
    assert {name for name, run in runs.items() if run.info.status == "FAILED"} == {
        "05 plate → adapter-3 (unreachable)", "plate (no adapter)",
    }  # fmt: skip


def test_what_is_out_of_reach_fails_with_its_reason_and_can_continue(report):
    shown, running = report()
    with pytest.raises(UnreachableError), running:
        raise UnreachableError("person misses its requirement")
    run = mlflow.get_run(shown.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["mlflow.note.content"] == "person misses its requirement"
    (trace,) = mlflow.search_traces(return_type="list")
    assert trace.info.state == "ERROR"
    assert trace.data.spans[0].status.description == "person misses its requirement"
    again, running = report()
    with running:
        assert again.run_id == shown.run_id


@pytest.mark.parametrize("lost", ["nothing", "run", "experiment"])
def test_a_run_that_the_store_lost_is_logged_anew(report, tmp_path, lost):
    shown, running = report("0123")
    with running:
        pass
    fused = tmp_path / "fuse-detection-0123"
    (fused / "pictures").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(fused / "pictures" / "bicycle.png")
    if lost == "run":
        mlflow.delete_run(shown.run_id)
    elif lost == "experiment":
        mlflow.delete_experiment(mlflow.get_run(shown.run_id).info.experiment_id)
    run = run_of(report.settings, fused, result(mlflow_run_id=shown.run_id))
    assert status(run) == "FINISHED"
    assert (run == shown.run_id) == (lost != "run")  # with an experiment its runs come back
    if lost == "run":
        assert mlflow.get_run(run).data.metrics["adapters"] == 2
        pictures = [one.path for one in MlflowClient().list_artifacts(run, "pictures")]
        assert pictures == ["pictures/bicycle.png"]
    assert run_of(report.settings, fused, result(mlflow_run_id="gone")) == run


def test_without_a_run_nothing_is_logged_but_attempts_are_timed(report, tmp_path):
    shown, _ = report()
    shown.records = records(DECISIONS[:1])
    with shown.attempt(DECISIONS[0].attempt) as on_step:
        for step in range(1, 42):
            time.sleep(0.02 if step > 30 else 0)  # up to 30, steps of a checkpoint are repeated
            on_step(step, 100, 0.5, {})
        shown.attempted(outcome(DECISIONS[0]))
    (rate,) = re.findall(r"100 steps × (\S+) s =", shown.display.console.file.getvalue())
    assert 0.02 <= float(rate) < 1
    shown.log_baselines({"teacher": {"person": 0.9}})
    shown.finish(result())
    assert not list(tmp_path.glob("mlruns"))


def test_links_name_the_latest_fusions(report, monkeypatch, capsys, paths):  # noqa: F811
    started = []
    monkeypatch.setattr("os.execv", lambda _, command: started.append(command))
    given = ["--port", "5055", "--backend-store-uri", paths.tracking]
    main(given)
    assert "no fusion has run in this folder yet" in capsys.readouterr().out
    runs = []
    for key in ("a1", "a2"):
        shown, running = report(key)
        with running, shown.attempt(DECISIONS[0].attempt):
            runs.append(shown.run_id)
    mlflow.create_experiment("something else")
    ((experiment, name, address),) = latest_fusions()
    assert (experiment, name) == ("valora/detection", "detection · rehearsal · seed 0")
    assert runs[-1] in address
    main(given)
    assert address.replace(":5000", ":5055") in capsys.readouterr().out
    assert "--port 5055" in " ".join(started[-1])


def test_the_trace_has_a_span_for_every_stage_and_attempt(report):
    shown, running = report()
    with running:
        shown.records = records(DECISIONS)
        with shown.training("without LoRA: person"):
            pass
        for decision in DECISIONS[:1]:  # of an earlier process
            shown.resumed([decision], [0.0])
        for decision in DECISIONS[1:]:
            with shown.attempt(decision.attempt) as on_step:
                on_step(7, 9, 0.5, {})
                shown.attempted(outcome(decision))
        shown.finish(result())
    (trace,) = mlflow.search_traces(return_type="list")
    assert trace.info.trace_metadata["mlflow.sourceRun"] == shown.run_id
    assert mlflow.get_run(shown.run_id).data.tags["valora.trace"] == trace.info.trace_id
    root, *_ = trace.data.spans
    assert root.name == "fuse detection" and root.inputs == {"required": dict.fromkeys(START, 0.5)}
    names = [one.name for one in trace.data.spans if one.parent_id == root.span_id]
    attempts = [
        ("" if one.verdict == "committed" else f"{one.verdict}: ") + one.attempt.name
        for one in DECISIONS
    ]
    attempts[2] = f"vehicle rolled back: {attempts[2]}"
    assert names == ["teach person", attempts[0], "without LoRA: person", *attempts[1:]]
    for decision, name in zip(DECISIONS, attempts, strict=True):
        (span,) = (one for one in trace.data.spans if one.name == name)
        committed = decision.verdict == "committed"
        assert span.status.status_code == ("OK" if committed else "ERROR")
        assert span.attributes["reason"] == decision.reason
        reached = {key: one["accuracy"] for key, one in span.attributes["domains"].items()}
        assert reached == dict(decision.accuracy)
        inside = [one for one in trace.data.spans if one.parent_id == span.span_id]
        if decision is DECISIONS[0]:  # of whose process nothing more is known
            assert [one.name for one in inside] == ["decide"]
            continue
        assert [one.name for one in inside] == ["train", "evaluate person", "decide"]
        assert span.attributes["steps"] == 7 and span.attributes["peak_memory_gb"] > 0
        missed = inside[1].status.status_code == "ERROR"
        assert missed == ("person" in decision.below)
