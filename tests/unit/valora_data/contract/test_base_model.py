"""A base model: loading it, also in 4 bits, and what training and serving read of it."""

import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from tokenizers import processors
from transformers import AutoTokenizer

from tests.support.cases import others_slow
from tests.support.engine_reference import add_requests, ask, make_engine, noise
from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from valora_data.contract import base_model, quantized
from valora_data.contract.base_model import BaseModel, check_image_token, load_model
from valora_data.contract.bundle import check_base
from valora_data.contract.quantized import NF4, loading_options, quantized_matrix, unpack
from valora_data.errors import BundleError, DataError
from valora_serve.errors import ImageError, RequestError, TooLongError
from valora_serve.model.prompt import prepare_prompt
from valora_serve.types import Request
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Example
from valora_train.settings import LoraSettings, ModelSettings

FAMILIES = CHECKPOINTS | TEXT_CHECKPOINTS
FAST = ("llava", "llava_next", "qwen2_5_vl", "internvl", "idefics3")


def loaded(base):
    return BaseModel(str(base), *load_model(str(base), torch.float32))


def rewritten(base, name="config.json", **changed):
    known = json.loads((base / name).read_text())
    changed = {k: known[k] | v if k == "image_processor" else v for k, v in changed.items()}
    (base / name).write_text(json.dumps(known | changed))
    return base


def resized(model, width, height):
    return model.architecture.resized_pixels(model.processor.image_processor, width, height)


@pytest.fixture(scope="module", params=others_slow(FAST, CHECKPOINTS))
def base(request, tmp_path_factory):
    return str(CHECKPOINTS[request.param](tmp_path_factory.mktemp("base"), seed=5))


@pytest.fixture(scope="module")
def trained(base):
    return Lmm(ModelSettings(id=base), LoraSettings())


@pytest.mark.parametrize("video", [False, True])
def test_training_and_serving_read_a_prompt_alike(base, trained, video):
    served = make_engine(base).lmm
    images = [noise(20, 48, 2), noise(64, 24, 3)]
    shown = [noise(40, 32, 20 + n) for n in range(4)] if video else images
    (encoded,) = trained.encode([Example("Which one is it?", tuple(shown), video=video)])
    parts = [{"type": "text", "text": "Which one is it?"}]
    parts += [{"type": "video"}] if video else [{"type": "image"}] * len(shown)
    sent = {"videos": [shown]} if video else {"images": shown}
    asked = Request("x", messages=[{"role": "user", "content": parts}], **sent)
    prompt = prepare_prompt(served, asked)
    assert prompt.ids == encoded.ids.tolist()
    assert (prompt.positions is None) == (encoded.positions is None)
    if encoded.positions is not None:
        assert torch.equal(torch.as_tensor(prompt.positions), encoded.positions)
    assert torch.equal(torch.cat([one.places() for one in prompt.visuals]), encoded.places)
    features = torch.cat([served.encode([one])[0].embeddings for one in prompt.visuals])
    torch.testing.assert_close(features, encoded.features, atol=1e-5, rtol=1e-5)
    assert (trained.stop_ids, trained.width) == (served.stop_ids, served.width)
    assert trained.context_length == served.context_length == (served.window or 1024)


def test_images_that_are_processed_one_by_one(base, monkeypatch):
    """The same bits as transformers' processor gives for all of them at once."""
    model = loaded(base)
    images = [noise(64, 48, 1), noise(64, 48, 2), noise(40, 100, 3), noise(64, 48, 4)]
    text = model.render(ask("", images=len(images)))
    together = model.process(text, images)
    monkeypatch.setattr(base_model, "MANY_PIXELS", 64 * 48)
    apart = model.process(text, images)
    assert set(together) == set(apart)
    for name, value in together.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(apart[name])), name


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (5, 400)])
def test_small_and_narrow_images_are_read_or_refused_alike(base, trained, size):
    served, said = make_engine(base).lmm, []
    asked = Request("x", messages=ask("What?", images=1), images=[noise(*size, 1)])
    for read in (
        lambda: prepare_prompt(served, asked),
        lambda: trained.encode([Example("What?", asked.images)]),
    ):
        try:
            said.append(read() and None)
        except (ImageError, DataError) as error:
            said.append(str(error).partition(": ")[2])
    assert said[0] == said[1]
    assert "\n" not in str(said[0])


