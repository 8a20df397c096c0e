"""Texts about attempts, domains and licences: the same in MLflow, card and terminal."""

import json
import math
import random
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.unit.valora_train.fusion.test_plan import DECISIONS, PACKING, RECORDS, decision
from valora_data.contract.bundle import Bundle
from valora_train.fusion.decision import Verdict, attempts_as_json
from valora_train.fusion.plan import FusionPlan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.strategies.base import Probe
from valora_train.fusion.strategies.registry import make_strategy
from valora_train.reporting import texts
from valora_train.reporting.cards import bundle_card
from valora_train.reporting.licences import UNKNOWN, find_licences, licence_tags
from valora_train.reporting.texts import attempt_page, outcome_of
from valora_train.settings import DomainSettings, Settings, SourceSettings, TeacherSettings

COLUMNS = (*texts.REPORTED, *texts.BESIDE_OTHERS)

HERE, THERE = "small CPU, 2 cores", "large GPU"
DOMAINS = {
    "bicycle": {
        "metric": "f1", "task": "detection", "required": 0.9, "bar": 0.92, "status": "met",
        "adapter": "adapter-1", "contract": {"required": None, "of_dedicated": 0.95},
        "accuracy": {
            "val": 0.931, "test": 0.935, "test_ci95": [0.912, 0.951], "test_map": 0.675,
            "test_ece": 0.021, "teacher": 0.93, "teacher_map": 0.779,
            "teacher_ece": 0.034, "head_only": 0.61, "head_only_val": 0.6,
        },
        "speed": {
            "images_per_second": 35.2, "machine": HERE,
            "teacher": {"images_per_second": 61.9, "machine": HERE},
        },
    },
    "people_count": {
        "metric": "exact", "task": "counting", "required": 0.8, "bar": 0.82, "status": "missed",
        "adapter": None, "reason": "without LoRA 0.830 ≥ 0.820: takes no adapter",
        "accuracy": {
            "val": 0.83, "test": 0.79, "test_ci95": [0.75, 0.84], "test_within_one": 0.97,
            "teacher": 0.88, "teacher_within_one": 0.99, "head_only": 0.79,
        },
        "speed": {
            "images_per_second": 140.0, "machine": HERE,
            "teacher": {"images_per_second": 1096.4, "machine": THERE},
        },
    },
    "own_words": {  # of an earlier version, without a teacher
        "metric": "cider", "task": "caption", "required": 3.0, "status": "met",
        "adapter": "adapter-2",
        "accuracy": {
            "val": 4.2, "test": 4.1, "test_ci95": [3.9, 4.4], "teacher": None, "head_only": 0.4,
        },
    },
}  # fmt: skip
ADAPTERS = {
    "adapter-1": {
        "path": "adapters/adapter-1", "rank": 16, "bytes": 1_234_567, "domains": ["bicycle"],
    },
    "adapter-2": {
        "path": "adapters/adapter-2", "rank": 8, "bytes": 900, "domains": ["own_words"],
    },
}  # fmt: skip


def manifest(**more):
    return {
        "name": "own", "version": 2, "strategy": "rehearsal", "attempts": 4,
        "base": {"id": "tiny"}, "adapters": ADAPTERS, "domains": DOMAINS, "rejected": [],
        "licenses": {"base": "MIT", "domains": {}}, **more,
    }  # fmt: skip


def result(**more):
    speed = {name: facts.get("speed") for name, facts in DOMAINS.items()}
    domains = {
        name: {key: value for key, value in facts.items() if key != "speed"}
        for name, facts in DOMAINS.items()
    }
    return {
        "strategy": "rehearsal", "packing": {"adapter-1": ["bicycle"], "adapter-2": ["own_words"]},
        "adapters": ADAPTERS, "domains": domains, "speed": speed, "attempts": RECORDS,
        "seconds": [1.0, 1.0], **more,
    }  # fmt: skip


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def first_lines(page):
    return [line for line in page.split("| domain |", maxsplit=1)[0].splitlines() if line]


