"""LoRA terms of works and rows in unmerged, merged and mixture mode."""

import numpy as np
import pytest

from tests.bench.valora_kernels.operators.base import row_terms
from valora_kernels.metadata import NONE, LoraBatch
from valora_serve.model.work import AdapterTable, LoraTerms, Work


def works(*adapters, counts=None):
    counts = counts or [1] * len(adapters)
    return [
        Work(place, 0, count, None, [0], adapter)
        for place, (adapter, count) in enumerate(zip(adapters, counts, strict=True))
    ]


def test_unmerged_rows_have_their_own_adapter():
    terms = LoraTerms.of(works(2, NONE, 0), NONE)
    assert terms.width == 1
    assert terms.adapters.tolist() == [[2], [NONE], [0]]
    assert terms.coefficients.tolist() == [[1], [1], [1]]
    assert LoraTerms.of(works(NONE, NONE), NONE) is None


def test_rows_behind_those_of_works_have_no_adapter():
    terms = LoraTerms.of(works(2, 1, NONE, counts=[2, 1, 1]), 1)
    assert terms.counts.tolist() == [2, 1, 1]
    table = AdapterTable(np.array([8, 16, 24], np.int32), np.array([0.5, 1, 2], np.float32))
    lora = LoraBatch(6, 3, "cpu", fixed=True)
    table.fill(lora, terms, 6)
    found = row_terms(lora)
    assert found.adapters.T.tolist() == [
        [2, 1], [2, 1], [NONE, NONE], [1, NONE], [NONE, NONE], [NONE, NONE],
    ]  # fmt: skip
    assert found.scale.T.tolist() == [[2, -1], [2, -1], [0, 0], [-1, 0], [0, 0], [0, 0]]
    with pytest.raises(ValueError, match="rows: expected at least the 4 of the runs, got 3"):
        table.fill(lora, terms, 3)
