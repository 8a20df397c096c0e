"""LoRA terms of works and rows in unmerged, merged and mixture mode."""

import numpy as np

from valora_kernels.metadata import NONE
from valora_serve.model.work import LoraTerms, Work


def works(*adapters):
    return [Work(place, 0, 1, None, [0], adapter) for place, adapter in enumerate(adapters)]


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


def test_terms_of_works_become_terms_of_rows_and_are_padded():
    rows = LoraTerms.of(works(2, 1, NONE), 1).repeated(np.array([2, 1, 1])).padded(6)
    assert rows.adapters.tolist() == [
        [2, 1], [2, 1], [NONE, NONE], [NONE, 1], [NONE, NONE], [NONE, NONE],
    ]  # fmt: skip
    assert rows.coefficients[:4].tolist() == [[1, -1]] * 4