def test_the_first_lines_say_all_that_was_decided():
    assert [first_lines(attempt_page(RECORDS[number])) for number in (0, 2, 5)] == [
        ["**Committed**: tried person in adapter-1, a new adapter of its own.",
         "Every domain keeps what it must; closest is person, which rose from 0.500 without LoRA "
         "to 0.950, 0.030 above its target of 0.920 (required 0.900 + margin 0.020)."],
        ["**Committed, vehicle rolled back**: tried bicycle and vehicle together in adapter-2, a "
         "new adapter.",
         "vehicle rose from 0.300 without LoRA to 0.600, 0.120 below its target of 0.720 (required "
         "0.700 + margin 0.020).",
         "bicycle moved on to adapter-1 with attempt 07; vehicle went to adapter-1 with attempt "
         "04."],
        ["**Rolled back**: tried plate in adapter-2 beside bicycle; plate would move there.",
         "bicycle fell from 0.830 to 0.810, 0.010 below its target of 0.820 (required 0.800 + "
         "margin 0.020).",
         "plate stays in adapter-3."],
    ]  # fmt: skip
    dedicated = attempts_as_json(DECISIONS, PACKING, dedicated={5})[4]
    assert first_lines(attempt_page(dedicated))[0] == (
        "**Unreachable**: tried plate in adapter-3 with its dedicated adapter: nothing was trained."
    )
    page = attempt_page(RECORDS[1])
    assert "| **person** | held | 0.950 | 0.910 | -0.040 | 0.920 | -0.010 |" in page
    assert "| bicycle | new | 0.400 | 0.850 | +0.450 | 0.820 | +0.030 |" in page
    assert "| bicycle | moved here | 0.830 | 0.825 | -0.005 |" in attempt_page(RECORDS[6])


def only(**facts):
    facts = {"number": 2, "new": ["bicycle"], "adapter": "adapter-1", "held": ["person"],
             "verdict": Verdict.ROLLED_BACK, "below": ["person"]} | facts  # fmt: skip
    (one,) = attempts_as_json([decision(**facts)], {"adapter-1": ("person",)})
    return one


def test_small_gaps_are_not_shown_as_nothing_and_a_divergence_says_so():
    assert "0.00004 below" in outcome_of(only(accuracy={"person": 0.91996, "bicycle": 0.9}))
    same = only(accuracy={"person": 0.5001, "bicycle": 0.9})
    assert outcome_of(same).startswith("person stayed at 0.500, 0.420 below")
    bad = only(number=1, new=["person"], held=[], accuracy={"person": math.nan},
               verdict=Verdict.UNREACHABLE)  # fmt: skip
    assert outcome_of(bad) == "a reason"
    assert "| **person** | new | 0.500 | – | – | 0.920 | – |" in attempt_page(bad)


@pytest.mark.parametrize("strategy", ["paper", "affinity", "joint"])
@pytest.mark.parametrize("seed", range(8))
def test_texts_hold_for_whatever_a_strategy_does(strategy, seed):
    """Every page agrees with the plan itself, whatever accuracies come out."""
    rng = random.Random(seed)
    names = [f"d{number}" for number in range(6)]
    requirements = {name: Requirement(rng.uniform(0.6, 0.8), 0.02) for name in names}
    asked = requirements.items()
    probes = {name: Probe(one.required, rng.uniform(0.2, 0.85)) for name, one in asked}
    plan = FusionPlan(requirements, make_strategy(strategy), probes=probes)
    held = {name: probe.head_only for name, probe in probes.items()}
    made = []
    while (attempt := plan.next()) is not None:
        before = {name: held[name] for name in attempt.domains}
        reached = {name: rng.uniform(0.55, 0.95) for name in attempt.domains}
        made.append((before, reached, plan.tell(reached)))
        held |= {name: reached[name] for name in made[-1][2].kept}
    record = attempts_as_json(plan.decisions, plan.packing, plan.head_only)
    for one, (before, reached, done) in zip(record, made, strict=True):
        assert one["before"] == before
        assert texts.verdict_of(one).capitalize() in attempt_page(one).splitlines()[0]
        for name in done.below:
            how = "fell" if reached[name] < before[name] else "rose"
            if f"{reached[name]:.3f}" != f"{before[name]:.3f}":
                assert f"{name} {how} from {before[name]:.3f}" in outcome_of(one)
            assert f"to {reached[name]:.3f}" in outcome_of(one)
        home = {name: adapter for adapter, names in plan.packing.items() for name in names}
        for name in done.attempt.new:
            if home.get(name) != done.attempt.adapter:
                assert f"{name} " in texts.consequences(one)
                assert home.get(name, "takes no adapter") in one["went"][name]
    rejected = [one for *_, one in made if one.verdict != "committed" or one.left_out]
    assert len(texts.rejected_lines(record)) == len(rejected)
    assert texts.rejected_lines([{"verdict": "rolled back", "domain": "of an old version"}]) == []


