"""Stages: the fusion, what domains must reach, also by adapters of their own; export and push."""

import json
import shutil
from dataclasses import replace
from io import StringIO
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import yaml
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from tests.support.detection_sets import coco_domain
from tests.support.stores import new_store
from tests.support.website import Website
from valora_data import shards
from valora_data.contract.bundle import read_bundle
from valora_data.errors import ValoraError
from valora_data.schema import Answer, Box, Sample, Split, Task
from valora_serve.demo.command import BUNDLES
from valora_train.errors import SettingsError, UnreachableError
from valora_train.reporting.cards import with_metadata
from valora_train.reporting.progress import Display
from valora_train.settings import (
    AugmentSettings,
    DomainSettings,
    FusionSettings,
    HeadSettings,
    ModelSettings,
    PushSettings,
    Settings,
    TaskSettings,
    TrainSettings,
    as_dict,
)
from valora_train.stage import write_json
from valora_train.stages import dedicated
from valora_train.stages.distill import REPORT, TESTED
from valora_train.stages.export import _golden_examples, _keeps, _steady
from valora_train.stages.fuse import DomainInputs, check_result, fuse_stage
from valora_train.stages.push import push as push_bundle


def test_the_hash_has_what_changes_the_training_and_later_settings_where_they_are_used():
    plain = fuse_stage(Settings(), [])
    for group, key, value in (
        ("heads", "options", HeadSettings(options={"number": {"bias": 1.0}})),
        ("train", "augment", TrainSettings(augment=AugmentSettings(views=2, color=0.2))),
        ("model", "quantize", ModelSettings(quantize="nf4")),
    ):
        assert key not in plain.settings[group]
        asked = fuse_stage(replace(Settings(), **{group: value}), [])
        assert asked.settings[group][key] == as_dict(value)[key]
        assert asked.key != plain.key
    for changed, same in ({"unreachable": "keep"}, True), ({"margin": 0.03}, False):
        fusion = FusionSettings(**changed)
        assert (fuse_stage(Settings(fusion=fusion), []).key == plain.key) == same


def pseudo_labelled(folder, accuracy, test=None, **domain):
    """A domain whose teacher reaches an accuracy on validation, and perhaps another on test."""
    reached = {Split.VAL: accuracy, Split.TEST: accuracy if test is None else test}
    report = {"accuracy": {split: {"accuracy": value} for split, value in reached.items()}}
    write_json(folder / REPORT, {} if accuracy is None else report)
    settings = DomainSettings(name="cats", task=Task.DETECTION, labels=["cat"], **domain)
    return DomainInputs(settings.resolved(TaskSettings()), folder, folder)


def test_a_relative_requirement_is_a_share_of_the_teachers_accuracy(tmp_path):
    found = pseudo_labelled(tmp_path, 0.9, 0.7, required=None, of_teacher=0.8).requirement(0.02)
    assert found.required_on_test == pytest.approx(0.56)  # on test, like is compared with like
    for accuracy in (0.0, float("nan"), None):
        item = pseudo_labelled(tmp_path, accuracy, required=None, of_teacher=0.8)
        with pytest.raises(SettingsError, match=r"of domain cats .* 0\.8 of it .*cats\.of_t"):
            item.requirement()
    task = TaskSettings(type=Task.VIDEO, of_teacher=0.9)  # whose share domains with a teacher keep
    assert DomainSettings("x").resolved(task).of_teacher == 0.9
    assert DomainSettings("x", of_teacher=0.8).resolved(task).of_teacher == 0.8
    assert DomainSettings("x", teacher="labels").resolved(task).of_teacher is None


def test_a_stage_depends_on_all_that_its_targets_follow_from(tmp_path):
    def key(accuracy, **domain):
        return fuse_stage(Settings(), [pseudo_labelled(tmp_path, accuracy, 0.9, **domain)]).key

    plain = key(0.9, required=0.8)
    assert plain == key(0.95, required=0.8)  # nothing is asked of the teacher
    share = key(0.9, required=0.8, of_teacher=0.8)  # the same requirement
    assert len({plain, share, key(0.8, required=0.8, of_teacher=0.8)}) == 3


def test_a_finished_fusion_is_refused_if_a_domain_is_flagged(tmp_path):
    item = pseudo_labelled(tmp_path, None, required=0.8)
    result = {"unreachable": {"cats": 0.528}, "domains": {"cats": {}}}
    write_json(tmp_path / "fusion.json", result)
    keep = replace(Settings(), fusion=FusionSettings(unreachable="keep"))
    check_result(keep, [item], tmp_path)
    with pytest.raises(UnreachableError, match=r"cats reached 0\.528 < 0\.820 \(required 0\.800"):
        check_result(Settings(), [item], tmp_path)
    write_json(tmp_path / "fusion.json", result | {"unreachable": {}})
    check_result(Settings(), [item], tmp_path)


TRUTH = [(), (Box(1, 2, 9, 8, "cat", 1.0),), (), (Box(3, 1, 7, 9, "cat", 1.0),)]
SHOWN = [
    [{"label": "cat", "box": [n, n, 5 + n, 6 + n], "confidence": 0.5 + n / 8}] for n in range(4)
]


