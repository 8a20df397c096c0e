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


def test_mixture_takes_the_merged_adapter_back_out_of_other_rows():
    terms = LoraTerms.of(works(2, 1, NONE), 1)
    assert terms.adapters.tolist() == [[2, 1], [NONE, NONE], [NONE, 1]]
    assert terms.coefficients.tolist() == [[1, -1]] * 3
    assert LoraTerms.of(works(1, 1), 1) is None


WEIGHTED = [
    # the weights of a request, the merged slot, its terms
    ([(2, 0.5)], NONE, {2: 0.5}),
    ([(2, 0.5), (0, -3.0)], NONE, {2: 0.5, 0: -3.0}),
    ([(2, 0.5)], 1, {2: 0.5, 1: -1.0}),
    ([(1, 0.5)], 1, {1: -0.5}),
    ([(1, 0.5), (2, 2.0)], 1, {1: -0.5, 2: 2.0}),
    ([(1, 1.0), (2, 2.0)], 1, {2: 2.0}),
]


@pytest.mark.parametrize(("weights", "merged", "expected"), WEIGHTED)
def test_terms_of_weights_beside_others(weights, merged, expected):
    """Rows before those that an adapter is applied to, and neighbours, have what they had."""
    others = works(2, NONE, 1)
    given = Work(3, 0, 3, None, [0], weights[0][0], weights, plain=1)
    terms = LoraTerms.of([*others, given], merged)
    found = [
        {slot: factor for slot, factor in zip(slots, factors, strict=True) if slot != NONE}
        for slots, factors in zip(terms.adapters.tolist(), terms.coefficients.tolist(), strict=True)
    ]
    back = {} if merged == NONE else {merged: -1.0}
    plain = [{2: 1.0} | back, back, {1: 1.0} if merged == NONE else {}]
    assert found == [*plain, back, expected]
    assert terms.counts.tolist() == [1, 1, 1, 1, 2]
    assert LoraTerms.of([Work(0, 0, 1, None, [0], 1, [(1, 1.0)])], 1) is None


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
