"""Ways to answer about documents as one table, with intervals and McNemar's test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from valora_train.metrics.measures import Scores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = (
    "way", "tokens", "bytes a document", "accuracy (95 %)", "of the prompt's", "p (McNemar)",
    "same answers", "seconds a document",
)  # fmt: skip


def mcnemar(one: Sequence[bool], other: Sequence[bool]) -> float:
    """Two-sided p-value of McNemar's exact test: whether two ways answer equally well.

    Args:
        one: Whether each answer of the first way is right.
        other: The same of the second way, for the same questions.

    Raises:
        ValueError: They are of different lengths.
    """
    from scipy.stats import binomtest

    pairs = list(zip(one, other, strict=True))
    better = sum(a and not b for a, b in pairs)
    worse = sum(b and not a for a, b in pairs)
    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def rows_of(found: Sequence[Any], methods: Mapping[str, Any], reference: str) -> list[list[str]]:
    """The rows of the table with `COLUMNS`, in the order of the methods.

    *Same answers* is the share of questions that are answered as with the document in the prompt,
    rightly or not.

    Args:
        found: What was measured (`bench_context_ways.Measured`).
        methods: Methods by name, with their titles.
        reference: Name of the method that the others are compared with.
    """
    order = list(methods)
    base = next((_said(one) for one in found if one.method == reference), None)
    rows = []
    for one in sorted(found, key=lambda one: (order.index(one.method), one.size)):
        said = _said(one)
        hits = [right for _, right in said]
        scores = Scores(np.array(hits, np.float64))
        low, high = scores.interval()
        share = tested = same = ""
        if base is not None and one.method != reference:
            truth = [right for _, right in base]
            share = f"{scores.mean / max(float(np.mean(truth)), 1e-9):.0%}"
            tested = f"{mcnemar(hits, truth):.2g}"
            pairs = zip(said, base, strict=True)
            same = f"{np.mean([mine == other for (mine, _), (other, _) in pairs]):.0%}"
        rows.append([
            methods[one.method].title,
            f"{one.tokens:.0f}",
            f"{one.bytes:,.0f}",
            f"{scores.mean:.3f} ({low:.3f}–{high:.3f})",
            share,
            tested,
            same,
            f"{one.seconds:.1f}" if one.seconds else "",
        ])  # fmt: skip
    return rows


def _said(one: Any) -> list[tuple[str, bool]]:
    """Each answer with whether it is right, document after document."""
    return [(text, right) for name in sorted(one.said) for text, right in one.said[name]]
