"""The context encoder: what it makes is what bundles say, and it learns to reconstruct."""

import pytest
import torch
from PIL import Image

from tests.support.lmm_checkpoints import CHECKPOINTS
from valora_data.contract.contexts import around_memory, read_encoder
from valora_data.errors import DataError
from valora_data.schema import Document
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings
from valora_train.stages import encoder_training
from valora_train.stages.encoder_training import ContextEncoder, one_cycle, train_encoder

DOCUMENTS = {"a": Document("417 color red\n820 thing star"), "b": Document("131 color blue")}


@pytest.fixture
def lmm(tmp_path):
    base = CHECKPOINTS["llava"](tmp_path / "base", seed=3)
    return Lmm(ModelSettings(id=str(base)), LoraSettings(rank=8, alpha=16))


def asked(lmm):
    def learnt(question, answer):
        return Example(question, (), context=True, answer=lambda _: answer)

    first = [learnt("417 color?", "red"), learnt("820 thing?", "star")]
    examples = {"a": first, "b": [learnt("131 color?", "blue")]}
    return {name: (DOCUMENTS[name], lmm.encode(examples[name])) for name in DOCUMENTS}


def test_it_learns_to_reconstruct_and_to_answer(lmm, monkeypatch):
    monkeypatch.setattr(encoder_training, "QUESTIONS", 6)
    module = ContextEncoder(lmm, 4, 0)
    losses = []
    train_encoder(
        module, asked(lmm), reconstruct=16, steps=16, lr=0.02, seed=0,
        on_step=lambda step, steps, loss: losses.append(loss),
    )  # fmt: skip
    assert len(losses) == 32
    assert sum(losses[12:16]) < 0.9 * sum(losses[:4])
    assert sum(losses[-4:]) < 0.9 * sum(losses[16:20])


def test_memory_tokens_are_computed_as_bundles_define_it(lmm, tmp_path):
    module = ContextEncoder(lmm, 4, 0)
    for weight in module.weights():  # B is zero at first, so that A would get no gradient
        torch.nn.init.normal_(weight.data, std=0.1)
    document, questions = asked(lmm)["a"]
    module.loss(document, questions).backward()
    for weight in [*module.weights(), module.queries, module.scale]:
        assert weight.grad is not None and weight.grad.abs().sum() > 0
    with pytest.raises(DataError, match="not albums"):
        module.encode(Document("", (Image.new("RGB", (8, 8)),)))
    with pytest.raises(DataError, match="and 4 memory tokens do not fit"):
        module.encode(Document("red star " * 9000))
    with torch.no_grad():
        made = module.encode(document)
    module.save(tmp_path / "encoder", "base")
    stored = read_encoder(tmp_path / "encoder", lmm.config.get_text_config())
    before, _ = around_memory(lmm)
    words = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"]
    table = lmm.model.get_input_embeddings()
    inputs = torch.cat([table(torch.tensor([*before, *words])), stored.queries])[None]
    lmm.adapters.load("again", tmp_path / "encoder")
    lmm.adapters.activate("again")
    with torch.no_grad():
        hidden = lmm.language_model(inputs_embeds=inputs).last_hidden_state[0]
    torch.testing.assert_close(made, stored.memory(hidden), atol=1e-5, rtol=1e-4)
    assert (tmp_path / "encoder" / "adapter_model.safetensors").is_file()


def test_rates_rise_and_fall_in_any_number_of_steps():
    for steps in (0, 1, 2, 100):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        schedule, rates = one_cycle(optimizer, 0.3, steps), []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        assert all(0 < rate <= 0.3 for rate in rates)
    assert max(rates) == pytest.approx(0.3) and rates[0] < 0.1 and rates[-1] < 0.1