def test_crops_that_do_not_fit_into_the_context(base, trained):
    engine = make_engine(base)
    images = [noise(90, 90, n) for n in range(120)]
    asked = Request("x", messages=ask("What?", images=len(images)), images=images)
    with pytest.raises(TooLongError):
        add_requests(engine, asked)
    if trained.fixed_grid is None:
        with pytest.raises(DataError, match="reads at most 1024: set a smaller size"):
            trained.encode([Example("What?", images)])


@pytest.mark.parametrize(("width", "height"), [(1, 4_000_000), (4_000_000, 1), (1, 30_000)])
def test_an_image_that_the_processor_would_enlarge_a_thousandfold(width, height):
    """CLIP's processor enlarges the shorter side; 1 x 4,000,000 pixels took 1.6 GB."""
    model = loaded("tiny")
    model.processor.image_processor.size = {"shortest_edge": 336}
    assert resized(model, width, height) == 336 * 336 * max(width, height)
    assert resized(model, 400, 200) == 336 * 672
    image = Image.new("L", (width, height)).convert("RGB")
    with pytest.raises(ImageError, match="would resize them to"):
        prepare_prompt(model, Request("x", messages=ask("What?", images=1), images=[image]))


def test_what_is_no_base_model_of_images(random_llava, tmp_path):
    split, alone = tmp_path / "split", tmp_path / "alone"
    shutil.copytree(random_llava, split)
    tokens = json.loads((split / "tokenizer.json").read_text())["added_tokens"]
    kept = [token for token in tokens if token["content"] != "<image>"]
    rewritten(split, "tokenizer.json", added_tokens=kept)
    file = split / "tokenizer_config.json"
    known = {k: v for k, v in json.loads(file.read_text()).items() if "special_tokens" not in k}
    file.write_text(json.dumps(known | {"image_token": None}))
    alone.mkdir()
    shutil.copy(random_llava / "config.json", alone)
    for name, said in (
        ("/nowhere/model", "does not exist"), ("./nothing", "does not exist"),
        ("", "name is empty"), (str(tmp_path), r"holds no config\.json"),
        (str(split), "splits the image token '<image>' into"),
        (str(alone), "cannot load base model"),
    ):  # fmt: skip
        with pytest.raises(BundleError, match=said) as caught:
            load_model(name, torch.float32)
        assert "\n" not in str(caught.value)
    rewritten(split, quantization_config={"quant_method": "awq"})
    with pytest.raises(BundleError, match=r"quantised form already \(awq\)"):
        load_model(str(split), torch.float32, plain=True)
    with pytest.raises(BundleError, match="has no image token, so it takes no images"):
        check_image_token("words", SimpleNamespace(), SimpleNamespace(tokenizer=None))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""), ("model.safetensors", b"\xff" * 100), ("config.json", b"{"),
        ("tokenizer.json", b"{}"), ("tokenizer.json", b"\xff\xfe"),
        ("processor_config.json", b"[]"), ("adapter_config.json", b'{"peft_type": "LORA"}'),
    ],
)  # fmt: skip
def test_a_damaged_base_model_is_told_in_one_sentence(random_llava, tmp_path, file, content):
    damaged = tmp_path / "damaged"
    shutil.copytree(random_llava, damaged)
    (damaged / file).write_bytes(content)
    with pytest.raises(BundleError, match="merge it" if "adapter" in file else "") as caught:
        load_model(str(damaged), torch.float32)
    assert str(damaged) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changed", "said"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "has use_bidirectional_attention"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "has attn_logit_softcapping, which is"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         r"length of the prompt \(rope_type dynamic\)"),
        ("llama", {"num_hidden_layers": 3}, "lacks 9 weights of its architecture, such as model.l"),
        ("gemma3", {"name": "processor_config.json", "image_processor": {"do_pan_and_scan": True}},
         r"adds crops to images \(do_pan_and_scan\), which is not served"),
        ("llama", {"model_type": "gemma2"}, "'gemma2', which is not one of gemma3, gemma3_text, "),
    ],
)  # fmt: skip
def test_models_that_would_answer_wrongly(family, changed, said, tmp_path):
    with pytest.raises(BundleError, match=said):
        loaded(rewritten(FAMILIES[family](tmp_path), **changed))


@pytest.mark.parametrize(
    ("family", "changed", "window"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": 4096}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 64}, None),
        ("gemma3_text", {}, 960),
    ],
)
def test_models_with_windows_are_served_up_to_them(family, changed, window, tmp_path):
    # Layer types that follow from the windows are of those before.
    more = {"layer_types": None} if family == "qwen2" else {}
    model = loaded(rewritten(TEXT_CHECKPOINTS[family](tmp_path), **changed, **more))
    assert (model.window, model.context_length) == (window, window or 1024)