def test_each_line_says_everything_of_a_domain():
    lines = texts.domain_table(DOMAINS, ADAPTERS, COLUMNS)
    rows = {cells(line)[0]: dict(zip(cells(lines[0]), cells(line), strict=True)) for line in lines}
    assert rows["bicycle"] == {
        "domain": "bicycle", "metric": "f1", "adapter": "adapter-1 (rank 16, 1.2 MB)",
        "target": "0.920", "validation": "0.931", "slack": "+0.011", "required": "0.900",
        "test (95 %)": "0.935 (0.912–0.951)", "without LoRA": "0.610",
        # 0.95 of what its own adapter reaches is required: 0.9 / 0.95 = 0.947.
        "of its own adapter": "99 % of 0.947, at least 96.3 %",
        "of the teacher": "101 % of 0.930", "mAP": "0.675, 87 % of 0.779",
        "calibration error": "0.021 (teacher 0.034)", "images/s": "35.2 (teacher 61.9)",
        "other metrics": "–",
    }  # fmt: skip
    assert rows["people_count"]["test (95 %)"] == "0.790 (0.750–0.840), missed"
    assert rows["people_count"]["adapter"] == "none"
    assert rows["people_count"]["images/s"] == "140 (teacher 1,096 on large GPU)"
    assert rows["people_count"]["other metrics"] == "within_one 0.970 (teacher 0.990)"
    old = rows["own_words"]
    assert old["adapter"] == "adapter-2 (rank 8, 900 bytes)"
    assert {old[key] for key in ("target", "mAP", "of the teacher", "images/s")} == {"–"}
    words = {"own_words": DOMAINS["own_words"]}
    alone = texts.domain_table(words, ADAPTERS, COLUMNS)
    said = set(cells(alone[0]))
    assert not {"target", *texts.BESIDE_OTHERS} & said  # of which nothing is known of any domain
    assert not texts.domain_table(words, ADAPTERS, ("domain", *texts.BESIDE_OTHERS))


def test_the_terminal_loses_no_figure_however_narrow_it_is():
    console, rejected = Console(file=StringIO(), width=80), texts.rejected_lines(RECORDS)
    texts.print_summary(
        Bundle(Path("bundles/own"), manifest(rejected=rejected)), console, 61.0,
        "http://127.0.0.1:5000/#/experiments/1/runs/0123456789abcdef?workflowType=machine_learning",
    )  # fmt: skip
    said = console.file.getvalue()
    for figure in ("0.935", "0.675", "87", "0.034", "61.9", "0.920"):
        assert figure in said
    assert "2 of 3 domains at their requirement on test, in 2 adapters after 4 attempts" in said
    assert "runs/0123456789abcdef?workflowType=machine_learning\n" in said
    assert "person fell from 0.950" in " ".join(said.split())


def test_the_page_shows_the_packing_and_what_it_was_chosen_over():
    page = texts.fusion_page(result(), "run-7")
    assert page.startswith(
        "**3 domains in 2 adapters** after 7 attempts (3 committed, 2 rolled back, 1 committed in "
        "part, 1 unreachable), strategy `rehearsal`; 2 of 3 at their requirement on test.\n"
    )
    packed = [cells(line)[0] for line in page.splitlines() if "f1" in line or "cider" in line]
    assert packed == ["bicycle", "own_words"]  # in the order of their adapters
    assert "- **02 bicycle → adapter-1**, rolled back: person fell from 0.950 to 0.910" in page
    assert "- **people_count**: without LoRA 0.830 ≥ 0.820: takes no adapter" in page
    assert "| 101 % of 0.930 | 0.675, 87 % of 0.779 | 0.021 (teacher 0.034) |" in page
    assert "run_uuid=run-7" in page
    long = texts.fusion_page(result(attempts=RECORDS * 40), "run-7")
    assert len(long) <= texts.NOTE_LENGTH
    assert long.endswith("more: see the runs of the attempts")
    assert "| people_count |" in long and "| 101 % of 0.930 |" in long  # these are whole


