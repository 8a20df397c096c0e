"""Tables are read as programs print them."""

import io
from pathlib import Path

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from tests.bench import figures

ROWS = [["1", "4.05"], ["8", "4.26"]]


def drawn(style: box.Box | None) -> str:
    table = Table(title="Decode step, ms", title_justify="left", box=style)
    for name in ("batch", "bare"):
        table.add_column(name, justify="right")
    for row in ROWS:
        table.add_row(*row, end_section=True)
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    return out.getvalue()


@pytest.mark.parametrize(
    "printed",
    [
        "## Decode step, ms\n\n| batch | bare |\n|---|---|\n| 1 | 4.05 |\n| 8 | 4.26 |\n",
        drawn(box.HEAVY_HEAD),
        drawn(box.MARKDOWN),
    ],
    ids=["markdown", "rich", "rich in markdown"],
)
def test_tables(printed: str) -> None:
    found = figures.tables(f"loading …\n{printed}\nfrom nothing: a remark\n{printed}")
    assert [one["title"] for one in found] == ["Decode step, ms"] * 2
    assert all(one["head"] == ["batch", "bare"] and one["rows"] == ROWS for one in found)


def test_a_line_between_tables_ends_the_first() -> None:
    found = figures.tables("| a |\n|---|\n| 1 |\n\n| b |\n|---|\n| 2 |\n")
    assert [one["rows"] for one in found] == [[["1"]], [["2"]]]


def test_a_page_gets_the_columns_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    figures.keep("decode", drawn(box.HEAVY_HEAD), commit="abc", date="2026-01-01", machine="a GPU")
    page = "A\n<!-- figure decode 0: bare -->\nold\n<!-- end -->\nB\n"
    new = figures.written(page)
    assert "| bare |\n| --- |\n| 4.05 |\n| 4.26 |\n\na GPU, 2026-01-01, commit abc" in new
    assert new.startswith("A\n") and new.endswith("<!-- end -->\nB\n")
    assert figures.written(new) == new
    assert not figures.waits("decode", 0)


def test_a_table_that_is_not_measured_stays() -> None:
    page = "<!-- figure no-such 0 -->\n| old |\n<!-- end -->\n"
    assert figures.waits("no-such", 0)
    assert figures.written(page) == page


def test_large_numbers_are_written_out() -> None:
    facts = {"machine": "a", "date": "b", "commit": "c", "name": "d"}
    table = {"head": ["tokens/s"], "rows": [["9.17e+03"], ["0.91 (4.4e+04)"]]}
    shown = figures.shown(facts | {"tables": [table]}, 0, None)
    assert "| 9,170 |\n| 0.91 (44,000) |" in shown
