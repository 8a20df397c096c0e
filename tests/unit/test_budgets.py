"""Lines of Python by package, and of its tests: slices that delete lower them, reasons raise them.

`tests/bench` counts apart; what the tests of several packages share has no budget.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = "tests/bench"
BUDGETS = {
    "valora_train": 10_775,
    "data/valora_data": 9_354,
    "teachers/valora_teachers": 1_611,
    "kernels/valora_kernels": 3_762,
    "valora_serve": 25_012,
    "tests/*/valora_train": 7_152,
    "tests/*/valora_data": 3_602,
    "tests/*/valora_teachers": 1_153,
    "tests/*/valora_kernels": 1_935,
    "tests/*/valora_serve": 22_766,
    "tests/unit/bench": 1_581,
    BENCH: 12_932,
}


def lines(folders: str) -> int:
    """Lines of all Python files in the folders of a pattern."""
    return sum(
        file.read_bytes().count(b"\n")
        for file in ROOT.glob(f"{folders}/**/*.py")
        if folders == BENCH or not file.is_relative_to(ROOT / BENCH)
    )


@pytest.mark.parametrize("folders", BUDGETS)
def test_no_package_outgrows_its_budget(folders: str) -> None:
    assert lines(folders) <= BUDGETS[folders]
