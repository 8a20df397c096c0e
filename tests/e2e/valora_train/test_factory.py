"""The factory end to end on two small labelled domains and a random LLaVA.

Whether it is accurate is for the slow cases; here: all parts meet, MLflow and the bundle say what
happened, a second run does nothing, and a run that is killed goes on as if nothing had been.
"""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from mlflow import MlflowClient
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.support.detection_sets import coco_domain
from tests.support.forked import Forked, finish, gate_here
from tests.support.stores import new_store
from valora_data.contract.bundle import read_bundle
from valora_train.stage import read_json

pytestmark = pytest.mark.slow

COLOURS = {"apple": "red", "sky": "blue"}


def overrides(folder, base):
    found = [
        "task=own", f"model.id={base}", "train=default", "fusion=first_fit", "fusion.order=given",
        "fusion.margin=0", "train.steps=60", "train.batch_size=8", "train.probe_steps=20",
        "train.lora.rank=4", "train.threads=1", "train.flip=false", "fusion.head_only=false",
        "processes=1",
    ]  # fmt: skip
    for name, colour in COLOURS.items():
        coco_domain(folder / name, colour=colour, name=name)
        found += [
            f"+domain@domains.{name}=coco",
            f"domains.{name}.name={name}",
            f"domains.{name}.labels=[{name}]",
            f"domains.{name}.source.path={folder / name}/cats.json",
            f"domains.{name}.required=0.3",
        ]
    return found


def valora_train(cwd, arguments, **options):
    new_store(cwd)
    return Forked("valora_train.cli", arguments, cwd, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory, random_llava):
    return overrides(tmp_path_factory.mktemp("data"), random_llava)


@pytest.fixture(scope="module")
def done(tmp_path_factory, data):
    """A finished run: its folder and what the terminal showed."""
    cwd = tmp_path_factory.mktemp("run")
    valora_train(cwd, ["--version"]).wait()  # what takes seconds is imported
    start = time.monotonic()
    said = finish(valora_train(cwd, data))
    (cwd / "took").write_text(str(time.monotonic() - start))
    return cwd, said


@pytest.fixture
def copied(tmp_path, done):
    """A copy of the finished run; its store points to the artifacts of the first."""
    return shutil.copytree(done[0], tmp_path / "run")


def failed(process):
    """What a process says, which must end with status 1, without its line breaks."""
    said = process.communicate(timeout=300)[0].replace("\n", " ")
    assert process.returncode == 1, said
    return said


def fusion(cwd):
    (folder,) = (cwd / ".valora").glob("fuse-own-*[0-9a-f]")
    return read_json(folder / "fusion.json")


def runs(cwd):
    client = MlflowClient(f"sqlite:///{cwd}/mlflow.db")
    experiment = client.get_experiment_by_name("valora/own")
    found = client.search_runs([experiment.experiment_id])
    parents = [r for r in found if "mlflow.parentRunId" not in r.data.tags]
    nested = [r for r in found if "valora.attempt" in r.data.tags]
    return client, parents, nested


def test_the_bundle_says_what_was_decided(done):
    cwd, said = done
    bundle = read_bundle(cwd / "bundles" / "own")
    result = fusion(cwd)
    assert {n: list(f["domains"]) for n, f in bundle.adapters.items()} == result["packing"]
    assert set(bundle.domains) == set(COLOURS)
    assert bundle.manifest["attempts"] == len(result["attempts"])
    for name, facts in bundle.domains.items():
        accuracy = facts["accuracy"]
        low, high = accuracy["test_ci95"]
        assert low <= accuracy["test"] <= high
        assert facts["required"] == 0.3
        assert accuracy["val"] >= 0.3
        assert accuracy["teacher"] is None
        assert name in said
        assert f"{accuracy['test']:.3f}" in said
    assert not list((cwd / "bundles").glob(".*"))
    assert not [p for p in (cwd / "bundles").rglob("*") if p.suffix in (".pkl", ".pt", ".bin")]
    assert "mlflow ui" in said


def test_some_attempt_was_committed_and_some_rolled_back(done):
    verdicts = [attempt["verdict"] for attempt in fusion(done[0])["attempts"]]
    assert "committed" in verdicts
    assert "rolled back" in verdicts


