"""The table of ways to answer: McNemar's test and shares, worked out by hand."""

from types import SimpleNamespace

import pytest

from tests.bench.valora_train.context_table import COLUMNS, mcnemar, rows_of


def test_mcnemars_exact_test():
    # 10 pairs differ, 2 in favour of the second: p = 2 · (C(10,0) + C(10,1) + C(10,2)) / 2^10.
    one = [True] * 8 + [False] * 2 + [True] * 5 + [False] * 3
    other = [False] * 8 + [True] * 2 + [True] * 5 + [False] * 3
    assert mcnemar(one, other) == pytest.approx(2 * 56 / 1024)
    assert mcnemar(other, one) == mcnemar(one, other)
    assert mcnemar(one, one) == 1.0
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        mcnemar(one, other[:-1])


def test_rows_compare_with_the_document_in_the_prompt():
    def measured(method, size, hits):
        said = {name: [(f"{name}{hit}", hit) for hit in all_] for name, all_ in hits.items()}
        return SimpleNamespace(
            method=method, size=size, said=said, bytes=1536.0, tokens=float(size), seconds=0.0
        )

    methods = {name: SimpleNamespace(title=name.upper()) for name in ("a", "prompt", "b")}
    found = [
        measured("prompt", 0, {"y": [True, True], "x": [True, False]}),
        measured("b", 32, {"y": [True, False], "x": [False, False]}),
        measured("b", 16, {"y": [True, True], "x": [True, True]}),
    ]
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(found, methods, "prompt")]
    assert [(row["way"], row["tokens"]) for row in rows] == [
        ("PROMPT", "0"), ("B", "16"), ("B", "32"),
    ]  # fmt: skip
    assert [row["of the prompt's"] for row in rows] == ["", "133%", "33%"]
    assert [row["same answers"] for row in rows] == ["", "75%", "50%"]
    assert rows[0]["p (McNemar)"] == "" and rows[2]["p (McNemar)"] == "0.5"
    assert rows[1]["accuracy (95 %)"] == "1.000 (1.000–1.000)"
    assert rows[0]["bytes a document"] == "1,536"
