"""Adapters as others' trainers leave them: served with PEFT's logits, or refused in a sentence."""

import copy
import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from tests.support.engine_reference import Reference, check_answers, make_engine, question, run
from tests.support.lmm_checkpoints import save_llava
from tests.support.serve_helpers import load_base, make_adapter
from valora_serve.errors import AdapterError
from valora_serve.types import Request

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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


def classifier(folder, text_model, labels=3, **config):
    """Train nothing, and save what PEFT saves of a classifier."""
    model = AutoModelForSequenceClassification.from_pretrained(text_model, num_labels=labels,
                                                               dtype=torch.float32,
                                                               ignore_mismatched_sizes=True)  # fmt: skip
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    peft = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **options))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=generator)
    peft.save_pretrained(folder)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits_of_peft(text_model, folder, ids, labels=3):
    model = AutoModelForSequenceClassification.from_pretrained(text_model, num_labels=labels,
                                                               dtype=torch.float32,
                                                               ignore_mismatched_sizes=True)  # fmt: skip
    model = PeftModel.from_pretrained(model, folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits


NAMES = {"0": "apple", "1": "pear", "2": "plum"}


@pytest.mark.parametrize(
    ("config", "labels"),
    [({}, ("LABEL_0", "LABEL_1", "LABEL_2")), ({"hidden_size": 64}, ("LABEL_0", "LABEL_1", "LABEL_2")),
     ({"id2label": NAMES}, ("apple", "pear", "plum"))],
)  # fmt: skip
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
        torch.testing.assert_close(
            torch.tensor(list(head.confidences.values())), expected.softmax(-1)[0],
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
    assert found["base"].tokens
