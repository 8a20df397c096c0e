"""The description of a fusion: packing, rejected alternatives, domains without an adapter."""

from tests.unit.valora_train.fusion.test_history import DECISIONS, PACKING, REQUIREMENTS, START
from tests.unit.valora_train.reporting.test_domain_table import ADAPTERS, DOMAINS, manifest
from valora_train.fusion.history import History
from valora_train.reporting.bundle_card import bundle_card
from valora_train.reporting.fusion_report import fusion_page
from valora_train.reporting.tracking import NOTE_LENGTH

TOLD = History(REQUIREMENTS, START).told(DECISIONS, PACKING)


def result(**more):
    speed = {name: facts.get("speed") for name, facts in DOMAINS.items()}
    domains = {
        name: {key: value for key, value in facts.items() if key != "speed"}
        for name, facts in DOMAINS.items()
    }
    domains["people_count"]["reason"] = "without LoRA 0.830 ≥ 0.820: takes no adapter"
    return {
        "strategy": "rehearsal", "packing": {"adapter-1": ["bicycle"], "adapter-2": ["own_words"]},
        "adapters": ADAPTERS, "domains": domains, "speed": speed, "attempts": TOLD, **more,
    }  # fmt: skip


def test_the_page_shows_the_packing_and_what_it_was_chosen_over():
    page = fusion_page(result(), "run-7")
    assert page.startswith(
        "**3 domains in 2 adapters** after 7 attempts (4 committed, 2 rolled back, 1 unreachable), "
        "strategy `rehearsal`; 2 of 3 at their requirement on test.\n"
    )
    rows = [line for line in page.splitlines() if line.startswith("| adapter-") or "| none" in line]
    assert rows[0].startswith("| adapter-1 (rank 16, 1.2 MB) | bicycle | f1 | 0.920 | 0.931 |")
    assert "| +0.011 | 0.900 | 0.935 (0.912–0.951) | 0.610 |" in rows[0]
    assert rows[-1].startswith("| none | people_count |")
    assert "- **02 bicycle → adapter-1**, rolled back: person fell from 0.950 to 0.910" in page
    assert "- **people_count**: without LoRA 0.830 ≥ 0.820: takes no adapter" in page
    assert "| bicycle | 101 % of 0.930 | 0.675, 87 % of 0.779 | 0.021 (teacher 0.034) |" in page
    assert "run_uuid=run-7" in page


def test_a_fusion_without_rejections_has_no_such_part():
    page = fusion_page(result(attempts=TOLD[:1]), "run-7")
    assert "Rejected" not in page
    assert "after 1 attempt (1 committed)" in page


def test_long_histories_fit_into_a_description():
    page = fusion_page(result(attempts=TOLD * 40), "run-7")
    assert len(page) <= NOTE_LENGTH
    assert "more: see the table steps.json" in page
    assert "| none | people_count |" in page  # the packing is whole
    assert "| bicycle | 101 % of 0.930 |" in page


def test_the_card_lists_what_was_rejected():
    from valora_train.reporting.attempt_text import rejected_lines

    card = bundle_card(manifest() | {"rejected": rejected_lines(TOLD)})
    assert "- **06 plate → adapter-2**, rolled back: bicycle fell from 0.830 to 0.810" in card
    assert "Rejected attempts" not in bundle_card(manifest())