TASK = SimpleNamespace(video=False, golden=lambda found, threshold: [found, threshold])
MODEL = SimpleNamespace(  # it answers with the name of the sample
    tasks={"cat": TASK}, answer=lambda name, samples: [sample.id for sample in samples]
)


def test_answers_of_the_teacher_are_those_of_the_same_images(tmp_path):
    samples = [
        Sample(f"cat/test/{n}", Image.new("RGB", (10, 10), (50 * n, 0, 0)), Answer(boxes))
        for n, boxes in enumerate(TRUTH)
    ]
    shards.write(samples, ["cat"], tmp_path / "data" / Split.TEST)
    (tmp_path / "distilled").mkdir()
    (tmp_path / "golden").mkdir()
    item = SimpleNamespace(
        settings=SimpleNamespace(name="cat"), data=tmp_path / "data",
        distilled=tmp_path / "distilled",
    )  # fmt: skip
    manifest = {"domains": {"cat": {"threshold": 0.25}}}
    old = _golden_examples(tmp_path, manifest, item, MODEL, None)
    assert [example["expected"] for example in old] == [["cat/test/1", 0.25], ["cat/test/3", 0.25]]
    assert not any("teacher" in example for example in old)
    (item.distilled / TESTED).write_text(json.dumps(SHOWN))
    found = _golden_examples(tmp_path, manifest, item, MODEL, None)
    assert [example["teacher"] for example in found] == [SHOWN[1], SHOWN[3]]
    (item.distilled / TESTED).write_text(json.dumps([None, None, *SHOWN[2:]]))
    found = _golden_examples(tmp_path, manifest, item, MODEL, None)
    assert ["teacher" in example for example in found] == [False, True]
    with Image.open(tmp_path / found[1]["image"]) as image:
        assert image.getpixel((0, 0)) == (150, 0, 0)


def test_answers_that_16_bits_change_are_the_last_to_become_golden():
    task = SimpleNamespace(golden=lambda found, _: found, matches=lambda a, b, _: a == b)
    model, rounded = (
        SimpleNamespace(
            tasks={"cat": task}, answer=lambda _, some, odd=odd: [f"{x}{x in odd}" for x in some]
        )
        for odd in ("", "ac")
    )
    found = _steady("cat", "abcdefghijkl", [0, 1, 2, 3, 4], None, model, rounded)
    assert found == [1, 3, 4, 0, 2]


@pytest.mark.parametrize(
    ("reached", "kept"), [(0.9, True), (0.893, True), (0.889, False), (0.85, False)]
)
def test_a_bundle_keeps_in_16_bits_what_it_reached_and_must_reach(tmp_path, reached, kept):
    shards.write([Sample("x", Image.new("RGB", (9, 9)), Answer())], [], tmp_path / Split.TEST)
    item = SimpleNamespace(settings=SimpleNamespace(name="cat"), data=tmp_path)
    rounded = SimpleNamespace(accuracy=lambda *_: reached)
    for required, wanted in (0.88, kept), (0.895, reached == 0.9), (0.95, reached == 0.9):
        domains = {"cat": {"accuracy": {"test": 0.9}, "required": required}}
        assert _keeps(domains, item, rounded) == wanted


def test_a_bundle_arrives_whole_with_its_results(tmp_path, monkeypatch):
    made = {}

    def upload(api, *, folder_path, **asked):
        made.update(asked)
        shutil.copytree(folder_path, tmp_path / "fetched")
        return SimpleNamespace(commit_url="https://hub/me/pets/commit/1")

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda _, *at, **to: made.update(to))
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    asked = PushSettings("me/pets", str(BUNDLES / "detection"))
    assert push_bundle(Settings(push=asked)) == "https://hub/me/pets/commit/1"
    assert (made["repo_id"], made["private"], made["revision"]) == ("me/pets", True, None)
    fetched = read_bundle(tmp_path / "fetched")  # every file has its hash
    assert fetched.domains == read_bundle(BUNDLES / "detection").domains
    data = yaml.safe_load((tmp_path / "fetched" / "README.md").read_text().split("---\n")[1])
    assert (data["base_model"], data["pipeline_tag"]) == ("tiny", "object-detection")
    [index] = data["model-index"]
    results = {entry["task"]["name"]: entry for entry in index["results"]}
    assert set(results) == set(fetched.domains)
    for name, facts in fetched.domains.items():
        figures = {item["name"]: item["value"] for item in results[name]["metrics"]}
        assert figures["f1@0.5"] == pytest.approx(facts["accuracy"]["test"], abs=1e-4)


class Refusing(Website):
    def answer(self, path, body):
        return 401, {}, [b'{"error": "Invalid username or password."}']


def refused(said, *asked):
    with pytest.raises(ValoraError, match=said):
        push_bundle(Settings(push=PushSettings(*asked)))


