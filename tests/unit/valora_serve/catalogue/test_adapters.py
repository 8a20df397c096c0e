"""Adapters from PEFT folders: the same deltas as under PEFT, or an error that names the reason."""

import copy
import json
import re
import shutil

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from tests.support.cases import others_slow
from tests.support.serve_helpers import (
    EVERYTHING,
    LANGUAGE,
    VISION,
    configure,
    load_base,
    make_adapter,
    rewrite,
    targets_of,
)
from valora_serve.catalogue.adapters import CONFIG, WEIGHTS, alphas, read_adapter
from valora_serve.catalogue.effect import check_effect
from valora_serve.errors import AdapterError

CASES = {
    "plain": {"rank": 8, "alpha": 24}, "rslora": {"rank": 8, "alpha": 24, "use_rslora": True},
    "everything": {"rank": 4, "alpha": 4, "targets": EVERYTHING},
    "list": {"rank": 4, "targets": ["q_proj", "fc1", "linear_2"]},
    "all-linear": {"rank": 4, "targets": "all-linear"},
    "excluded": {"targets": ["q_proj", "v_proj"], "exclude_modules": r".*vision_tower.*"},
    "one layer": {"targets": ["q_proj", "down_proj"], "layers_to_transform": [1],
                  "layers_pattern": "layers"},
    "patterns": {
        "rank": 8, "alpha": 16, "targets": EVERYTHING,
        "rank_pattern": {"v_proj": 4, r"layers\.1\.self_attn\.q_proj": 2, "linear_1": 12},
        "alpha_pattern": {"k_proj": 6, r".*language_model\.layers\.0\.mlp\.up_proj": 40},
    },
    "rslora patterns": {"rank": 8, "alpha": 16, "use_rslora": True, "rank_pattern": {"v_proj": 3},
                        "alpha_pattern": {"o_proj": 5, "v_proj": 7}},
    "fan in": {"rank": 4, "fan_in_fan_out": True},
    "mica": {"rank": 4, "init_lora_weights": "mica"},
    "look-ahead": {"targets": r"^(?!.*vision)(?=.*layers).*\.(q_proj|up_proj)$"},
    "several lists": {
        "targets": ["q_proj", "v_proj", "down_proj"],
        "exclude_modules": ["layers.1.self_attn.v_proj"],
        "layers_to_transform": [0, 1], "layers_pattern": ["blocks", r"lay\w+"],
        "rank_pattern": {r"^model\..*q_proj": 3, "self.attn.v_proj": 5, "v_proj": 7},
        "alpha_pattern": {"down_proj": 2, r"(?:q|v)_proj": 3},
    },
}  # fmt: skip


@pytest.fixture(scope="session")
def targets(random_llava):
    return targets_of(load_base(str(random_llava)))


@pytest.fixture(scope="module")
def queries(random_llava, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "queries"
    return make_adapter(folder, str(random_llava), seed=1, targets=r".*language_model.*q_proj")


@pytest.fixture
def folder(queries, tmp_path):
    """A copy of an adapter that a test may damage."""
    return shutil.copytree(queries, tmp_path / "adapter")


def deltas_of_peft(base, folder):
    model = PeftModel.from_pretrained(copy.deepcopy(load_base(base)), folder)
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }


