"""The line of each domain: the same figures in the card, in MLflow and in the terminal."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from valora_data.contract.bundle import Bundle
from valora_train.reporting.bundle_card import bundle_card
from valora_train.reporting.domain_table import BESIDE_OTHERS, PROMISES, domain_table
from valora_train.reporting.summary import print_summary
from valora_train.reporting.text import bytes_text, share_text

HERE, THERE = "small CPU, 2 cores", "large GPU"
DOMAINS = {
    "bicycle": {
        "metric": "f1", "task": "detection", "required": 0.9, "bar": 0.92, "status": "met",
        "adapter": "adapter-1",
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
        "adapter": None,
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
    "adapter-2": {"path": "adapters/adapter-2", "rank": 8, "domains": ["own_words"]},
}  # fmt: skip


def test_each_line_says_everything_of_a_domain():
    titles, rows = domain_table(DOMAINS, ADAPTERS, (*PROMISES, *BESIDE_OTHERS))
    lines = {row[0]: dict(zip(titles, row, strict=True)) for row in rows}
    assert lines["bicycle"] == {
        "domain": "bicycle", "metric": "f1", "adapter": "adapter-1 (rank 16, 1.2 MB)",
        "required": "0.900", "bar": "0.920", "validation": "0.931",
        "test (95 %)": "0.935 (0.912–0.951)", "without LoRA": "0.610",
        "of the teacher": "101 % of 0.930", "mAP": "0.675, 87 % of 0.779",
        "calibration error": "0.021 (teacher 0.034)", "images/s": "35.2 (teacher 61.9)",
        "other metrics": "–",
    }  # fmt: skip
    assert lines["people_count"]["test (95 %)"] == "0.790 (0.750–0.840), missed"
    assert lines["people_count"]["adapter"] == "none"
    assert lines["people_count"]["images/s"] == "140 (teacher 1,096 on large GPU)"
    assert lines["people_count"]["other metrics"] == "within_one 0.970 (teacher 0.990)"
    old = lines["own_words"]
    assert old["adapter"] == "adapter-2 (rank 8)"
    assert {old[key] for key in ("bar", "mAP", "of the teacher", "images/s")} == {"–"}


def test_what_its_own_adapter_reaches_is_said_with_the_lower_bound():
    # 0.95 of what its own adapter reaches is required: 0.9 / 0.95 = 0.947.
    told = DOMAINS["bicycle"] | {"contract": {"required": None, "of_dedicated": 0.95}}
    titles, rows = domain_table({"bicycle": told}, ADAPTERS, BESIDE_OTHERS)
    said = dict(zip(titles, rows[0], strict=True))
    assert said["of its own adapter"] == "99 % of 0.947, at least 96.3 %"


def test_columns_that_say_nothing_are_left_out():
    words = {"own_words": DOMAINS["own_words"]}
    titles, rows = domain_table(words, ADAPTERS, (*PROMISES, *BESIDE_OTHERS))
    assert not {"bar", *BESIDE_OTHERS} & set(titles)
    assert len(rows[0]) == len(titles)


def manifest():
    return {
        "name": "own", "version": 2, "strategy": "rehearsal", "attempts": 4,
        "base": {"id": "tiny"}, "adapters": ADAPTERS, "domains": DOMAINS,
    }  # fmt: skip


def test_the_card_and_the_terminal_show_these_lines():
    _, rows = domain_table(DOMAINS, ADAPTERS, (*PROMISES, *BESIDE_OTHERS))
    card = bundle_card(manifest())
    for row in rows:
        assert f"| {' | '.join(row)} |" in card
    assert "| `adapters/adapter-1` | 16 | 1.2 MB | bicycle |" in card
    console = Console(file=StringIO(), width=200)
    print_summary(Bundle(Path("bundles/own"), manifest()), console, 61.0, None)
    said = console.file.getvalue()
    for row in rows:
        for text in row:
            assert text in said, text
    assert "2 of 3 domains at their requirement on test, in 2 adapters after 4 attempts" in said


def test_a_narrow_terminal_loses_no_figure():
    console = Console(file=StringIO(), width=80)
    print_summary(Bundle(Path("bundles/own"), manifest()), console, 61.0, None)
    said = " ".join(console.file.getvalue().split())
    for figure in ("0.935", "0.675", "87", "0.034", "61.9", "0.920"):
        assert figure in said


def test_shares_and_sizes():
    assert share_text(0.945, 0.977) == "97 %"
    assert share_text(0.5, 0.0) == "–"
    assert [bytes_text(size) for size in (12, 640_000, 1_234_567, 134_217_728, 2_500_000_000)] == [
        "12 B", "640 kB", "1.2 MB", "134 MB", "2.5 GB",
    ]  # fmt: skip
