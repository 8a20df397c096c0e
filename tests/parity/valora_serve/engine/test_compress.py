"""Contexts made at run time against the document in the prompt, and against the encoder."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from tests.support.context_bundles import ContextReference, ContextSpec, make_context_bundle
from tests.support.engine_reference import (
    Reference,
    ask,
    assert_empty,
    make_engine,
    outputs_of,
    relative,
    with_client,
)
from tests.support.lmm_checkpoints import LAYERS
from tests.support.serve_helpers import LANGUAGE
from valora_data.contract.contexts import (
    MEMORY_TOKENS,
    PREFIX,
    around_memory,
    read_encoder,
    read_memory,
    system_turn,
)
from valora_serve.catalogue.contexts import MEMORY_FILE
from valora_serve.engine.compress import keep_keys
from valora_serve.errors import AdapterError, BusyError, ServeError, TooLongError, UnknownModelError
from valora_serve.types import NewContext, Request, SamplingParams

DOCUMENT = "The red key opens the old green door. Nobody but Ann knows where it lies. " * 4
CONTEXTS = {"learnt": ContextSpec(MEMORY_TOKENS, 6, "reader")}
ADAPTERS = {"reader": {"rank": 4, "alpha": 8, "targets": LANGUAGE}}


@pytest.fixture(scope="module")
def bundle(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "documents"
    return make_context_bundle(folder, base, CONTEXTS, ADAPTERS, encoder=6)


SAMPLING = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.mark.parametrize("settings", [{}, {"chunk": 16}, {"overlap": True}])
def test_a_prefix_of_all_tokens_answers_as_the_document_in_the_prompt(base, tmp_path, settings):
    engine = make_engine(base, **settings)
    question = ask("Who knows?")
    whole = [system_turn(DOCUMENT), *question]

    async def use(client):
        await client.make_context(NewContext("doc", DOCUMENT), tmp_path / "doc")
        found = await client.load("context", tmp_path / "doc", "doc")
        for request in (Request("a", "doc", messages=question, sampling=SAMPLING),
                        Request("b", None, messages=whole, sampling=SAMPLING)):  # fmt: skip
            found.append((await outputs_of(client, request)).tokens)
        await client.unload("context", "doc")
        return found

    made, short, long = with_client(engine, use)
    expected = Reference(base, {})(Request("b", None, messages=whole, sampling=SAMPLING)).tokens
    assert short == long == expected
    assert (made.form, made.kind, made.adapter) == (PREFIX, "domain", None)
    assert made.memory_tokens == made.source_tokens > 100
    assert made.memory_bytes == 2 * LAYERS * 2 * 16 * 4 * made.memory_tokens
    assert len(engine.prefixes) == 0
    assert_empty(engine)


def test_a_shorter_prefix_keeps_positions_and_is_served_as_it_was_stored(base, tmp_path):
    engine = make_engine(base)
    folder = tmp_path / "contexts/doc.safetensors"
    request = Request("a", "doc", messages=ask("Who knows?"), sampling=SAMPLING)

    async def use(client):
        await client.make_context(NewContext("doc", DOCUMENT, tokens=37), tmp_path / "doc")
        await client.load("context", tmp_path / "doc", "doc")
        return (await outputs_of(client, request)).tokens

    tokens = with_client(engine, use)
    folder.parent.mkdir()
    (tmp_path / "doc" / MEMORY_FILE).rename(folder)
    reference = ContextReference(base, tmp_path, {"doc": ContextSpec(PREFIX, 37)}, {})
    assert tokens == reference(request).tokens


@pytest.mark.parametrize("settings", [{}, {"chunk": 7}])
def test_memory_tokens_are_those_of_the_encoder(base, bundle, tmp_path, settings):
    engine = make_engine(base, **settings)
    engine.load("bundle", bundle)
    new = NewContext("doc", DOCUMENT, MEMORY_TOKENS, adapter="documents/reader")

    async def use(client):
        for place in ("first", "again"):  # the document is in the prefix cache then
            await client.make_context(new, tmp_path / place)
        return await client.load("context", tmp_path / place, "doc")

    (made,) = with_client(engine, use)
    assert (made.adapter, made.form, made.memory_tokens) == ("documents/reader", MEMORY_TOKENS, 6)
    lmm = engine.lmm
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    encoder = read_encoder(bundle / "encoders/compress", lmm.config.get_text_config())
    ids = [*around_memory(lmm)[0], *lmm.tokenize(DOCUMENT, special=False)]
    inputs = torch.cat([model.get_input_embeddings()(torch.tensor(ids)), encoder.queries])
    adapted = PeftModel.from_pretrained(model, str(bundle / "encoders/compress"))
    with torch.no_grad():
        inner = adapted.get_base_model().model.language_model
        hidden = inner(inputs_embeds=inputs[None]).last_hidden_state[0]
    wanted = encoder.memory(hidden).numpy()
    facts = engine.store.base_hash(), lmm.config.get_text_config()
    for place in ("first", "again"):
        found = read_memory(tmp_path / place / MEMORY_FILE, *facts).tensors["embeddings"]
        assert relative(found.numpy(), wanted) < 1e-5


def test_which_keys_are_kept():
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn((2, 2, 3, 20, 8), generator=generator)
    kv[0, :, :, 5:] += 10  # all alike, but for the odd ones out
    kv[0, 1, 2, 12] = -1.0
    kept = keep_keys(kv, 6)
    assert kept.shape == (2, 2, 3, 6, 8)
    assert torch.equal(kept[:, :, :, :5], kv[:, :, :, :5])
    assert torch.equal(kept[:, 1, 2, 5], kv[:, 1, 2, 12])
    assert keep_keys(kv, 20) is kv


@pytest.mark.parametrize("wanted, kind, message", [
    (NewContext("a", " \n"), ServeError, "context a: the document is empty: send its text"),
    (NewContext("a", "%PDF-1.7 x"), ServeError, "the document is a PDF file: send its text"),
    (NewContext("a", "word " * 2000), TooLongError,
     "the document has 6003 tokens, and fewer than 1024 fit"),
    (NewContext("a", "word " * 10**6), TooLongError, "the document has 5000000 characters"),
    (NewContext("a", "Few words.", tokens=100), ServeError,
     r"the document has \d+ tokens, fewer than the 100 of its memory"),
    (NewContext("a", "Few", MEMORY_TOKENS), ServeError, "fewer than the 6 of its memory"),
    (NewContext("a", "text", "adapter"), ServeError, "form: expected prefix or memory_tokens"),
    (NewContext("a", "text", encoder="x"), ServeError, "encoder: a prefix needs none"),
    (NewContext("a", "text", MEMORY_TOKENS, 5), ServeError, "the encoder decides"),
    (NewContext("a", "text", MEMORY_TOKENS, encoder="x"), UnknownModelError,
     "'x' is no encoder: use one of documents/compress, or make a prefix"),
    (NewContext("a", "text", adapter="x"), AdapterError, "adapter 'x', which is not served"),
])  # fmt: skip
def test_refusals(base, bundle, tmp_path, wanted, kind, message):
    engine = make_engine(base)
    engine.load("bundle", bundle)

    async def use(client):
        with pytest.raises(kind, match=message):
            await client.make_context(wanted, tmp_path / "a")
        with pytest.raises(BusyError, match="belongs to bundle documents"):
            await client.unload("context", "learnt")

    with_client(engine, use)
    assert not (tmp_path / "a").exists()
    assert engine.stats().contexts_known == 1