def check(adapter, expected):
    assert set(adapter.modules) == set(expected)
    for path, delta in expected.items():
        pair = adapter.modules[path]
        torch.testing.assert_close(pair.scaling * (pair.b @ pair.a), delta, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("case", others_slow([*CASES][1::3], CASES))
def test_deltas_are_peft_s(case, random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=3, **CASES[case])
    adapter = read_adapter(tmp_path, targets)
    check(adapter, deltas_of_peft(str(random_llava), tmp_path))
    assert adapter.rank == max(pair.a.shape[0] for pair in adapter.modules.values())
    assert list(adapter.modules) == [path for path in targets.linears if path in adapter.modules]


OLD_NAMES = {
    "transformers 4": lambda name: name.replace(
        ".model.model.language_model.", ".model.language_model.model."
    ).replace(".model.model.vision_tower.encoder", ".model.vision_tower.vision_model.encoder")
    .replace(".model.model.multi_modal", ".model.multi_modal"),
    "adapter name": lambda name: name.replace(".weight", ".default.weight"),
    "no prefix": lambda name: name.removeprefix("base_model.model."),
    "inner model": lambda name: name.replace("base_model.model.model.", "base_model.model."),
}  # fmt: skip


def test_names_of_other_versions(random_llava, targets, tmp_path):
    made = make_adapter(
        tmp_path / "a", str(random_llava), seed=3, targets=EVERYTHING, alpha_pattern={"v_proj": 3}
    )
    expected = deltas_of_peft(str(random_llava), made)
    content = read_adapter(made, targets).content
    for style, rename in OLD_NAMES.items():
        folder = shutil.copytree(made, tmp_path / style)
        rewrite(folder, rename=rename)
        assert not set(load_file(made / WEIGHTS)) & set(load_file(folder / WEIGHTS))
        adapter = read_adapter(folder, targets)
        check(adapter, expected)
        assert adapter.content == content, style


def test_content_is_what_changes_the_result(random_llava, targets, tmp_path):
    first = make_adapter(tmp_path / "a", str(random_llava), seed=3, targets=f"{LANGUAGE}|{VISION}")
    base, language = read_adapter(first, targets), "layers.1.self_attn.o_proj.lora_B"
    same = {"base_model_name_or_path": "elsewhere", "lora_dropout": 0.3}
    for number, (options, added, alike) in enumerate(
        ((same, 0, (True, True)), ({"lora_alpha": 15}, 0, (False, False)), ({}, 1, (False, True)))
    ):
        folder = configure(shutil.copytree(first, tmp_path / f"{number}"), **options)
        rewrite(folder, lambda name, t, added=added: t + 1e-3 * added * (language in name))
        other = read_adapter(folder, targets)
        found = other.content == base.content, other.vision_content == base.vision_content
        assert found == alike


MERGE = "cannot be served; merge it into a copy of .*merge_and_unload"
REFUSED = [
    ({"use_dora": True}, rf"use_dora = True {MERGE}.*or train it again without DoRA"),
    ({"bias": "all"}, "bias = 'all'"), ({"bias": "lora_only"}, f"bias = 'lora_only' {MERGE}"),
    ({"lora_bias": True}, "lora_bias"), ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"modules_to_save": ["lm_head"]}, "does not hold; if they were not trained, remove"),
    ({"modules_to_save": "lm_head"}, "modules_to_save: expected a list"),
    ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens.*without aLoRA"),
    ({"use_qalora": True}, "use_qalora.*without QA-LoRA"),
    ({"kasa_config": {}}, "kasa_config = .* cannot be served"),
    ({"arrow_config": {"top_k": 2}}, "one by one"), ({"target_parameters": ["x"]}, "target_param"),
    ({"some_new_option": "yes"}, "some_new_option"),
    ({"x" * 10**5: "y" * 10**5}, "cannot be served"),
    ({"init_lora_weights": "pissa_niter_4"}, "changed the base weights"),
    ({"init_lora_weights": "olora"}, "changed the base weights"),
    ({"init_lora_weights": ["gaussian"]}, "init_lora_weights"),
    ({"peft_type": "LOHA"}, "type LOHA.*save_as_lora"), ({"peft_type": "VERA"}, "save_as_lora"),
    ({"peft_type": "IA3"}, "merge_and_unload"), ({"peft_type": "PREFIX_TUNING"}, "train a LoRA"),
    ({"peft_type": ["LORA"]}, "only LORA"), ({"peft_type": {"x" * 10**5: 1}}, "only LORA"),
    *(({"alpha_pattern": {value: 8}}, "alpha_pattern .* is no regular expression, or has look-ar")
      for value in ("(", "a{1,99999999999}", "(" * 4000 + ")" * 4000, "(?=(.*)*y)", r"(\w)\1",
                    "(((_{0,9999}){0,9999}){0,9999}){0,9999}.*x")),
    ({"alpha_pattern": {str(n): 8 for n in range(3000)}}, "at most 2048"),
    *(({"lora_alpha": value}, "expected a number") for value in
      (None, True, "16", [16], {}, float("inf"), float("nan"))),
    *(({"lora_alpha": value}, "scaling") for value in (1e300, -1e9, 1e5 * 8, 1e-300, 1e-9)),
    ({"alpha_pattern": {"q_proj": "x"}}, "expected a number"),
    ({"alpha_pattern": {"1.self_attn.q_proj": 1e300}}, r"layers\.1.*the scaling"),
    ({"alpha_pattern": [1]}, "alpha_pattern: expected"),
    ({"use_rslora": "no"}, "use_rslora: expected true or false"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_cannot_be_served_are_named_with_what_to_do(options, message, targets, folder):
    configure(folder, **options)
    with pytest.raises(AdapterError, match=message) as caught:
        read_adapter(folder, targets)
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1500


PATHS = (
    "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.11.mlp.up_proj",
    "model.vision_tower.encoder.layers.3.mlp.fc1", "lm_head",
)  # fmt: skip


@pytest.mark.parametrize("pattern", [
    r".*language_model.*\.(q_proj|up_proj)", r"nothing|lm_head", r"(?i:LM_HEAD)", r"[^.]+",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q|up)_proj.*?)|(?:\bmodel\.layers\.\d+)",
    "lm.head", "up.proj", "fc1", r"^model\.vision.*", r"(?P<a>.*)\.layers\.\d{2}\.\w+\.\w+$",
    "a)|(fc1", "lm)|(lm_head",
])  # fmt: skip
def test_patterns_match_as_in_peft(pattern):
    found = alphas({"nothing": 1, pattern: 4, ".*": 5}, PATHS)
    assert found == {p: 4 if re.match(rf"(.*\.)?({pattern})$", p) else 5 for p in PATHS}


