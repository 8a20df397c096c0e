"""Bundles with contexts of random memories, and what transformers and PEFT answer about them."""

import shutil
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from peft import PeftModel
from transformers import DynamicCache

from tests.support.engine_reference import Expected, Reference, key_of
from tests.support.serve_helpers import load_base, make_adapter
from valora_data.contract import contexts as contract
from valora_data.contract.base_model import BaseModel, base_hash
from valora_data.contract.bundle import write_manifest
from valora_data.contract.contexts import ADAPTER, MEMORY_TOKENS, PREFIX, Encoder, Memory


@dataclass(frozen=True)
class ContextSpec:
    """A context of a test bundle."""

    form: str
    tokens: int = 0  # of its memory
    adapter: str | None = None  # None for the base model
    gap: int = 0  # by which the tail's position is beyond the last token of a prefix


def random_memory(base, spec, seed):
    """A memory that changes answers: its values are as large as those of a document."""
    text = load_base(base).config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shapes = {
        PREFIX: (text.num_hidden_layers, text.num_key_value_heads, spec.tokens, width),
        MEMORY_TOKENS: (spec.tokens, text.hidden_size),
    }
    if spec.form not in shapes:
        return None
    names = ("keys", "values") if spec.form == PREFIX else ("embeddings",)
    tensors = {name: torch.randn(shapes[spec.form], generator=generator) for name in names}
    position = (spec.tokens + spec.gap,) if spec.form == PREFIX else ()
    return Memory(spec.form, base_hash(base), tensors, *position)


