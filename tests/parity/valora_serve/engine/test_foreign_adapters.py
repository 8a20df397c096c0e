"""Adapters as others' trainers leave them: served with PEFT's logits, or refused in a sentence."""

import copy
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from tests.support.engine_reference import Reference, check_answers, make_engine, question, run
from tests.support.http_helpers import serving
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import configure, load_base, make_adapter, rewrite
from valora_serve.catalogue.adapters import WEIGHTS
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.errors import AdapterError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_llava(tmp_path_factory.mktemp("llava"), 3))


@pytest.fixture(scope="module")
def text_model(base, tmp_path_factory):
    """The base's language model as transformers classifies with it."""
    inner = load_base(base, torch.float32)
    config = copy.deepcopy(inner.config.text_config)
    config.num_labels, config.pad_token_id = 3, 0
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(inner.model.language_model.state_dict())
    folder = tmp_path_factory.mktemp("text")
    model.save_pretrained(folder)
    return str(folder)


def load_classifier(text_model, labels):
    return AutoModelForSequenceClassification.from_pretrained(
        text_model, num_labels=labels, dtype=torch.float32, ignore_mismatched_sizes=True
    )


def classifier(folder, text_model, labels=3, **config):
    """Save what PEFT saves of a classifier, with random weights."""
    model = load_classifier(text_model, labels)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    peft = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    peft.save_pretrained(folder)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of_peft(text_model, folder, ids):
    model = PeftModel.from_pretrained(load_classifier(text_model, 3), folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits


NAMES, PLAIN = {"0": "apple", "1": "pear", "2": "plum"}, ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("config", "labels"),
    [({}, PLAIN), ({"hidden_size": 64}, PLAIN), ({"id2label": NAMES}, ("apple", "pear", "plum"))],
)
def test_a_classifier_has_peft_s_logits(config, labels, base, text_model, tmp_path):
    classifier(tmp_path / "fruit", text_model, **config)
    engine = make_engine(base, {"fruit": tmp_path / "fruit"})
    (model,) = [one for one in engine.store.models() if one.name == "fruit"]
    assert (model.head, model.labels) == ("classification", labels)
    requests = [question(f"q{n}", "fruit") for n in range(5)] + [question("base")]
    found = run(engine, requests)
    for request in requests[:-1]:
        head = found[request.id].last.head
        expected = logits_of_peft(text_model, tmp_path / "fruit", request.token_ids)
        torch.testing.assert_close(torch.from_numpy(head.logits), expected, rtol=1e-4, atol=1e-4)
        assert head.label == labels[int(expected.argmax())]
        confidences = list(head.confidences.values())
        assert confidences == pytest.approx(expected.softmax(-1)[0].tolist(), abs=1e-4)
    assert found["base"].tokens


def test_a_classifier_answers_over_http(base, text_model, tmp_path):
    folder = classifier(tmp_path / "fruit", text_model, id2label=NAMES)
    engine = make_engine(base, {"fruit": folder})
    ids = question("x").token_ids
    expected = logits_of_peft(text_model, folder, ids).softmax(-1)[0].tolist()
    with serving(AsyncEngine(engine)) as server:
        asked = {"model": "fruit", "prompt": [list(ids)] * 2, "n": 2}
        answer = server.client.post("/v1/completions", json=asked).json()
        label = NAMES[str(expected.index(max(expected)))]
        assert [choice["text"] for choice in answer["choices"]] == [label] * 4
        confidences = dict(zip(NAMES.values(), expected, strict=True))
        assert answer["valora"]["confidences"] == pytest.approx(confidences, abs=1e-5)
        streamed = server.client.post("/v1/completions", json=asked | {"stream": True}).text
        assert f'"text":"{label}"' in streamed
        asked = {"model": "fruit", "messages": [{"role": "user", "content": "ripe?"}]}
        chat = server.client.post("/v1/chat/completions", json=asked).json()
        assert chat["choices"][0]["message"]["content"] == chat["valora"]["label"]
        asked["response_format"] = {"type": "json_object"}
        assert server.client.post("/v1/chat/completions", json=asked).status_code == 400
        written = {"model": "fruit", "prompt": "x", "valora": {"head": False}, "max_tokens": 4}
        answer = server.client.post("/v1/completions", json=written).json()
        assert answer["usage"]["completion_tokens"] > 0


