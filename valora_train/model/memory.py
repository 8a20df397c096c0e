"""Memories of documents in training, as modules (see `valora_data.contract.contexts`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from valora_data.contract.contexts import MEMORY_TOKENS, PREFIX, Memory, around_memory, head_text
from valora_data.contract.recall import head_inputs, read_head, run_tails, write_on
from valora_data.schema import Document
from valora_train.model.lmm import Lmm
from valora_train.model.prompts import Encoded, HiddenStates, alike

READ_AT_ONCE = 16_384  # tokens of documents that are kept at once, for the questions of a batch
ATTENDING = 512  # most questions whose attention is computed, evenly taken from all
WRITTEN = 64  # answers that are written at once


class Prefix(nn.Module):
    """Keys and values [layers, kv_heads, tokens, head_dim] before a `position`, as a module."""

    form = PREFIX

    def __init__(self, keys: Tensor, values: Tensor, position: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)
        self.position, self.tokens = position, int(keys.shape[2])


class MemoryTokens(nn.Module):
    """Input embeddings in place of the document, [tokens, width]."""

    form = MEMORY_TOKENS
    position = 0

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(embeddings)
        self.tokens = len(embeddings)


AnyMemory = Prefix | MemoryTokens  # None stands for the memory of an empty document


def module_of(memory: Memory) -> AnyMemory:
    """Return a stored memory as a module."""
    tensors = {name: part.float() for name, part in memory.tensors.items()}
    if memory.form == PREFIX:
        return Prefix(tensors["keys"], tensors["values"], memory.position)
    return MemoryTokens(tensors["embeddings"])


def stored(module: AnyMemory, base: str, dtype: torch.dtype) -> Memory:
    """Return a module as a memory for the base model of that hash, which can be written."""
    tensors = {name: part.detach().to(dtype).cpu() for name, part in module.named_parameters()}
    return Memory(module.form, base, tensors, module.position)


def document_tokens(lmm: Lmm, document: Document) -> int:
    """Return the number of tokens of a document's head, visual ones included."""
    return int(head_inputs(lmm, document.text, document.images)["input_ids"].shape[1])


def read_document(lmm: Lmm, document: Document) -> Prefix:
    """Return what the active model keeps of a whole document: the memory of the full prompt."""
    with lmm.precision():
        keys, values, position = read_head(lmm, document.text, document.images)
    return Prefix(keys.float(), values.float(), position)


def new_memory_tokens(lmm: Lmm, document: Document, tokens: int) -> MemoryTokens:
    """Return memory tokens that begin as the embeddings of the document's first tokens."""
    ids = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"][:tokens]
    ids += [lmm.tokenizer.eos_token_id] * (tokens - len(ids))
    table = lmm.model.get_input_embeddings()
    return MemoryTokens(table(torch.tensor(ids, device=lmm.device)).detach().float().clone())


def most_attended(lmm: Lmm, read: Prefix, questions: Sequence[Encoded], tokens: int) -> Prefix:
    """Keys and values that questions attend to most (H2O, SnapKV), by head, in order."""
    kept = attention_mass(lmm, read, questions).topk(tokens, -1).indices.sort(-1).values[..., None]
    kept = kept.expand(-1, -1, -1, read.keys.shape[-1])
    keys, values = (part.detach().gather(2, kept) for part in (read.keys, read.values))
    return Prefix(keys, values, read.position)


