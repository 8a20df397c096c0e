"""Parts of a batch side by side: order, modes of torch and errors are those of one thread."""

import threading

import pytest
import torch

from valora_train.model.lanes import Lanes


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_are_in_order_and_each_is_computed_on_one_core(count):
    before = torch.get_num_threads()
    weight = torch.ones(3, requires_grad=True)
    used = set()

    def call(factor):
        used.add(threading.get_ident())
        return (weight * factor).sum(), torch.get_num_threads()

    def run():
        return Lanes(count).run([lambda factor=factor: call(factor) for factor in range(5)])

    found = run()
    assert [float(value.detach()) for value, _ in found] == [0, 3, 6, 9, 12]
    assert all(value.requires_grad for value, _ in found)
    if count > 1:
        assert {threads for _, threads in found} == {1}
        assert threading.get_ident() not in used
    with torch.no_grad():
        assert not any(value.requires_grad for value, _ in run())
    assert torch.get_num_threads() == before


def test_an_error_is_that_of_the_call():
    before = torch.get_num_threads()

    def fail():
        raise ValueError("no such row")

    with pytest.raises(ValueError, match="no such row"):
        Lanes(2).run([fail, fail])
    assert torch.get_num_threads() == before