def test_adapters_load_in_plain_peft(done, random_llava):
    bundle = read_bundle(done[0] / "bundles" / "own")
    for facts in bundle.adapters.values():
        base = AutoModelForImageTextToText.from_pretrained(random_llava)
        model = PeftModel.from_pretrained(base, bundle.folder / facts["path"])
        moved = [p for n, p in model.named_parameters() if "lora_B" in n]
        assert len(moved) == 2 * 4
        assert all(p.abs().max() > 0 for p in moved)
        assert facts["rank"] == moved[0].shape[1]


def test_mlflow_shows_every_step(done):
    cwd, _ = done
    result = fusion(cwd)
    client, (parent,), nested = runs(cwd)
    assert parent.info.status == "FINISHED"
    assert len(nested) == len(result["attempts"])
    below = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    names = {r.info.run_name for r in client.search_runs([parent.info.experiment_id], below)}
    assert {f"{stage} {name}" for stage in ("data", "distill") for name in COLOURS} <= names
    for attempt in result["attempts"]:
        (domain,) = attempt["new"]
        title = f"{domain} → {attempt['adapter']} ({attempt['verdict']})"
        assert f"{attempt['number']:02d} {title}" in names
    for run in nested:
        number = int(run.data.tags["valora.attempt"])
        attempt = result["attempts"][number - 1]
        assert run.data.tags["valora.decision"] == attempt["verdict"]
        for name, accuracy in attempt["accuracy"].items():
            assert run.data.metrics[f"accuracy/{name}"] == pytest.approx(accuracy)
            assert run.data.metrics[f"required/{name}"] == 0.3
        for curve in ("loss", "lr", "head_lr"):
            assert len(client.get_metric_history(run.info.run_id, curve)) == 60
        note = run.data.tags["mlflow.note.content"]
        assert note.lower().startswith(f"**{attempt['verdict']}**: tried {attempt['new'][0]} in ")
        for name in attempt["below"]:
            assert f"{name} " in note.splitlines()[2]
            assert f"to {attempt['accuracy'][name]:.3f}" in note.splitlines()[2]
        if attempt["verdict"] == "rolled back":
            assert f"{attempt['new'][0]} went to " in note
        looks = client.get_metric_history(run.info.run_id, f"validation/{attempt['new'][0]}")
        assert looks[0].step == 12  # of 60 steps the first of four looks, if there is time for it
        pictures = [f.path for f in client.list_artifacts(run.info.run_id, "pictures")]
        assert f"pictures/{attempt['new'][0]}.png" in pictures
    note = parent.data.tags["mlflow.note.content"]
    for facts in result["domains"].values():
        assert f"{facts['accuracy']['val'] - facts['bar']:+.3f}" in note
    for attempt in result["attempts"]:
        assert (f"**{attempt['name']}**" in note) == (attempt["verdict"] != "committed")
    artifacts = {f.path for f in client.list_artifacts(parent.info.run_id)}
    assert {"bundle", "config.yaml"} <= artifacts
    assert len(parent.inputs.dataset_inputs) == 2 * len(COLOURS)
    version = client.get_model_version_by_alias("valora-own", "latest-fused")
    assert version.run_id == parent.info.run_id


def test_a_second_run_does_nothing_and_says_so(done, data):
    cwd, _ = done
    before = {p: p.stat().st_mtime_ns for p in (cwd / "bundles").rglob("*") if p.is_file()}
    said = finish(valora_train(cwd, data))
    assert said.count("up to date") >= 2 * len(COLOURS) + 2
    after = {p: p.stat().st_mtime_ns for p in (cwd / "bundles").rglob("*") if p.is_file()}
    assert before == after
    _, parents, nested = runs(cwd)
    assert len(parents) == 1
    assert len(nested) == len(fusion(cwd)["attempts"])


def test_the_gate_notices(done, tmp_path, random_llava):
    def gate(bundle, *more):
        return gate_here([sys.executable, "-m", "valora_train.stages.gate", str(bundle), *more])

    good = done[0] / "bundles" / "own"
    said = gate(good)
    assert said.returncode == 0, said.stderr
    changed = tmp_path / "changed"
    shutil.copytree(good, changed)
    with (changed / "README.md").open("a") as file:
        file.write("!")
    assert "'README.md' of bundle" in gate(changed).stderr
    other = tmp_path / "base"
    shutil.copytree(random_llava, other)
    model = AutoModelForImageTextToText.from_pretrained(other)
    with torch.no_grad():
        next(model.parameters()).add_(1e-3)
    model.save_pretrained(other)
    said = gate(good, "--base", str(other))
    assert said.returncode == 1
    assert "was made for base model" in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1


