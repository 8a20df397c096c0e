"""The README of a bundle: single classes and their pictures."""

from valora_train.metrics.per_class import choice_report
from valora_train.reporting.bundle_card import bundle_card, confusion_file


def manifest(**classes):
    accuracy = {"test": 0.75, "test_ci95": [0.7, 0.8], "head_only": 0.5, "teacher": None}
    facts = {"metric": "top1", "required": 0.7, "status": "met"}
    return {
        "name": "own", "version": 1, "strategy": "paper", "attempts": 1,
        "base": {"id": "tiny"},
        "adapters": {"adapter-1": {"path": "adapters/adapter-1", "rank": 8, "domains": ["a", "b"]}},
        "domains": {
            "a": facts | {"accuracy": accuracy | classes, "adapter": "adapter-1"},
            "b": facts | {"accuracy": accuracy, "adapter": "adapter-1"},
        },
    }  # fmt: skip


def test_classes_are_listed_the_worst_first():
    truth = ["cat", "cat", "cat", "dog"]
    report = choice_report(["cat", "cat", "dog", "dog"], truth, ["cat", "dog"])
    card = bundle_card(manifest(**report.as_json()))
    assert (
        "| a | dog | 1 | 0.500 | 1.000 | 0.667 | – |\n| a | cat | 3 | 1.000 | 0.667 | 0.800 |"
        in card
    )
    assert confusion_file("a") in card
    assert confusion_file("b") not in card


def test_a_bundle_of_an_older_fusion_has_no_classes():
    assert "## Classes" not in bundle_card(manifest())