@pytest.mark.parametrize("pattern", [
    r"(a+)+$", r"(.*)*x", r"((.+)+\.)+!", r"(\w|\w\w)*-", r"(([\w.]+)+)+#", ".*" * 30 + "!",
])  # fmt: skip
def test_hostile_patterns_end(pattern):
    paths = {f"{'a' * 60}.{path}.{n}.{'_' * 40}" for path in PATHS for n in range(50)}
    assert alphas({pattern: 4}, paths) == {}
    with pytest.raises(ValueError, match="matching alpha_pattern takes more than 1 s"):
        alphas({rf"{pattern}(\w{{0,50}}){{0,4}}{n}x": 4 for n in range(2000)}, paths)


def test_configurations_that_no_reader_should_parse(random_llava, targets, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1)
    file = tmp_path / CONFIG
    whole = file.read_text()
    for text, message in (
        ("[" * 10**5, "nested more than 64"),
        (whole.rstrip()[:-1] + ', "x": ' + '{"y":' * 10**4 + "1" + "}" * 10**4 + "}", "nested"),
        (whole.rstrip()[:-1] + ', "r": 4}', "holds the key 'r' twice"),
        (whole + " " * 2**20, "bytes, more than 1048576"),
        (whole.replace('"r": 8', '"r": ' + "9" * 5000), "5000 digits"),
    ):
        file.write_text(text)
        with pytest.raises(AdapterError, match=message):
            read_adapter(tmp_path, targets)


FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_kind_of_float_is_read_exactly(dtype, targets, folder):
    rewrite(folder, change=lambda name, tensor: tensor.to(dtype))
    stored = load_file(folder / WEIGHTS)
    adapter = read_adapter(folder, targets)
    for path, pair in adapter.modules.items():
        for part, tensor in (("A", pair.a), ("B", pair.b)):
            exact = stored[f"base_model.model.{path}.lora_{part}.weight"].double()
            assert torch.equal(tensor.double(), exact)
    assert check_effect(adapter, torch.float32, {}) is None


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2", "F8_E8M0", "C64", "BOOL", "U8",
                                   "I8", "U16", "I16", "U32", "I32", "U64", "I64"])  # fmt: skip
