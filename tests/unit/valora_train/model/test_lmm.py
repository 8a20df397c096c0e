"""Hidden states and answers: equal to transformers' own forward pass and `generate`."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tests.support.lmm_checkpoints import TEXT_CHECKPOINTS
from tests.support.training_lmm import disturb, load, questions, whole
from valora_train.model.lmm import Lmm, training_type
from valora_train.settings import LoraSettings, ModelSettings

WHOLE = ("llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # families that split no images


@pytest.fixture(scope="module")
def lmm(checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def theirs(family, checkpoint):
    """Transformers' model of a family, and what it takes for each question."""
    return [whole(checkpoint, example) for example in questions(family)]


def test_hidden_states_of_every_family_equal_transformers(family, lmm, theirs):
    batch = lmm.encode(questions(family))
    with torch.no_grad():
        states = lmm.states(batch)
    read = states.head_inputs()
    for row, (model, inputs) in enumerate(theirs):
        with torch.no_grad():
            out = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
        ids = inputs["input_ids"][0]
        assert batch[row].ids.tolist() == ids.tolist()
        tokens = [getattr(model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
        seen = torch.tensor([int(token) in tokens for token in ids]).nonzero()[:, 0]
        cells = batch[row].cells  # all visual tokens, but for the whole image beside its crops
        assert torch.isin(cells, seen).all()
        if family in WHOLE:
            assert torch.equal(cells, seen)
        seen = cells
        torch.testing.assert_close(read.last[row], out[-1], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            read.visual[row][read.real[row]], out[seen], atol=1e-4, rtol=1e-3
        )


def test_what_it_writes_is_what_generate_writes(family, lmm, theirs):
    said = lmm.write(lmm.encode(questions(family)), max_tokens=9)
    for text, (model, inputs) in zip(said, theirs, strict=True):
        ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)
        new = ids[0, inputs["input_ids"].shape[1] :]
        assert text == lmm.tokenizer.decode(new, skip_special_tokens=True).strip()
    assert len(set(said)) == len(said)


def test_only_the_answer_is_learnt(family, lmm, theirs):
    answers = ["red", "the one at the left", "yes"]
    answered = [
        replace(example, answer=lambda _, text=text: text)
        for example, text in zip(questions(family), answers, strict=True)
    ]
    with torch.no_grad():
        hidden, tokens = lmm.states(lmm.encode(answered)).answer_pairs()
        loss = torch.nn.functional.cross_entropy(lmm.logits(hidden), tokens, reduction="sum")
    expected, end = 0.0, lmm.tokenizer.eos_token_id
    whole_words = ("internvl", *WHOLE, *TEXT_CHECKPOINTS)
    blank = "" if family in whole_words else " "  # as the chat template writes it
    for (model, given), text in zip(theirs, answers, strict=True):
        answer = [*lmm.tokenizer(blank + text, add_special_tokens=False)["input_ids"], end]
        ids = torch.cat([given["input_ids"], torch.tensor([answer])], dim=1)
        inputs = {**given, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "mm_token_type_ids" in inputs:
            more = torch.zeros(1, len(answer), dtype=inputs["mm_token_type_ids"].dtype)
            inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], more], dim=1)
        labels = ids.clone()
        labels[:, : -len(answer)] = -100
        with torch.no_grad():
            expected += float(model(**inputs, labels=labels).loss) * len(answer)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


class Watch(TorchFunctionMode):
    """Notes the types that linear layers and attention compute in."""

    def __init__(self):
        super().__init__()
        self.linear, self.attention = set(), set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.linear.add(found.dtype)
        if func is functional.scaled_dot_product_attention:
            self.attention.add(args[0].dtype)
        return found


def computed(family, checkpoint, **settings):
    """Types, gradients of an adapter that is not zero, and states as measured and as trained on."""
    vision = family not in TEXT_CHECKPOINTS
    lora = LoraSettings(rank=4, vision_tower=vision, projector=vision)
    lmm = Lmm(ModelSettings(id=str(checkpoint), **settings), lora)
    lmm.adapters.add("one", seed=2)
    disturb(lmm, "one")
    batch = lmm.encode(questions(family))
    with Watch() as watch:
        lmm.states(batch).head_inputs().last.float().square().sum().backward()
    weights = lmm.adapters.parameters("one").items()
    grads = {name: weight.grad for name, weight in weights if weight.grad is not None}
    assert all(grad.any() for name, grad in grads.items() if "language" in name)
    with torch.no_grad():
        read, trained = (
            lmm.states(batch, training=training).head_inputs().last.float()
            for training in (False, True)
        )
    return watch, grads, read, trained


@pytest.fixture(scope="module")
def exact(family, checkpoint):
    return computed(family, checkpoint)


@pytest.mark.parametrize("changed", ["gradient_checkpointing", "precision", "dtype"])
def test_gradients_are_those_of_float32(family, checkpoint, exact, changed):
    """Recomputed, with products in bfloat16, or on a base model of that type."""
    checkpointing = changed[0] == "g" or (changed[0] == "p" and family in ("llava", "qwen2_5_vl"))
    more = {} if changed[0] == "g" else {changed: "bfloat16"}
    watch, grads, read, trained = computed(
        family, checkpoint, gradient_checkpointing=checkpointing, **more
    )
    assert (exact[0].linear, exact[0].attention) == ({torch.float32}, {torch.float32})
    if not more:
        torch.testing.assert_close(grads, exact[1], atol=1e-4, rtol=1e-3)
        return
    if not checkpointing:
        assert watch.linear == {torch.bfloat16}
        assert watch.attention == {torch.float32 if changed == "precision" else torch.bfloat16}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    if changed == "precision":  # accuracy is measured in float32
        assert torch.equal(read, exact[2])
    assert 0 < (trained - exact[2]).norm() < 0.05 * exact[2].norm()
    assert grads.keys() == exact[1].keys()
    flat = [torch.cat([g.flatten() for g in found.values()]) for found in (grads, exact[1])]
    assert functional.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"architecture": "aarch64"}, torch.float32),
    ],
)
def test_the_cpu_decides_what_training_multiplies_in(monkeypatch, found, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    assert training_type(ModelSettings(precision="auto")) is expected
    assert training_type(ModelSettings(precision="auto", device="cuda")) is torch.float32
    assert training_type(ModelSettings()) is torch.float32
    assert training_type(ModelSettings(precision="bfloat16", device="cuda")) is torch.bfloat16
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # an older torch
    assert training_type(ModelSettings(precision="auto")) is torch.float32
