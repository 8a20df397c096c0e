"""LoRA terms of works and rows in unmerged, merged and mixture mode."""

from valora_kernels.metadata import NONE
from valora_serve.model.work import LoraTerms, Work


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


def test_terms_are_padded_with_a_run_without_an_adapter():
    terms = LoraTerms.of(works(2, 1, NONE, counts=[2, 1, 1]), 1)
    assert terms.counts.tolist() == [2, 1, 1]
    assert terms.padded(4) is terms
    padded = terms.padded(6)
    assert padded.adapters.tolist() == [[2, 1], [NONE, NONE], [NONE, 1], [NONE, NONE]]
    assert padded.coefficients[:3].tolist() == [[1, -1]] * 3
    assert padded.counts.tolist() == [2, 1, 1, 2]