def test_new_work_keeps_the_older_bundle_beside_it(copied, data):
    finish(valora_train(copied, [*data, "task.only=[apple]"]))
    assert read_bundle(copied / "bundles" / "own").version == 2
    assert read_bundle(copied / "bundles" / "own@1").version == 1


def test_a_fusion_whose_run_was_lost_is_exported_with_a_new_one(copied, data):
    cwd = copied
    (cwd / "mlflow.db").unlink()
    shutil.rmtree(cwd / "bundles")
    finish(valora_train(cwd, data, gate=True))
    _, (parent,), _ = runs(cwd)
    assert parent.info.status == "FINISHED"
    bundle = read_bundle(cwd / "bundles" / "own")
    assert bundle.manifest["lineage"]["mlflow_run_id"] == parent.info.run_id
    assert parent.data.metrics["adapters"] == len(fusion(cwd)["packing"])
    (fused,) = (cwd / ".valora").glob("fuse-own-*[0-9a-f]")
    (fused / "fusion.json").write_text("{")
    shutil.rmtree(cwd / "bundles")
    remedy = f"delete {fused.relative_to(cwd)} and run the same command again"
    assert remedy in failed(valora_train(cwd, data))


def test_two_at_once_export_one_bundle(copied, data, tmp_path):
    shutil.rmtree(copied / "bundles")
    both = [valora_train(copied, data, log=tmp_path / f"{number}.txt") for number in range(2)]
    assert "".join(map(finish, both)).count("bundles/own  up to date") == 1
    assert [path.name for path in (copied / "bundles").iterdir()] == ["own"]
    assert read_bundle(copied / "bundles" / "own").version == 1


def test_something_else_in_its_place_is_not_touched(copied, data):
    bundles = copied / "bundles"
    shutil.rmtree(bundles / "own")
    (bundles / "own").mkdir()
    (bundles / "own" / "thesis.txt").write_text("mine")
    assert "exists and is not an intact bundle" in failed(valora_train(copied, data))
    assert [p.name for p in bundles.rglob("*")] == ["own", "thesis.txt"]


def test_what_is_out_of_reach_is_reported_with_what_was_reached(data, tmp_path):
    arguments = [*data, "task.only=[apple]", "domains.apple.required=1", "train.steps=5"]
    said = failed(valora_train(tmp_path, arguments))
    assert "apple reached 0." in said
    assert "< 1.000 (required 1.000)" in said
    assert "fusion.unreachable=keep" in said
    assert not (tmp_path / "bundles").exists()
    kept = finish(valora_train(tmp_path, [*arguments, "fusion.unreachable=keep"]))
    assert "0 of 1 domain at their requirement" in kept.replace("\n", " ")
    bundle = read_bundle(tmp_path / "bundles" / "own")
    assert bundle.domains["apple"]["status"] == "missed"


def decided(cwd):
    """Attempts that the fusion, finished or not, has on disk."""
    states = list((cwd / ".valora").glob("fuse-own-*/state.json"))
    return len(read_json(states[0])["told"]) if states else 0


def test_killed_at_any_moment_it_goes_on_as_if_nothing_had_been(done, data, tmp_path):
    reference = fusion(done[0])
    took = float((done[0] / "took").read_text())
    cwd = tmp_path / "killed"
    cwd.mkdir()
    moments = random.Random(11)
    before = 0
    for _ in range(3):
        process = valora_train(cwd, data)
        try:
            process.wait(moments.uniform(0.3, 0.9) * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        # What was decided stays decided: at most the attempt that was cut off is repeated.
        now = decided(cwd)
        assert now >= before
        before = now
    finish(valora_train(cwd, data))
    result = fusion(cwd)
    for key in ("packing", "unreachable", "domains"):
        assert result[key] == reference[key], key
    for one, other in zip(result["attempts"], reference["attempts"], strict=True):
        assert one == other
    _, parents, nested = runs(cwd)
    assert [run.info.status for run in parents] == ["FINISHED"]
    numbers = sorted(int(run.data.tags["valora.attempt"]) for run in nested)
    assert numbers == list(range(1, len(reference["attempts"]) + 1))
    assert all(run.info.status == "FINISHED" for run in nested)
    assert json.dumps(read_bundle(cwd / "bundles" / "own").adapters) == json.dumps(
        read_bundle(done[0] / "bundles" / "own").adapters
    )