def leave_files(folder):
    for file in ("training_args.bin", "optimizer.pt", "rng_state.pth", "adapter_model.bin"):
        (folder / file).write_bytes(b"\x80\x04.")
    (folder / "checkpoint-5").mkdir()
    (folder / "config.json").write_text("no JSON: only classifiers read it")


SERVED = {
    "float8": lambda folder: rewrite(folder, change=lambda _, t: t.to(torch.float8_e5m2)),
    "path_of_the_trainer": lambda folder: configure(
        folder, base_model_name_or_path="C:\\Users\\me\\llava"),
    "what_a_trainer_leaves": leave_files,
    "language_model_alone": lambda folder: rewrite(
        folder, rename=lambda name: name.replace("model.language_model.", "model.")),
}  # fmt: skip


def test_adapters_that_are_served(base, tmp_path):
    adapters, pefts = {}, {}
    for seed, (name, change) in enumerate(SERVED.items()):
        folder = tmp_path / name
        make_adapter(folder, base, seed=seed, rank=4, targets=r".*language_model.*(q|up)_proj")
        before = load_file(folder / WEIGHTS)
        change(folder)
        after = load_file(folder / WEIGHTS)
        # PEFT gets the same values in its own names: it knows no module of another model.
        peft = shutil.copytree(folder, tmp_path / f"peft {name}")
        save_file({name: after.get(name, before[name]).float() for name in before}, peft / WEIGHTS)
        adapters[name], pefts[name] = folder, peft
    engine, reference = make_engine(base, adapters), Reference(base, pefts)
    requests = [question(f"{name} {n}", name) for n in range(3) for name in (*adapters, None)]
    check_answers(run(engine, requests), reference, *requests)


def scores(change):
    only = lambda name, t: change(t) if "score" in name else t  # noqa: E731
    return lambda folder: rewrite(folder, change=only)


CLASSIFIERS = [
    ("one output", {"labels": 1}, None, r"shape \(1, 64\) has not 2 to"),
    ("several labels at once", {"problem_type": "multi_label_classification"}, None,
     "problem_type is 'multi_label_classification'"),
    ("other labels", {"id2label": {"0": "apple"}}, None, "id2label.*3 outputs"),
    ("the same label", {"id2label": NAMES | {"1": "plum"}}, None, "expected different names"),
    ("no configuration", {"id2label": [1, 2, 3]}, None, "id2label"),
    ("NaN", {}, scores(lambda t: t * float("nan")), "output layer.*holds NaN or values"),
    ("too large", {}, scores(lambda t: t * 1e9), r"output layer.*values above 1e\+06"),
    ("another width", {}, scores(lambda t: t[:, 1:]), "output layer.*expected shape"),
    ("no matrix", {}, scores(torch.sum), r"output layer.*shape \(\) has"),
    ("no output layer", {}, lambda folder: rewrite(
        folder, rename=lambda name: name.replace("score", "x")), "names modules that .*not hold"),
    ("tokens", {}, lambda folder: configure(folder, task_type="TOKEN_CLS"), "was trained whole"),
    ("another module", {}, lambda folder: configure(folder, modules_to_save=["score", "lm_head"]),
     r"\['lm_head'\] names modules that .* does not hold"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "change", "message"), [row[1:] for row in CLASSIFIERS],
    ids=[row[0] for row in CLASSIFIERS],
)  # fmt: skip
def test_classifiers_that_are_refused(options, change, message, base, text_model, tmp_path):
    folder = classifier(tmp_path / "fruit", text_model, **options)
    if change is not None:
        change(folder)
    with pytest.raises(AdapterError, match=message):
        make_engine(base, {"fruit": folder})


TARGETS = r".*language_model.*q_proj"
REFUSED = [
    ({"target_modules": ["q_proj", "lm_head"]}, r"lm_head.* changes lm_head, of type Linear, and "),
    ({"target_modules": ["q_proj", "embed_tokens"]}, r"changes embed_tokens, of type Embedding"),
    ({"target_modules": ["q_proj", "patch_embedding"]}, r"patch_embedding, of type Conv2d"),
    ({"modules_to_save": ["multi_modal_projector"]}, r"projector.*was trained whole.* merge it"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_adapters_that_are_refused_say_why(options, message, base, tmp_path):
    config = LoraConfig(**{"r": 4, "target_modules": TARGETS} | options)
    get_peft_model(copy.deepcopy(load_base(base)), config).save_pretrained(tmp_path / "a")
    with pytest.raises(AdapterError, match=message):
        make_engine(base, {"a": tmp_path / "a"})