@torch.no_grad()
def attention_mass(lmm: Lmm, read: Prefix, questions: Sequence[Encoded]) -> Tensor:
    """Sum up the attention of questions to each token of a document: [layers, kv_heads, tokens]."""
    language: Any = lmm.language_model
    some = questions[:: -(-len(questions) // ATTENDING)]
    mass = torch.zeros(read.keys.shape[:3], device=lmm.device)
    there = torch.zeros(0)  # (n, q), the tokens of a batch that are no padding

    def add(layer: int, weights: Tensor) -> None:
        found = torch.einsum("nhqt,nq->ht", weights[..., : read.tokens].float(), there)
        mass[layer] += found.unflatten(0, (mass.shape[1], -1)).sum(1)

    step = max(1, READ_AT_ONCE // read.tokens)
    with ExitStack() as undo:
        undo.callback(language.set_attn_implementation, language.config._attn_implementation)
        language.set_attn_implementation("eager")  # the only one that returns its weights
        for number, layer in enumerate(language.layers):
            hook = layer.self_attn.register_forward_hook(
                lambda module, given, made, number=number: add(number, made[1])
            )
            undo.callback(hook.remove)
        for start in range(0, len(some), step):
            batch = some[start : start + step]
            there = pad_sequence([torch.ones(item.length) for item in batch], True).to(lmm.device)
            states(lmm, batch, [read] * len(batch))
    return mass


def states(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[AnyMemory | None]
) -> HiddenStates:
    """Compute the last hidden states of questions behind their memories."""
    ids = pad_sequence([item.ids for item in batch], batch_first=True).to(lmm.device)
    hidden: dict[int, Tensor] = {}
    for rows in alike(map(_shape, memories)):
        part = _run(lmm, [batch[row] for row in rows], [memories[row] for row in rows])[0]
        part = F.pad(part, (0, 0, 0, ids.shape[1] - part.shape[1]))
        hidden |= dict(zip(rows, part, strict=True))
    whole = torch.stack([hidden[row] for row in range(len(batch))])
    return HiddenStates.of(batch, whole, ids)


@torch.no_grad()
def write(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[AnyMemory | None], most: int
) -> list[str]:
    """Write the likeliest answers to questions behind their memories, token by token."""
    answers = [""] * len(batch)
    keys = zip(map(_shape, memories), [item.length for item in batch], strict=True)
    for rows in alike(keys, WRITTEN):
        hidden, cache, position = _run(
            lmm, [batch[row] for row in rows], [memories[row] for row in rows], cached=True
        )
        lmm.adapters.act_everywhere()  # on what is written now
        position += hidden.shape[1]
        texts = write_on(lmm, hidden, cache, position, most, lmm.precision())
        for row, text in zip(rows, texts, strict=True):
            answers[row] = text
    return answers


def _shape(memory: AnyMemory | None) -> Hashable:
    """What memories have in common that are computed together."""
    return None if memory is None else (memory.form, memory.tokens, memory.position)


def _run(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[Any], *, cached: bool = False
) -> tuple[Tensor, Any, int]:
    """Hidden states of tails behind memories of one form and size, padded on the right."""
    lmm.language_model.eval()
    with lmm.precision():
        ids = pad_sequence([item.ids for item in batch], batch_first=True).to(lmm.device)
        embedded = lmm.model.get_input_embeddings()(ids)
        if isinstance(memories[0], Prefix):
            keys = _side_by_side([memory.keys for memory in memories])
            values = _side_by_side([memory.values for memory in memories])
            position = memories[0].position
        else:
            keys, values = _read_heads(lmm, memories)
            position = int(keys.shape[3])
        lmm.adapters.act_from([item.prompt - 1 for item in batch], ids.shape[1])
        hidden, cache = run_tails(lmm, embedded, position, keys, values, cached=cached)
        return hidden, cache, position


def _read_heads(lmm: Lmm, memories: Sequence[MemoryTokens | None]) -> tuple[Tensor, Tensor]:
    """Keys and values, [layers, n, …], of heads of one size; rows of one memory share a pass."""
    distinct = {id(memory): memory for memory in memories}
    embedded = torch.stack([head_embeddings(lmm, memory) for memory in distinct.values()])
    # An adapter that acts at decoding only acts on no token of a head.
    lmm.adapters.act_from([embedded.shape[1]] * len(embedded), embedded.shape[1])
    read = run_tails(lmm, embedded, 0, cached=True)[1].layers
    places = {key: place for place, key in enumerate(distinct)}
    rows = torch.tensor([places[id(memory)] for memory in memories], device=lmm.device)
    return (
        torch.stack([layer.keys for layer in read]).index_select(1, rows),
        torch.stack([layer.values for layer in read]).index_select(1, rows),
    )


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Stack keys or values of rows, [layers, n, …]; those of one document are not copied."""
    if all(part is parts[0] for part in parts):
        return parts[0][:, None].expand(-1, len(parts), *parts[0].shape[1:])
    return torch.stack(list(parts), 1)


def head_embeddings(lmm: Lmm, memory: MemoryTokens | None) -> Tensor:
    """Return the input embeddings of a head with memory tokens, or of an empty document's."""
    table = lmm.model.get_input_embeddings()
    if memory is None:
        found: Tensor = table(torch.tensor(lmm.tokenize(head_text(lmm, "")), device=lmm.device))
        return found
    before, after = (torch.tensor(ids, dtype=torch.int64) for ids in around_memory(lmm))
    parts = [table(before.to(lmm.device)), memory.embeddings, table(after.to(lmm.device))]
    return torch.cat([part.to(parts[0].dtype) for part in parts])
