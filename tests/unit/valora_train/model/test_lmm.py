"""The model that is trained and its adapters, equal to transformers' own model and PEFT's."""

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.support import training_lmm
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from tests.support.training_lmm import disturb, load, questions, whole
from valora_data.contract.quantized import unpack
from valora_data.errors import BundleError, DataError
from valora_train.errors import SettingsError
from valora_train.model.lmm import Lmm, training_type
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

PARTS = dict.fromkeys(CHECKPOINTS, ("language_model", "visual.blocks", "merger"))
PARTS["gemma3"] = ("language_model", "vision_tower")
PARTS |= dict.fromkeys(("idefics3", "smolvlm"), ("text_model", "vision_model", "connector"))
for other in ("internvl", "llava", "llava_next"):
    PARTS[other] = ("language_model", "vision_tower", "multi_modal_projector")
WHOLE = ("gemma3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # families that split no images


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
        found = read.visual[row][read.real[row]]
        torch.testing.assert_close(found, out[seen], atol=1e-4, rtol=1e-3)


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
    lora = LoraSettings(rank=4, vision_tower=vision, projector=vision and family != "gemma3")
    lmm = Lmm(ModelSettings(id=str(checkpoint), **settings), lora)
    lmm.adapters.add("one", seed=2)
    disturb(lmm, "one")
    batch = lmm.encode(questions(family))
    with Watch() as watch:
        lmm.states(batch).head_inputs().last.float().square().sum().backward()
    weights = lmm.adapters.parameters("one").items()
    grads = {name: weight.grad for name, weight in weights if weight.grad is not None}
    assert all(grad.any() for name, grad in grads.items() if "language" in name)
    assert not vision or all(any(part in name for name in grads) for part in PARTS[family])
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


def test_the_cpu_decides_what_training_multiplies_in(monkeypatch):
    for found, expected in (
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16), ({"amx_bf16": True}, torch.bfloat16),
        ({"architecture": "aarch64"}, torch.float32),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)  # noqa: B023
        assert training_type(ModelSettings(precision="auto")) is expected
    assert training_type(ModelSettings(precision="auto", device="cuda")) is torch.float32
    assert training_type(ModelSettings()) is torch.float32
    assert training_type(ModelSettings(precision="bfloat16", device="cuda")) is torch.bfloat16


def test_features_may_be_kept_or_not(family, checkpoint):
    said = []
    for keep in (True, False):
        lmm = Lmm(ModelSettings(id=str(checkpoint), keep_features=keep), LoraSettings(rank=4))
        batch = lmm.encode(questions(family))
        kept = keep and lmm.takes_images
        assert all((item.features is not None) == kept for item in batch)
        with torch.no_grad():
            alone = torch.cat([lmm.states([item]).head_inputs().last for item in batch])
            together = lmm.states(batch).head_inputs().last
        torch.testing.assert_close(alone, together, atol=1e-4, rtol=1e-3)
        said.append(lmm.write(batch, 6))
    assert said[0] == said[1]


def test_what_cannot_be_read_or_written_is_refused(random_llava):
    lmm = load(random_llava)
    lmm.tokenizer.eos_token = None
    lmm.tokenizer.add_tokens(["<none>"])
    for example, said in (
        (Example("what?", (), video=True), "a video no frames"),
        (Example("a <none> b", ()), r"has token \d+ <none>, for which base model .* no embed"),
        (Example("red star " * 600, ()), "but base model .* has positions for 2048, and is"),
        (Example("what?", (), answer=lambda _: "it"), "has no eos_token, which is to end answers"),
    ):
        with pytest.raises((BundleError, DataError), match=said):
            lmm.encode([example])


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_what_an_adapted_projector_reads_may_be_kept(dtype, close, random_llava, images):
    results = []
    for keep in (True, False):
        lora = LoraSettings(rank=4, projector=True)
        lmm = Lmm(ModelSettings(id=str(random_llava), keep_features=keep, dtype=dtype), lora)
        lmm.adapters.add("one", seed=1)
        disturb(lmm, "one")
        batch = lmm.encode([Example("a", (image,)) for image in images], whole=False)
        assert (batch[0].features is not None) == keep
        with lmm.precision():
            lmm.states(batch).hidden.square().sum().backward()
        weights = lmm.adapters.parameters("one")
        results.append({name: weight.grad for name, weight in weights.items()})
    assert any("multi_modal_projector" in name for name in results[0])
    for kept, made in zip(*(one.values() for one in results), strict=True):
        assert (kept - made).norm() <= close * made.norm()


def gradients(lmm, family):
    """Last hidden states with an adapter, and the gradients of its weights."""
    lmm.adapters.add("one", seed=1)
    disturb(lmm, "one")
    states = lmm.states(lmm.encode(questions(family)))
    states.hidden.square().mean().backward()
    found = {name: p.grad for name, p in lmm.adapters.parameters("one").items()}
    return states.hidden.detach(), found


def test_hidden_states_and_gradients_are_those_of_the_rounded_weights(family, checkpoint, tmp_path):
    pytest.importorskip("bitsandbytes")
    settings = ModelSettings(id=str(checkpoint), quantize="nf4"), LoraSettings(rank=4, alpha=12)
    mine, plain = Lmm(*settings), Lmm(*settings)
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