def make_context_bundle(folder, base, contexts, adapters, *, name="documents", encoder=0, seed=0):
    """Write a bundle of contexts; what is in the folder is replaced.

    `adapters` are arguments of `make_adapter`, and `decode_only`, by name, `encoder` the tokens of
    the memories that its encoder `compress` makes; 0 for no encoder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    made = {}
    for number, (adapter, options) in enumerate(adapters.items()):
        chosen = dict(options)
        late = chosen.pop("decode_only", False)
        path = folder / "adapters" / adapter
        make_adapter(path, base, seed=100 * seed + number, strength=0.25, **chosen)
        (path / "README.md").unlink(missing_ok=True)
        facts = {"rank": 8, "domains": [], "decode_only": late}
        made[adapter] = {"path": f"adapters/{adapter}", **facts}
    entries, domains = {}, {}
    for number, (context, spec) in enumerate(contexts.items()):
        file = f"contexts/{context}.safetensors"
        memory = random_memory(base, spec, 1000 * seed + number)
        if memory is not None:
            memory.write(folder / file)
        entries[context] = {
            "form": spec.form, "tokens": spec.tokens, "position": spec.tokens + spec.gap,
            "file": None if memory is None else file,
            "bytes": 0 if memory is None else memory.bytes,
            "source_tokens": 400, "source_sha256": contract.source_hash(context),
            "encoder": "compress" if encoder and spec.form == MEMORY_TOKENS else None,
        }  # fmt: skip
        domains[context] = {
            "task": "context", "metric": "exact_match", "required": 0.5, "accuracy": {"test": 0.6},
            "adapter": spec.adapter, "head": None, "prompt": "{}",
        }  # fmt: skip
    manifest = {
        "name": name, "version": 1, "strategy": "paper", "adapters": made, "domains": domains,
        "base": {"id": base, "sha256": base_hash(base), "dtype": "float32"}, "contexts": entries,
    }  # fmt: skip
    if encoder:
        path = folder / "encoders/compress"
        make_adapter(path, base, seed=77, strength=0.25)
        (path / "README.md").unlink(missing_ok=True)
        generator = torch.Generator().manual_seed(78)
        width = int(load_base(base).config.get_text_config().hidden_size)
        queries = torch.randn((encoder, width), generator=generator)
        Encoder(queries, torch.linspace(0.5, 1.5, width)).write(path)
        manifest["encoders"] = {"compress": {"path": "encoders/compress", "tokens": encoder}}
    write_manifest(folder, manifest)
    return folder


class ContextReference:
    """Answers about contexts with transformers' caches and PEFT's adapters, one at a time."""

    def __init__(self, base, folder, contexts, adapters):
        self._plain = Reference(base, {name: folder / "adapters" / name for name in adapters})
        self._adapters, self._contexts, self._folder = adapters, contexts, folder
        self._base = base
        self.model = BaseModel(base, load_base(base), self._plain.processor)
        self._known = {}

    def __call__(self, request):
        """Answer a request about a context, an adapter or the base model greedily."""
        key = key_of(request)
        if key not in self._known:
            self._known[key] = self._answer(request)
        return self._known[key]

    def _answer(self, request):
        spec = self._contexts.get(request.model or "")
        adapter = request.model if request.model in self._adapters else None
        if spec is not None:
            adapter = spec.adapter
        position, cache = 0, DynamicCache()
        turns = [dict(turn) for turn in request.messages or ()]
        for turn in turns:
            if isinstance(turn["content"], str):
                turn["content"] = [{"type": "text", "text": turn["content"]}]
        if spec is None:
            inputs = self._plain.inputs(request)
        elif spec.form == ADAPTER:
            text = self.model.render([contract.system_turn(""), *turns])
            inputs = self.model.process(text, request.images)
        else:
            tail = contract.tail_text(self.model, turns)
            shown = {"images": list(request.images)} if request.images else {}
            inputs = self._plain.processor(
                text=[tail], return_tensors="pt", add_special_tokens=False, **shown
            )
        embedded = self._embedded(inputs)
        if spec is not None and spec.form != ADAPTER:
            file = self._folder / f"contexts/{request.model}.safetensors"
            config = self.model.config.get_text_config()
            memory = contract.read_memory(file, base_hash(self._base), config)
            if spec.form == PREFIX:
                position = memory.position
                kept = (memory.tensors[name].clone()[:, None] for name in ("keys", "values"))
                cache = DynamicCache([*zip(*kept, strict=True)])
            else:
                before, after = contract.around_memory(self.model)
                words = self.model.language_model.get_input_embeddings()
                parts = [words(torch.tensor(before)), memory.tensors["embeddings"]]
                parts += [words(torch.tensor(after))] if after else []
                embedded = torch.cat([*parts, embedded])
        return self._generate(request, embedded, cache, position, adapter)

    def _embedded(self, inputs):
        """Input embeddings [tokens, width] of a processor's output, images included."""
        words = self.model.language_model.get_input_embeddings()
        found = words(inputs["input_ids"][0]).clone()
        if "pixel_values" in inputs:
            features = self.model.model.get_image_features(inputs["pixel_values"])
            pooled = getattr(features, "pooler_output", features)
            found[inputs["input_ids"][0] == self.model.image_token] = torch.cat(list(pooled))
        return found

    def _generate(self, request, embedded, cache, position, adapter):
        """Compute all but the last token of the prompt, that one, and then one after another."""
        late = adapter is not None and bool(self._adapters[adapter].get("decode_only"))
        tokens, logits = [], []
        if len(embedded) > 1:
            self._forward(embedded[:-1], cache, position, None if late else adapter)
        position += len(embedded) - 1
        row = embedded[-1:]
        for _ in range(request.sampling.max_tokens or 1):
            found = self._forward(row, cache, position, adapter)
            logits.append(found)
            tokens.append(int(found.argmax()))
            if tokens[-1] in self.model.stop_ids and not request.sampling.ignore_eos:
                break
            position += 1
            row = self.model.language_model.get_input_embeddings()(torch.tensor(tokens[-1:]))
        return Expected(tokens, torch.stack(logits))

    def _forward(self, rows, cache, position, adapter):
        """Logits [vocabulary] behind the last of some rows, which join the cache."""
        model = inner = self._plain.model
        bare = nullcontext()
        if isinstance(model, PeftModel):
            inner = model.get_base_model()
            if adapter is None:
                bare = model.disable_adapter()
            else:
                model.set_adapter(adapter)
        more = {"past_key_values": cache, "use_cache": True}
        positions = (position + torch.arange(len(rows)))[None]
        with torch.no_grad(), bare:
            found = inner(inputs_embeds=rows[None], position_ids=positions, **more)
        return found.logits[0, -1].float()