def test_prompts_have_the_tokens_that_transformers_gives_them(tmp_path):
    """Around texts those that the tokenizer adds (Qwen3-Embedding), around chats none.

    Those without an embedding (`<image_soft_token>` of Gemma 3 1B) would end the engine.
    """
    base, asked = TEXT_CHECKPOINTS["qwen3"](tmp_path), [{"role": "user", "content": "Who?"}]
    tokenizer = AutoTokenizer.from_pretrained(base)
    around = processors.TemplateProcessing("[A] $A [B]", None, [("[A]", 3), ("[B]", 5)])
    tokenizer.backend_tokenizer.post_processor = around
    tokenizer.add_tokens(["<none>"])
    tokenizer.save_pretrained(base)
    engine = make_engine(str(base))
    wanted = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert engine.prepare(Request("x", messages=asked)).prompt.ids == wanted
    wanted = tokenizer("Who?")["input_ids"]
    assert (wanted[0], wanted[-1]) == (3, 5)
    with pytest.raises(RequestError, match=rf"to {len(tokenizer) - 2}, got .* <none>: leave it"):
        add_requests(engine, Request("x", text="a <none> b"))
    engine.lmm.tokenizer.chat_template = None
    assert engine.prepare(Request("x", text="Who?")).prompt.ids == wanted
    with pytest.raises(RequestError, match="has no chat template: use the model's instruct"):
        engine.prepare(Request("x", messages=asked))


# QLoRA (Dettmers et al., 2023), appendix E.
CODES = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
])  # fmt: skip


def nearest(weight):
    """A weight quantized to NF4 in blocks of 64, with exact scales."""
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1, keepdim=True)
    code = (blocks / scales)[..., None].sub(CODES).abs().argmin(-1)
    return (CODES[code] * scales).reshape(weight.shape)


@pytest.fixture(scope="module", params=others_slow(("llava", "qwen3_vl", "llama"), FAMILIES))
def family(request, tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param), seed=5)


def test_the_language_models_layers_are_rounded_and_nothing_else(family):
    plain = dict(load_model(str(family), torch.float32)[0].named_parameters())
    packed, _ = load_model(str(family), torch.float32, quantize=NF4)
    kinds = {name: weight.dtype for name, weight in packed.named_parameters()}
    quantized = dict(unpack(packed, torch.float32).named_parameters())
    assert quantized.keys() == plain.keys()
    for name, weight in plain.items():
        inside = re.search(r"(\.(language|text)_|^)model\.layers\..*proj\.weight$", name)
        assert kinds[name] == (torch.uint8 if inside else torch.float32), name
        if not inside:
            assert torch.equal(quantized[name], weight), name
            continue
        # Scales have 8 bits, so that they differ by up to a hundredth of the largest one.
        torch.testing.assert_close(quantized[name], nearest(weight), atol=0.02, rtol=0.02)
        assert 0.02 < (quantized[name] - weight).norm() / weight.norm() < 0.15
        # Processes of a tensor-parallel group round one matrix after the other.
        assert torch.equal(quantized_matrix(weight), quantized[name]), name


def test_what_cannot_be_rounded_is_refused(family, tmp_path, monkeypatch):
    def refused(message, device="cpu", folder=family):
        with pytest.raises(BundleError, match=message):
            loading_options("this", str(folder), torch.float32, device)

    refused("on device vulkan: use one of cpu", "vulkan")
    shutil.copy(family / "config.json", tmp_path)
    method = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    rewritten(tmp_path, quantization_config=method)
    refused(r"saved in a quantised form already \(bitsandbytes\)", folder=tmp_path)
    monkeypatch.setattr(quantized, "is_installed", lambda: False)
    refused(r"needs the package bitsandbytes: pip install 'valora\[quantize\]'")


def test_a_bundle_is_served_on_the_weights_that_it_was_trained_on():
    def check(quantized, served):
        manifest = {"base": {"id": "this", "sha256": "0", "quantize": quantized}}
        check_base(SimpleNamespace(folder="bundles/x", manifest=manifest), "this", "0", served)

    check(None, None)
    check(NF4, NF4)
    with pytest.raises(BundleError, match="quantize=nf4, but this one has none"):
        check(NF4, None)
    with pytest.raises(BundleError, match="use valora-serve --quantize none"):
        check(None, NF4)
