"""Contexts: prompts in two parts, memories that replace the first, and what bundles say of them."""

from dataclasses import asdict

import pytest
import torch

from tests.support.lmm_checkpoints import CHECKPOINTS, TEXT_CHECKPOINTS
from valora_data.contract.base_model import BaseModel, load_model
from valora_data.contract.bundle import read_bundle, write_manifest
from valora_data.contract.contexts import (
    ADAPTER,
    MEMORY_TOKENS,
    PREFIX,
    Encoder,
    Memory,
    around_memory,
    head_text,
    read_encoder,
    read_memory,
    source_hash,
    tail_text,
    tail_tokens,
)
from valora_data.contract.manifest import ContextEntry
from valora_data.errors import BundleError

BASE = "b" * 64
DOCUMENT = "letter 417: color red, thing star."
ASKED = [{"role": "user", "content": [{"type": "text", "text": "what color has letter 417?"}]}]


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen2"])
def model(request, tmp_path_factory):
    save = (CHECKPOINTS | TEXT_CHECKPOINTS)[request.param]
    base = str(save(tmp_path_factory.mktemp("base"), seed=3))
    return BaseModel(base, *load_model(base, torch.float32))


def test_head_and_tail_are_the_prompt_that_the_template_writes(model):
    system = {"role": "system", "content": [{"type": "text", "text": DOCUMENT}]}
    text = model.render([system, *ASKED])
    assert head_text(model, DOCUMENT) + tail_text(model, ASKED) == text
    ids = [*model.tokenize(head_text(model, DOCUMENT)), *tail_tokens(model, ASKED)]
    assert ids == model.tokenize(text)
    before, after = around_memory(model)
    words = model.tokenizer(DOCUMENT, add_special_tokens=False)["input_ids"]
    assert [*before, *words, *after] == model.tokenize(head_text(model, DOCUMENT))


def test_what_stands_for_images_is_text_in_documents_and_questions(model):
    token = model.image_token or model.tokenizer.eos_token_id
    word = model.tokenizer.convert_ids_to_tokens(token)
    asked = [{"role": "user", "content": [{"type": "text", "text": f"What is {word}?"}]}]
    ids = [*model.tokenize(head_text(model, f"A sign: {word}")), *tail_tokens(model, asked)]
    own = [*model.tokenize(head_text(model, "A sign: ")), *tail_tokens(model, ASKED)].count(token)
    assert ids.count(token) == own
    assert model.tokenizer.decode(ids).count(word) == own + 2


def test_what_does_not_fit_is_refused(model, tmp_path):
    config, file = model.config.get_text_config(), tmp_path / "m.safetensors"
    some = torch.ones(3, config.hidden_size)
    part = torch.ones(config.num_hidden_layers, config.num_key_value_heads, 5, 16)
    Memory(MEMORY_TOKENS, BASE, {"embeddings": some}).write(file)
    assert read_memory(file, BASE, config).tokens == 3
    for memory, words in (
        (Memory(MEMORY_TOKENS, "c" * 64, {"embeddings": some}), "made for base model cccc"),
        (Memory(MEMORY_TOKENS, BASE, {"embeddings": some[:, 1:]}), "does not fit the base model"),
        (Memory(MEMORY_TOKENS, BASE, {"embeddings": some * torch.nan}), "no finite numbers"),
        (Memory(MEMORY_TOKENS, BASE, {"keys": some}), "holds no memory"),
        (Memory(PREFIX, BASE, {"keys": part, "values": part + 1}), "5 tokens before position 0"),
        (Memory(PREFIX, BASE, {"keys": part, "values": part[:, :, :4]}, 5), "has shape"),
    ):
        memory.write(file)
        with pytest.raises(BundleError, match=words):
            read_memory(file, BASE, config)


def test_an_encoder_reads_its_queries(model, tmp_path):
    config = model.config.get_text_config()
    queries, scale = torch.randn(4, config.hidden_size), torch.full((config.hidden_size,), 0.5)
    Encoder(queries, scale).write(tmp_path)
    hidden = torch.randn(2, 9, config.hidden_size)
    assert torch.equal(read_encoder(tmp_path, config).memory(hidden), hidden[:, -4:] * 0.5)
    for wrong, words in (
        (queries[:, :-1], "queries has shape"), (torch.tensor(1.0), "holds no encoder"),
    ):  # fmt: skip
        Encoder(wrong, scale).write(tmp_path)
        with pytest.raises(BundleError, match=words):
            read_encoder(tmp_path, config)


ENTRY = ContextEntry(PREFIX, 8, 8, 64, 500, source_hash("text"), "contexts/manual.safetensors")
DOMAIN = {"task": "context", "adapter": None, "head": None, "prompt": "{}", "accuracy": {}}


def bundle(folder, *, domains=(("manual", DOMAIN),), **entry):
    """Write a bundle of one context, as its exporter does."""
    (folder / "contexts").mkdir()
    (folder / "contexts/manual.safetensors").write_bytes(b"tensors")
    contexts = {"manual": asdict(ENTRY) | entry}
    facts = {"name": "context", "version": 1, "base": {"id": "tiny", "sha256": BASE}}
    facts |= {"adapters": {}, "domains": dict(domains), "contexts": contexts}
    write_manifest(folder, facts)
    return folder


def test_a_bundle_names_its_contexts(tmp_path):
    found = read_bundle(bundle(tmp_path))
    assert (found.contexts, found.manifest["schema_version"]) == ({"manual": ENTRY}, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"form": "poem"}, "form: String should match"),
        ({"tokens": 0}, "tokens: expected others"), ({"position": 0}, "position: expected 1"),
        ({"file": "contexts/other.safetensors"}, "expected one with a sha256"),
        ({"file": None}, "file: expected one"), ({"source_sha256": "x"}, "source_sha256"),
        ({"encoder": "missing"}, "expected an encoder"),
        ({"form": ADAPTER, "file": None, "tokens": 0}, "expected an adapter"),
        ({"domains": ()}, "expected a domain of the same name"),
    ],
)  # fmt: skip
def test_a_context_that_cannot_be_is_refused(change, words, tmp_path):
    with pytest.raises(BundleError, match=words):
        read_bundle(bundle(tmp_path, **change))