def test_the_card_lists_domains_and_what_was_rejected():
    accuracy = DOMAINS["bicycle"]["accuracy"] | {"confusion": {}}
    domains = DOMAINS | {"bicycle": DOMAINS["bicycle"] | {"accuracy": accuracy}}
    card = bundle_card(manifest(domains=domains, rejected=texts.rejected_lines(RECORDS)))
    for line in texts.domain_table(domains, ADAPTERS, COLUMNS):
        assert line in card
    assert "| `adapters/adapter-1` | 16 | 1.2 MB | bicycle |" in card
    assert "- **06 plate → adapter-2**, rolled back: bicycle fell from 0.830 to 0.810" in card
    assert "pictures/bicycle-confusion.png" in card and "pictures/own_words-conf" not in card
    assert "from peft import" in card
    old = bundle_card(manifest(adapters={}))
    assert not any(one in old for one in ("Rejected attempts", "from peft import"))
    # The speed of all domains at once.
    speed = {"domains": 6, "images_per_second": 91.24, "machine": HERE, "teacher": None}
    line = "All 6 domains of an image: 91.2 images/s"
    assert texts.speed_line({"speed": speed}) == f"{line} ({HERE})."
    speed["teacher"] = {"images_per_second": 103.1, "machine": HERE}
    line += "; their small models one after the other: 103"
    for on, where in ((HERE, HERE), ("H200", f"H200, small models on {HERE}")):
        assert texts.speed_line({"speed": speed | {"machine": on}}) == f"{line} ({where})."
    assert texts.speed_line({}) is None


CARD = "---\nlicense: cc-by-4.0\n---\n# Cats\n"
NAMED = [{"id": 1, "name": "CC BY 4.0"}, {"id": 2, "name": "CC BY-NC 2.0"}]
COCO = {"licenses": NAMED, "images": [{"id": 1, "license": 1}]}


def found(source, base="tiny", **facts):
    domain = DomainSettings("cat", labels=["cat"], source=source, **facts)
    every = find_licences(Settings(domains={"cat": domain}, base_license=base), ["cat"])
    return every["domains"]["cat"]


@pytest.mark.parametrize(
    ("kind", "files", "path", "licence"),
    [
        ("yolo", {"data.yaml": "license: MIT\n"}, "data.yaml", "MIT"),
        ("yolo", {"data.yaml": "roboflow: {license: CC BY 4.0}\n"}, "", "CC BY 4.0"),
        ("yolo", {"data.yaml": "names: [cat]\n", "README.md": CARD}, "data.yaml", "cc-by-4.0"),
        ("yolo", {"data.yaml": "{"}, "data.yaml", UNKNOWN),
        ("coco", {"cats.json": json.dumps(COCO)}, "cats.json", "CC BY 4.0"),
        ("coco", {"cats.json": json.dumps(COCO | {"images": []})}, "", "CC BY 4.0, CC BY-NC 2.0"),
        ("yolo", {"data.yaml": "names: [cat]\n", "LICENSE": "MIT"}, "data.yaml", "see LICENSE"),
        ("imagefolder", {"a.json": '{"licenses": [1], "images": null}'}, "", UNKNOWN),
        ("imagefolder", {}, "", UNKNOWN),
        ("hub", {}, "../nobody/nothing", UNKNOWN),
    ],
)
def test_data_sets_say_their_licence(kind, files, path, licence, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    source = SourceSettings(kind=kind, path=str(tmp_path / path))
    assert found(source, teacher="labels") == {"data": licence, "teacher": None}
    assert found(source, teacher="labels", license="mine")["data"] == "mine"


@pytest.mark.parametrize(
    ("kind", "teacher", "licence"),
    [
        ("yolo", "train", "AGPL-3.0"),
        ("small", "train", "trained here"),
        ("huggingface", "{folder}", "cc-by-4.0"),
        ("huggingface", "nobody/nothing", UNKNOWN),
        ("function", "package.module:function", UNKNOWN),
    ],
)
def test_teachers_have_that_of_their_kind_or_card(kind, teacher, licence, tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    facts = {"teacher": teacher.format(folder=tmp_path), "taught_by": TeacherSettings(kind=kind)}
    drawn = SourceSettings()
    assert found(drawn, **facts) == {"data": "drawn here", "teacher": licence}
    assert found(drawn, teacher_license="bought", **facts)["teacher"] == "bought"


def test_base_models_and_tags():
    domain = DomainSettings("cat", labels=["cat"], teacher="labels")
    licences = find_licences(Settings(domains={"cat": domain}), ["cat"])
    assert licence_tags(licences) == {
        "license.base": "apache-2.0", "license.cat.data": "drawn here",
    }  # fmt: skip