def test_other_types_are_refused_with_the_tensor_s_name(dtype, targets, folder):
    file = folder / WEIGHTS
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(one for one in header if "lora_A" in one)
    bits = {"BOOL": 8}.get(dtype) or int(re.search(r"\d+", dtype)[0])
    header[name] |= {"dtype": dtype, "shape": [32 * header[name]["shape"][0] * 48 // bits]}
    made = json.dumps(header).encode()
    file.write_bytes(len(made).to_bytes(8, "little") + made + content[8 + length :])
    with pytest.raises(AdapterError, match=rf"tensor {name} .*dtype .*save it as float") as caught:
        read_adapter(folder, targets)
    assert "damaged" not in str(caught.value)


def put(value):
    def change(name, tensor):
        if "layers.1.self_attn.q_proj.lora_A" in name:
            tensor = tensor.clone()
            tensor[1, 2] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("rename", "change", "message"),
    [
        (lambda n: n.replace("layers.1", "layers.7"), None, r"layers\.7.*matches no linear"),
        (lambda n: n.replace("lora_A", "lora_embedding_A"), None, "matches no linear"),
        (lambda n: n.replace("q_proj", "q_norm"), None, "q_norm.*matches no linear"),
        (lambda n: n.replace("layers.1.self_attn.q_proj.lora_B", "x"), None, "x.*matches no"),
        (None, put(float("nan")), r"layers\.1.*q_proj\.lora_A.*NaN or Inf"),
        (None, put(float("inf")), r"layers\.1.*q_proj\.lora_A.*NaN or Inf"),
        (None, lambda n, t: t[:, 1:] if "1.self_attn.q_proj.lora_A" in n else t, "expected shape"),
        (None, lambda n, t: t.to(torch.int32), r"dtype torch\.int32; save"),
        (None, lambda n, t: t * torch.tensor(torch.nan, dtype=torch.float64), "NaN or Inf"),
        (None, lambda n, t: t[:, :0] if "lora_B" in n else t[:0], "rank of 1 to 256, got 0"),
    ],
)
def test_tensors_that_do_not_fit_are_named(rename, change, message, targets, folder):
    rewrite(folder, change or (lambda name, tensor: tensor), rename or (lambda name: name))
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder, targets)


def test_half_a_pair_and_twice_the_same(targets, folder):
    tensors = load_file(folder / WEIGHTS)
    name = next(key for key in tensors if "layers.0" in key and "lora_B" in key)
    twice = {name.removeprefix("base_model.model."): tensors[name].clone()}
    half = {k: v for k, v in tensors.items() if k != name}
    for held, message in (
        (half, r"layers\.0.*no partner"), (tensors | twice, "stored twice"), ({}, "no tensors"),
    ):  # fmt: skip
        save_file(held, folder / WEIGHTS)
        with pytest.raises(AdapterError, match=message):
            read_adapter(folder, targets)


def test_damaged_files(targets, folder):
    weights, config = folder / WEIGHTS, folder / CONFIG
    whole = weights.read_bytes()
    for damage, message in (
        *((lambda size=size: weights.write_bytes(whole[:size]), "truncated or damaged")
          for size in (len(whole) - 1, len(whole) // 2, 5, 0)),
        (lambda: weights.rename(folder / "adapter_model.bin"),
         r"adapter_model.bin, a pickle.* serve what its"),
        ((folder / "adapter_model.bin").unlink, f"holds no {WEIGHTS}"),
        (lambda: config.write_text("{"), "no readable adapter_config"),
        (lambda: config.write_text("[]"), "only LORA"),
        (lambda: shutil.rmtree(folder), "is no adapter"),
    ):  # fmt: skip
        damage()
        with pytest.raises(AdapterError, match=message):
            read_adapter(folder, targets)


def test_an_adapter_for_another_base_model(random_llava, tmp_path):
    make_adapter(tmp_path, str(random_llava), seed=1)
    config = LlavaConfig.from_pretrained(random_llava)
    config.text_config = LlamaConfig(**{**config.text_config.to_dict(), "hidden_size": 64})
    with torch.device("meta"):
        targets = targets_of(LlavaForConditionalGeneration(config))
    with pytest.raises(AdapterError, match=r"expected shape .*64.*got .*48.*use the base model"):
        read_adapter(tmp_path, targets)
