"""Every yaml in conf/ composes and fits its dataclass; what does not exist is refused."""

import re
from collections import defaultdict
from itertools import zip_longest
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.support.configs import configured
from valora_data.errors import ValoraError
from valora_data.schema import Task
from valora_data.sources.registry import FORMATS
from valora_data.sources.scenes.builtin import SCENES, builtin_domain
from valora_train.cli import config_folder
from valora_train.errors import SettingsError
from valora_train.fusion.requirement import dedicated_requirement
from valora_train.settings import Settings, as_dict, from_config

CONF = config_folder()


def of_ones_own(kind: str, name: str = "cat") -> list[str]:
    """A domain of one's own, and what is left to say about it."""
    place = f"domains.{name}"
    labels = "[]" if kind in ("documents", "quality", "texts", "album") else "[cat,kitten]"
    more = {"images": [f"{place}.teacher=x.pt"], "labelstudio": [f"{place}.source.images=x"]}
    return [
        f"+domain@{place}={kind}", f"{place}.name={name}", f"{place}.labels={labels}",
        f"{place}.source.path=x.json", *more.get(kind, []),
    ]  # fmt: skip


OWN = of_ones_own("coco")


def settings(*overrides: str) -> Settings:
    return from_config(configured(*overrides))


def choices():
    """Every yaml once: files that replace no other in one composition, with their names."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in sorted(CONF.rglob("*.yaml")):
        if not file.stem.startswith("_"):
            files[file.parent.relative_to(CONF).as_posix()].append(file.stem)
    assert files.pop(".") == ["config"]
    files.pop("local", None)
    yield pytest.param([], id="config")
    formats = [name for name in files["domain"] if name in FORMATS]
    own = [part for name in formats for part in of_ones_own(name, f"x_{name}")]
    yield pytest.param(["task=own", *own], id=" ".join(formats))
    for name in [name for name in files.pop("domain") if name not in FORMATS]:
        yield pytest.param([f"task.only=[{name}]"], id=name)
    for group in [group for group in files if group.startswith("domain/")]:
        yield pytest.param(drawn(group.removeprefix("domain/"), files.pop(group)), id=group)
    for name in files.pop("experiment"):
        yield pytest.param([f"experiment={name}"], id=f"experiment={name}")
    for name in files.pop("task"):
        yield pytest.param([f"task={name}", *(OWN if name == "own" else [])], id=f"task={name}")
    for names in zip_longest(*files.values()):
        chosen = [f"{group}={name}" for group, name in zip(files, names, strict=True) if name]
        kind = ["teacher.kind=small"] if "teacher=own" in chosen else []
        yield pytest.param([*chosen, *kind], id=" ".join(chosen))


def drawn(task: str, names: list[str]) -> list[str]:
    more = [f"+domain/{task}@domains.x{number}={name}" for number, name in enumerate(names)]
    return [f"task={task}", *more, f"task.only=[{','.join(f'x{n}' for n in range(len(names)))}]"]


@pytest.mark.parametrize("overrides", choices())
def test_every_yaml_composes_and_fits(overrides):
    config = configured(*overrides)
    found = from_config(config)
    assert found.chosen()
    # Nothing that a dataclass asks for is left to its default: the yaml files hold the values.
    plain = OmegaConf.to_container(config, resolve=True)
    for group in ("task", "teacher", "model", "fusion", "heads", "train", "paths"):
        assert set(plain[group]) == set(as_dict(getattr(found, group))), group


DRAWN = [task for task in Task.all() if task is not Task.DETECTION and tuple(SCENES.get(task, ()))]


@pytest.mark.parametrize("task", DRAWN)
def test_built_in_domains_ask_and_answer_as_they_are_drawn(task):
    names = sorted(SCENES[task])
    for name, domain in zip(names, settings(*drawn(task, names)).chosen(), strict=True):
        assert domain.name == name
        assert domain.task is task
        assert tuple(domain.labels) == builtin_domain(task, name).labels
        assert domain.prompt == builtin_domain(task, name).prompt
        assert domain.source.counts["val"] >= 250


@pytest.mark.parametrize("task", Task.all())
def test_every_task_has_domains(task):
    found = settings(f"task={task}")
    assert len(found.chosen()) >= 2
    assert {domain.task for domain in found.chosen()} == {task}
    assert found.task.name == task


@pytest.mark.parametrize(
    ("kind", "more", "mirrors"),
    [
        ("imagefolder", [], True),
        ("imagefolder", ["domains.cat.task=caption", "domains.cat.labels=[]"], False),
        ("imagefolder", ["domains.cat.mirror=false"], False),
        ("hub", ["domains.cat.task=vqa"], False),
        ("coco", [], True),
        ("coco", ["domains.cat.task=caption", "domains.cat.labels=[]"], False),
        ("imagefolder", ["domains.cat.task=counting", "domains.cat.labels=['0','1']"], True),
        ("videofolder", [], False),
        ("hub", ["domains.cat.task=video"], False),
    ],
)
def test_only_answers_that_can_stand_it_are_mirrored(kind, more, mirrors):
    found = settings("task=own", *of_ones_own(kind), *more)
    assert found.domains["cat"].mirrors == mirrors


def test_mixed_holds_domains_of_several_tasks():
    found = settings("task=mixed")
    assert found.task.name == "mixed"
    tasks = {domain.name: domain.task for domain in found.chosen()}
    assert len(set(tasks.values())) == 6
    assert found.domains["person"].taught_by.kind == "yolo"
    assert found.domains["person"].taught_by.options["epochs"] == 18
    assert found.domains["digits"].taught_by is None
    assert found.teacher.kind == "small"


@pytest.mark.parametrize("group", ["model", "heads", "train", "paths"])
def test_there_is_one_set_of_defaults(group):
    assert getattr(settings("task=mixed"), group) == getattr(Settings(), group)


def test_the_default_strategy_is_that_of_the_settings():
    own = settings("task=own", *OWN, "fusion.order=given").fusion
    assert own == Settings().fusion


def test_detectors_must_keep_97_percent_of_their_teachers_and_bicycles_95():
    found = settings()
    asked = {domain.name: domain.of_teacher for domain in found.chosen()}
    assert asked.pop("bicycle") == 0.95
    assert set(asked.values()) == {0.97}
    assert (found.fusion.strategy, found.heads.objectness) == ("affinity", "iou")
    assert (found.train.lora.vision_tower, found.train.lora.projector) == (True, True)
    assert [found.train.steps_for(count, 0) for count in (1, 6)] == [420, 570]
    paper = settings("experiment=paper")
    assert {domain.of_teacher for domain in paper.chosen()} == {None}
    relative = settings("experiment=relative")
    assert {(one.required, one.of_teacher) for one in relative.chosen()} == {(None, 0.85)}


def test_domains_of_ones_own_are_tried_the_hardest_first():
    own = ["task=own", *OWN]
    found = settings(*own).fusion
    assert (found.strategy, found.order, found.head_only) == ("rehearsal", "probe", True)
    for how in ("fusion=paper", "experiment=paper"):
        found = settings(*own, how).fusion
        assert (found.strategy, found.order, found.head_only) == ("paper", "random", False)


def test_the_papers_requirements_are_the_default():
    required = {name: domain.required for name, domain in settings().domains.items()}
    assert required == {
        "license_plate": 0.80,
        "traffic_sign": 0.85,
        "vehicle": 0.80,
        "vegetation": 0.80,
        "bicycle": 0.80,
        "person": 0.80,
    }
    assert all(d.source.counts["val"] >= 300 for d in settings().domains.values())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("domains.person.required=1.5", r"person must lie in \(0, 1\], got 1.5"),
        ("domains.person.required=0", r"person must lie in \(0, 1\], got 0"),
        ("+domains.person.colour=red", "bad setting domains.person.colour='red'"),
        ("+nonsense=1", "bad setting nonsense=1"),
        ("train.steps=many", "bad setting train.steps='many'"),
        ("train.steps=0", "train.steps must be greater than 0, got 0"),
        ("train.lora.rank=-4", "train.lora.rank must be greater than 0, got -4"),
        ("fusion.order=best", "bad setting fusion.order='best'.*'given'"),
        ("fusion.margin=inf", "fusion.margin must be a number, got inf"),
        ("fusion.margin=nan", "fusion.margin must be a number, got nan"),
        ("train.rehearsal_share=1", "train.rehearsal_share must be less than 1, got 1"),
        ("task.only=[person,dragon]", "unknown domain 'dragon' of task detection: choose from"),
        ("+task.stricter.dragon=0.99", "unknown domain 'dragon' of task detection: choose from"),
        ("domains.person.labels=[]", "domain person needs a list of distinct labels"),
        ("domains.person.name=a-b", "domain name 'a-b' must be letters"),
        (
            "train.augment.crop=1",
            r"augment.crop must lie in \[0, 0.95\], got 1",
        ),
        ("train.augment.views=2", "asks for views that nothing changes: set train/augment=light"),
        ("train.augment.blur=2", "changes nothing without views: set train.augment.views=2"),
        (
            "train.lora.decode_only=true",
            r"train.lora adapts how images are encoded: .*\(train=default\)",
        ),
        ("task.type=poetry", "bad setting task.type='poetry'"),
        (
            "domains.person.source.kind=tar",
            "unknown source kind 'tar': choose one of album, coco, cvat",
        ),
    ],
)
def test_bad_settings_are_one_sentence(override, message):
    with pytest.raises(ValoraError, match=message) as caught:
        settings(override)
    assert "\n" not in str(caught.value)


def test_adapters_at_decoding_only_are_for_answers_that_follow_the_prompt():
    late = "train.lora.decode_only=true"
    for task in ("caption", "grounding", "context"):
        assert settings(f"task={task}", late).train.lora.decode_only
    with pytest.raises(SettingsError, match=r"detection\) is answered by .*decode_only=false$"):
        settings("task=detection", "train=default", late)
    with pytest.raises(SettingsError, match=r"=false or heads\.pooling=last"):
        settings("task=classification", late)
    for task in ("classification", "vqa"):
        assert settings(f"task={task}", late, "heads.pooling=last")


def test_own_task_without_domains_says_so():
    with pytest.raises(SettingsError, match="has no domain left to fuse"):
        settings("task=own")


def test_the_curve_commits_every_attempt():
    recipe = (CONF.parent / "Makefile").read_text().partition("\ncurve:")[2].partition("\n\n")[0]
    overrides = re.findall(r"fusion[.\w]*=\S+", recipe)
    assert len(overrides) == 4
    for task in ("caption", "classification", "detection"):
        found = settings(f"task={task}", *overrides)
        asked = dedicated_requirement(0.9, 0.9, found.fusion.of_dedicated, found.fusion.margin)
        assert 0 < asked.target < 1e-5
        assert not found.fusion.head_only


@pytest.mark.parametrize(
    ("task", "share"),
    [
        ("caption", 0.99),
        ("classification", 0.99),
        ("counting", 0.99),
        ("grounding", 0.99),
        ("mixed", 0.99),
        ("vqa", 0.99),
        ("video", None),
    ],
)
def test_tasks_without_good_teachers_are_measured_by_dedicated_adapters(task, share):
    found = settings(f"task={task}")
    assert found.fusion.of_dedicated == share
    of_teacher = {domain.of_teacher for domain in found.chosen()}
    assert of_teacher == {0.95 if share is None else None}


def test_config_is_what_a_wheel_carries():
    assert (Path(CONF) / "config.yaml").is_file()


def test_the_shelf_holds_every_built_in_domain():
    found = settings("task=shelf")
    names = [domain.name for domain in found.chosen()]
    built_in = [name for task in Task.all() for name in SCENES.get(task, ())]  # no documents
    assert sorted(names) == sorted(built_in)
    assert len(names) == 22
    assert {domain.task for domain in found.chosen()} == {*Task.all()} - {Task.CONTEXT}
    yolo = {domain.name for domain in found.chosen() if domain.taught_by is not None}
    assert yolo == set(SCENES[Task.DETECTION])
    assert found.fusion.of_dedicated == 0.95