@pytest.mark.parametrize("vision", [False, True])
def test_saved_adapters_load_in_plain_peft(random_llava, images, tmp_path, vision):
    lmm = training_lmm.load(random_llava, vision_tower=vision, projector=vision, rslora=vision)
    for name in ("one", "two"):
        lmm.adapters.add(name, seed=1)
        training_lmm.disturb(lmm, name)
        lmm.adapters.save(name, tmp_path / name, "some-base")
    processor = AutoProcessor.from_pretrained(random_llava)
    for name in ("one", "two"):
        lmm.adapters.activate(name)
        hidden = training_lmm.visual(lmm, training_lmm.PROMPTS, images)
        base = AutoModelForImageTextToText.from_pretrained(random_llava)
        model = PeftModel.from_pretrained(base, tmp_path / name)
        for row, prompt, image in zip(hidden, training_lmm.PROMPTS, images, strict=True):
            expected = training_lmm.reference(model, processor, prompt, image)
            torch.testing.assert_close(row, expected, atol=2e-5, rtol=1e-4)


def test_without_adapter_it_is_the_base_again(random_llava, images):
    lmm = training_lmm.load(random_llava)
    before = training_lmm.visual(lmm, training_lmm.PROMPTS, images)
    lmm.adapters.add("one", seed=1)
    names = lmm.adapters.parameters("one")
    assert len(names) == 2 * 2 * 4  # two layers, A and B, q k v o
    assert all("language_model" in name for name in names)
    training_lmm.disturb(lmm, "one")
    assert not torch.equal(training_lmm.visual(lmm, training_lmm.PROMPTS, images), before)
    lmm.adapters.activate(None)
    assert torch.equal(training_lmm.visual(lmm, training_lmm.PROMPTS, images), before)


def two_passes(folder, adapter, example, answer):
    """Logits of an answer by PEFT: the prompt without the adapter, the rest with it."""
    model, inputs = training_lmm.whole(folder, example)
    model = PeftModel.from_pretrained(model, adapter)
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask")
    with torch.no_grad():
        with model.disable_adapter():
            read = model(input_ids=ids[:, :-1], **inputs, use_cache=True)
        rest = torch.cat([ids[:, -1:], torch.tensor([answer], dtype=torch.int64)], dim=1)
        return model(input_ids=rest, past_key_values=read.past_key_values).logits[0]


def test_at_decoding_only_it_acts_from_the_last_token_on(random_llava, images, tmp_path):
    words, gradients = ["a", "the one at the left", "yes"], []
    examples = [
        Example(prompt, (image,), answer=lambda _, text=text: text)
        for prompt, image, text in zip(training_lmm.PROMPTS, images, words, strict=True)
    ]
    asked = [replace(example, answer=None) for example in examples]
    for checkpointing in (True, False):  # which computes everything again
        settings = ModelSettings(id=str(random_llava), gradient_checkpointing=checkpointing)
        lmm = Lmm(settings, LoraSettings(rank=4, alpha=12, decode_only=True))
        lmm.adapters.add("late", seed=1)
        training_lmm.disturb(lmm, "late")
        states = lmm.states(lmm.encode(examples))
        hidden, tokens = states.answer_pairs()
        logits = lmm.logits(hidden)
        torch.nn.functional.cross_entropy(logits, tokens).backward()
        gradients.append([weight.grad for weight in lmm.adapters.parameters("late").values()])
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)
    lmm.adapters.save("late", tmp_path, "some-base")
    lengths = [end - first for end, first in zip(states.lengths, states.prompts, strict=True)]
    parts = logits.split(lengths), tokens.split(lengths)
    for example, found, answer in zip(asked, *parts, strict=True):
        expected = two_passes(random_llava, tmp_path, example, answer.tolist())
        torch.testing.assert_close(found, expected[:-1], atol=2e-5, rtol=1e-4)
    said = lmm.write(lmm.encode(asked), max_tokens=4)
    for text, example in zip(said, asked, strict=True):
        written = []
        for _ in range(4):
            step = two_passes(random_llava, tmp_path, example, written)[-1]
            written.append(int(step.argmax()))
        assert text == lmm.text_of(written)
    # What precedes the last token of a prompt is the base model's, to the bit; also of an adapter
    # that is loaded, or merged from such ones.
    lmm.adapters.load("loaded", tmp_path, decode_only=True)
    names = ["late", "loaded"]
    lmm.adapters.peft.base_model.add_weighted_adapter(names, [1.0, 1.0], "both", "linear")
    lmm.adapters.adopt("both", decode_only=True)
    lmm.adapters.activate(None)
    plain = lmm.states(lmm.encode(examples)).hidden
    for name in (*names, "both"):
        lmm.adapters.activate(name)
        found = lmm.states(lmm.encode(examples)).hidden
        for row, prompt in enumerate(states.prompts):
            torch.testing.assert_close(found[row, : prompt - 1], plain[row, : prompt - 1])
            assert not torch.allclose(found[row, prompt - 1], plain[row, prompt - 1])


@pytest.mark.parametrize(
    ("base", "lora", "said"),
    [
        ("photo", {"vision_tower": True}, "LoRA in its vision tower: set train.lora.vision_tower="),
        ("gemma3", {"projector": True}, "in its projector: set train.lora.projector=false"),
        ("llama", {"projector": True}, "for LoRA in its projector"),
        ("llama", {"vision_tower": True}, "for LoRA in its vision tower"),
        ("llava", {"targets": ["q_proj", "fc1"]}, "fc1 for LoRA in its language model: correct"),
    ],
)
def test_what_lora_would_not_change_is_refused(base, lora, said, tmp_path):
    make = (CHECKPOINTS | TEXT_CHECKPOINTS).get(base)
    lmm = training_lmm.load(make(tmp_path, seed=5) if make else base, **lora)
    with pytest.raises(SettingsError, match=said):
        lmm.adapters.add("one", seed=0)
