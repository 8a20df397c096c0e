"""Makes a context of a document while others are served: one pass through the model, no training.

A `prefix` is made of the document's own keys and values, all of them or the most distinct ones;
`memory_tokens` are what an encoder of a bundle makes of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from valora_data.contract.contexts import (
    MEMORY_TOKENS,
    PREFIX,
    Memory,
    around_memory,
    head_text,
    source_hash,
)
from valora_data.errors import BundleError, DataError
from valora_data.wording import plural
from valora_serve.catalogue.contexts import MEMORY_FILE, write_context
from valora_serve.catalogue.store import Store
from valora_serve.engine.sequence import Prepared
from valora_serve.errors import AdapterError, RequestError, ServeError, TooLongError
from valora_serve.model.heads import EMBEDDING, EmbeddingHead
from valora_serve.model.lmm import Lmm
from valora_serve.model.prompt import PLACEHOLDER, MemoryTokens, Prompt
from valora_serve.types import NewContext, Output, Request

FIRST = 4  # tokens always kept, as every later token attends to them (StreamingLLM, 2023)


Write: TypeAlias = Callable[[Path, Output], None]
"""Writes a context of what its request's last output holds to a new folder, or raises its error."""


def prepare_compression(
    lmm: Lmm, store: Store, wanted: NewContext, name: str, limit: int
) -> tuple[Prepared, Write]:
    """Tokenize a document for the request `name`, in any thread; a `ServeError` says why not."""
    _check(lmm, wanted)
    try:
        around = around_memory(lmm)  # refuses templates whose questions find no document
        ids = lmm.tokenize(head_text(lmm, wanted.document))
        base = store.base_hash()
    except (BundleError, DataError) as error:
        raise AdapterError(f"context {wanted.name}: {error}") from error
    request = Request(name, embed=True, keep_kv=wanted.form == PREFIX, stream=False)
    if wanted.adapter is not None:
        store.adapter_of(wanted.name, wanted.adapter)
    if wanted.form == PREFIX:
        _check_length(wanted, wanted.tokens or 1, len(ids), limit)
        target, prompt = store.resolve(None), Prompt(ids)
        head = EMBEDDING
    else:
        target = store.encoder(wanted.encoder)
        assert target.encoder is not None
        count = len(target.encoder.queries)
        words = lmm.tokenize(wanted.document, special=False)
        _check_length(wanted, count, len(words), limit - count)
        read = [*around[0], *words]
        at = np.arange(len(read), len(read) + count)
        assert target.adapter is not None
        key = b"queries|" + bytes.fromhex(target.adapter.content)
        queries = MemoryTokens(key, at, target.encoder.queries)
        prompt = Prompt([*read, *[PLACEHOLDER] * count], memory=queries)
        head = EmbeddingHead(last_tokens=count)
    encoder, tokens, dtype = target.encoder, len(ids), lmm.dtype

    def write(folder: Path, output: Output) -> None:
        from valora_data.contract.manifest import ContextEntry  # which needs pydantic

        if output.error is not None:
            raise output.error
        if encoder is not None:
            if output.head is None or output.head.logits is None:
                raise ServeError(f"context {wanted.name}: the encoder gave nothing")
            found = encoder.memory(torch.from_numpy(output.head.logits)).to(dtype)
            memory = Memory(MEMORY_TOKENS, base, {"embeddings": found})
        else:
            keys, values = keep_keys(output.kv, wanted.tokens or tokens).cpu()
            memory = Memory(PREFIX, base, {"keys": keys, "values": values}, tokens)
        entry = ContextEntry(
            form=memory.form, file=MEMORY_FILE, tokens=memory.tokens, position=memory.position,
            bytes=memory.bytes, source_tokens=tokens, source_sha256=source_hash(wanted.document),
            encoder=None if encoder is None else target.model.name,
        )  # fmt: skip
        write_context(folder, memory, entry, wanted.adapter)

    return Prepared(request, target, prompt, head), write


def keep_keys(kv: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the tokens whose keys differ most from the mean of their layer and head.

    They have the positions that they had (KeyDiff, Park et al. 2025) and their order: `kv`
    [2, layers, kv_heads, tokens, head_dim], keys after their rotary positions, to `count` tokens.
    """
    if count >= kv.shape[3]:
        return kv
    unit = torch.nn.functional.normalize(kv[0].float(), dim=-1)
    alike = (unit * unit.mean(-2, keepdim=True)).sum(-1)
    alike[..., :FIRST] = -torch.inf
    kept = alike.topk(count, largest=False).indices.sort().values
    return kv.gather(3, kept[None, ..., None].expand(2, *kept.shape, kv.shape[-1]))


def _check(lmm: Lmm, wanted: NewContext) -> None:
    name, form = f"context {wanted.name}", wanted.form
    for wrong, said in (
        (not wanted.document.strip(), f"{name}: the document is empty: send its text"),
        (wanted.document.startswith("%PDF-"), f"{name}: the document is a PDF file: send its text"),
        (form not in (PREFIX, MEMORY_TOKENS), f"form: expected {PREFIX} or {MEMORY_TOKENS}, got "
         f"{form}: other forms are trained (make fuse TASK=context)"),
        (form == MEMORY_TOKENS and wanted.tokens is not None,
         f"tokens: the encoder decides how many {MEMORY_TOKENS} it makes"),
        (form == PREFIX and wanted.encoder is not None,
         f"encoder: a {PREFIX} needs none: set form to {MEMORY_TOKENS}"),
        (form == PREFIX and lmm.linears.group is not None, f"{name}: several GPUs that share a "
         f"model cannot make a {PREFIX}: set form to {MEMORY_TOKENS}"),
    ):  # fmt: skip
        if wrong:
            raise RequestError(said)


def _check_length(wanted: NewContext, needed: int, found: int, limit: int) -> None:
    if found >= limit:
        raise TooLongError(
            f"context {wanted.name}: the document has {found} tokens, and fewer than {limit} fit "
            "into the model's context: cut it into several contexts"
        )
    if found < needed:
        raise RequestError(
            f"context {wanted.name}: the document has {plural(found, 'token')}, fewer than the "
            f"{needed} of its memory: ask it as part of the prompt, or make a smaller memory"
        )