def test_mistakes_and_hubs_that_refuse_or_are_away_are_sentences(monkeypatch):
    mine = "me/pets", str(BUNDLES / "detection")
    refused("set push.repo=owner/name")
    refused("is no bundle", "me/pets", "none")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with Refusing() as hub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        refused(r"a/b/c \(HFValidationError: ", "a/b/c", mine[1])
        refused(r"\(HfHubHTTPError: .*Invalid username or password", *mine)
    refused(r"\(ConnectError: \[Errno 111\] Connection refused\)", *mine)


def test_the_card_keeps_its_text_and_gets_one_front():
    manifest = read_bundle(BUNDLES / "detection").manifest
    card = with_metadata("---\nold: 1\n---\n# A\n\n---\nline\n", manifest)
    assert card.count("model-index") == 1 and "old: 1" not in card
    assert card.endswith("---\n# A\n\n---\nline\n")
    assert with_metadata(card, manifest) == card


@pytest.mark.parametrize("unreachable", ["fail", "keep"])
def test_a_domain_that_reaches_nothing_alone_keeps_its_contract(tmp_path, monkeypatch, unreachable):
    settings = Settings(fusion=FusionSettings(of_dedicated=0.9, unreachable=unreachable))
    alone = {"sky": (0.5, 0.0), "apple": (0.6, 0.4), "leaf": (None, None)}
    domain = DomainSettings("x", task=Task.DETECTION, labels=["x"], required=0.7)
    domains = [DomainInputs(replace(domain, name=name), tmp_path, tmp_path) for name in alone]
    for name, (val, test) in alone.items():
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / dedicated.REACHED, {"val": val, "test": test})
    monkeypatch.setattr(dedicated, "_train_missing", lambda *_: None)
    monkeypatch.setattr(dedicated, "_key", lambda _: "key")
    monkeypatch.setattr(
        dedicated, "dedicated_stage",
        lambda _, item: SimpleNamespace(folder=lambda _: tmp_path / item.settings.name),
    )  # fmt: skip
    display = Display(Console(file=StringIO(), width=300))
    if unreachable == "fail":
        with pytest.raises(SettingsError, match=r"reached by sky, leaf, .*raise train.steps"):
            dedicated.measure_dedicated(settings, domains, display)
        return
    found = dedicated.measure_dedicated(settings, domains, display)
    assert [item.dedicated for item in found] == [None, (0.6, 0.4, 0.9), None]
    assert found[0].contract == {"required": 0.7, "of_teacher": None}
    assert "reached by sky, leaf" in display.console.file.getvalue()


@pytest.fixture
def prepared(tmp_path, valora_train, random_llava):
    """Runs the command on two domains that take labels instead of a teacher; gives its output."""
    new_store(tmp_path)
    dog = coco_domain(tmp_path / "dogs", colour="blue", name="dog")
    given = [
        *coco_domain(tmp_path / "cats"), *dog[1:], "domains.cat.teacher=labels", "train.flip=false",
        "domains.dog.teacher=labels", f"model.id={random_llava}", "train.probe_steps=20",
    ]  # fmt: skip

    def run(*arguments):
        status, said = valora_train(*given, *arguments)
        assert status == 0, said
        return valora_train.out

    return run


@pytest.mark.slow
def test_requirements_follow_from_dedicated_adapters(prepared, tmp_path):
    asked = ["command=fuse", "fusion.of_dedicated=0.5", "fusion.unreachable=keep", "processes=1",
             "fusion.head_only=false", "fusion.processes=2", "train.seed=4", "train.steps=30",
             "train.threads=1", "train.batch_size=8", "train.lora.rank=4"]  # fmt: skip
    out = prepared(*asked)
    done = [line.split() for line in out.splitlines() if line.endswith(" s")]
    assert sorted(" ".join(words[:2]) for words in done if words[0] in ("data", "distill")) == [
        "data cat", "data dog", "distill cat:", "distill dog:",
    ]  # fmt: skip
    (folder,) = tmp_path.glob(".valora/fuse-own-*[0-9a-f]")
    fused = json.loads((folder / "fusion.json").read_text())
    for name in ("cat", "dog"):
        (alone,) = tmp_path.glob(f".valora/alone-{name}-*[0-9a-f]")
        reached = json.loads((alone / dedicated.REACHED).read_text())
        assert 0 < fused["domains"][name]["required"] == pytest.approx(0.5 * reached["test"])
        contract = {"required": None, "of_teacher": None, "of_dedicated": 0.5}
        assert fused["domains"][name]["contract"] == contract
    assert "dedicated adapter's" in out

    # A domain that shares with no other takes its dedicated adapter; nothing is trained again.
    prepared(*asked, "task.only=[cat]")
    (alone,) = tmp_path.glob(".valora/alone-cat-*[0-9a-f]")
    mine = load_file(alone / "snapshots" / dedicated.FILE)
    (file,) = tmp_path.glob(".valora/fuse-own-*[0-9a-f]/snapshots/adapter-1-01.safetensors")
    taken = load_file(file)
    assert set(taken) == set(mine)
    assert all(torch.equal(taken[name], mine[name]) for name in mine if name.startswith("lora/"))
