"""Training on a base model in 4 bits: the same answers as on its unpacked weights."""

import pytest
import torch

from tests.support.training_lmm import disturb, questions
from valora_data.contract.quantized import unpack
from valora_train.model.lmm import Lmm
from valora_train.settings import LoraSettings, ModelSettings

pytest.importorskip("bitsandbytes")


def packed(folder):
    return Lmm(ModelSettings(id=str(folder), quantize="nf4"), LoraSettings(rank=4, alpha=12))


def gradients(lmm, family):
    """Last hidden states with an adapter, and the gradients of its weights."""
    lmm.adapters.add("one", seed=1)
    disturb(lmm, "one")
    states = lmm.states(lmm.encode(questions(family)))
    states.hidden.square().mean().backward()
    found = {name: p.grad for name, p in lmm.adapters.parameters("one").items()}
    return states.hidden.detach(), found


def test_hidden_states_and_gradients_are_those_of_the_rounded_weights(family, checkpoint, tmp_path):
    mine = packed(checkpoint)
    plain = packed(checkpoint)
    plain.model = unpack(plain.model, torch.float32)
    with torch.no_grad():  # nothing is repacked by a pass without gradients
        mine.states(mine.encode(questions(family)))
    hidden, grads = gradients(mine, family)
    expected, expected_grads = gradients(plain, family)
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    assert grads.keys() == expected_grads.keys()
    assert len(grads) == 2 * 4 * len(mine.language_model.layers)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], atol=1e-5, rtol=1e-3)
    trained = {name for name, p in mine.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    mine.adapters.save("one", tmp_path, "this")  # an adapter is saved and loaded
    mine.adapters.load("again", tmp_path)
    mine.adapters.activate("again")
    with torch.no_grad():
        found = mine.states(mine.encode(questions(family))).hidden
    torch.testing.assert_close(found, hidden, atol=1e-5, rtol=1e-5)
