"""Memories of documents in training: what stands before a question instead of its document.

A memory is a module, so that it can be trained and kept like a head. `states` and `write` compute
what the base model with the active adapter makes of questions behind their memories, exactly as
`valora_data.contract.contexts` defines it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from valora_data.contract.contexts import (
    MEMORY_TOKENS,
    PREFIX,
    Memory,
    around_memory,
    head_text,
)
from valora_data.contract.recall import (
    head_inputs,
    read_head,
    read_tokens,
    run_tails,
    write_on,
)
from valora_data.errors import DataError
from valora_data.wording import plural
from valora_train.model.prompts import HiddenStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_data.schema import Document
    from valora_train.model.lmm import Lmm
    from valora_train.model.prompts import Encoded


READ_AT_ONCE = 16_384
"""Tokens that are kept at once where questions are read with their documents: those of the document
for each question of a batch."""


class Prefix(nn.Module):
    """Keys and values of every layer, which replace the head of a prompt.

    Args:
        keys: [layers, kv_heads, tokens, head_dim], after rotary positions.
        values: As `keys`.
        position: Position of the first token behind them.
    """

    form = PREFIX

    def __init__(self, keys: Tensor, values: Tensor, position: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Parameter(keys), nn.Parameter(values)
        self.position = position

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.keys.shape[2])

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names that files have."""
        return {"keys": self.keys.detach(), "values": self.values.detach()}


class MemoryTokens(nn.Module):
    """Input embeddings in place of the document.

    Args:
        embeddings: [tokens, width].
    """

    form = MEMORY_TOKENS
    position = 0

    def __init__(self, embeddings: Tensor) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(embeddings)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.embeddings)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by the names that files have."""
        return {"embeddings": self.embeddings.detach()}


AnyMemory = Prefix | MemoryTokens
"""A memory; None stands for that of an empty document, as in the form `adapter`."""


def module_of(memory: Memory) -> AnyMemory:
    """Return a stored memory as a module."""
    tensors = {name: part.float() for name, part in memory.tensors.items()}
    if memory.form == PREFIX:
        return Prefix(tensors["keys"], tensors["values"], memory.position)
    return MemoryTokens(tensors["embeddings"])


def stored(module: AnyMemory, base: str, dtype: torch.dtype) -> Memory:
    """Return a module as a memory that can be written.

    Args:
        module: The module.
        base: `base_hash` of the base model.
        dtype: Type to store.
    """
    tensors = {name: part.to(dtype).cpu() for name, part in module.tensors().items()}
    return Memory(module.form, base, tensors, module.position)


# ------------------------------------------------------------------ reading documents


def document_tokens(lmm: Lmm, document: Document) -> int:
    """Return the number of tokens of a document's head, visual ones included."""
    return int(head_inputs(lmm, document.text, document.images)["input_ids"].shape[1])


def read_document(lmm: Lmm, document: Document) -> Prefix:
    """Return what the active model keeps of a whole document: the memory of the full prompt.

    Args:
        lmm: The model.
        document: The document.

    Raises:
        DataError: The document does not fit into the model's context.
    """
    with lmm.precision():
        keys, values, position = read_head(lmm, document.text, document.images)
    return Prefix(keys.float(), values.float(), position)


def read_beginning(lmm: Lmm, document: Document, tokens: int) -> Prefix:
    """Return what the active model keeps of the document's beginning.

    Args:
        lmm: The model.
        document: The document.
        tokens: Tokens to keep; of an album, as many whole images as fit.
    """
    if document.images:
        return read_document(lmm, _first_images(lmm, document, tokens))
    with lmm.precision():
        keys, values, position = read_tokens(lmm, _first_ids(lmm, document, tokens))
    return Prefix(keys.float(), values.float(), position)


def new_memory_tokens(lmm: Lmm, document: Document, tokens: int) -> MemoryTokens:
    """Return memory tokens that begin as the embeddings of the document's first tokens.

    Args:
        lmm: The model.
        document: The document.
        tokens: Number of memory tokens.
    """
    ids = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"][:tokens]
    ids += [lmm.tokenizer.eos_token_id] * (tokens - len(ids))
    table = lmm.model.get_input_embeddings()
    return MemoryTokens(table(torch.tensor(ids, device=lmm.device)).detach().float().clone())


def _first_ids(lmm: Lmm, document: Document, tokens: int) -> list[int]:
    """Tokens of a head that holds the beginning of a document."""
    before, after = around_memory(lmm)
    room = tokens - len(before) - len(after)
    if room < 1:
        raise DataError(
            f"a memory of {plural(tokens, 'token')} has no room for a document beside the "
            f"{len(before) + len(after)} of the chat template: raise context.tokens"
        )
    ids = lmm.tokenizer(document.text, add_special_tokens=False)["input_ids"]
    return [*before, *ids[:room], *after]


def _first_images(lmm: Lmm, document: Document, tokens: int) -> Document:
    """The first images of an album, whose head has at most as many tokens."""
    for kept in range(len(document.images), -1, -1):
        found = replace(document, images=document.images[:kept])
        if document_tokens(lmm, found) <= tokens:
            return found
    raise DataError(
        f"a memory of {plural(tokens, 'token')} has no room for the words of an album: raise "
        "context.tokens"
    )


# ------------------------------------------------------------------ answering


def states(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[AnyMemory | None]
) -> HiddenStates:
    """Compute the last hidden states of questions behind their memories.

    Args:
        lmm: The model, with its active adapter.
        batch: Encoded tails of any lengths, with answers or without.
        memories: The memory of each row.

    Returns:
        Hidden states of the tails.
    """
    longest = max(item.length for item in batch)
    rows: dict[int, Tensor] = {}
    for group in _groups(memories):
        part = _run(lmm, [batch[row] for row in group], [memories[row] for row in group])[0]
        rows |= dict(zip(group, part, strict=True))
    whole = [
        nn.functional.pad(rows[row], (0, 0, 0, longest - len(rows[row])))
        for row in range(len(batch))
    ]
    ids = pad_sequence([item.ids for item in batch], batch_first=True).to(lmm.device)
    return HiddenStates(
        torch.stack(whole),
        torch.zeros_like(ids, dtype=torch.bool),
        tuple(item.prompt for item in batch),
        tuple(item.length for item in batch),
        ids,
        tuple(item.places for item in batch),
    )


@torch.no_grad()
def write(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[AnyMemory | None], most: int
) -> list[str]:
    """Write the likeliest answers to questions behind their memories, token by token.

    Args:
        lmm: The model, with its active adapter.
        batch: Encoded tails without answers.
        memories: The memory of each row.
        most: Most tokens of an answer.
    """
    answers = [""] * len(batch)
    for group in _groups(memories):
        by_length: dict[int, list[int]] = defaultdict(list)
        for row in group:
            by_length[batch[row].length].append(row)
        for alike in by_length.values():
            for start in range(0, len(alike), WRITTEN):
                some = alike[start : start + WRITTEN]
                found = _write(lmm, [batch[n] for n in some], [memories[n] for n in some], most)
                for row, text in zip(some, found, strict=True):
                    answers[row] = text
    return answers


WRITTEN = 64
"""Answers that are written at once."""


def _write(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[AnyMemory | None], most: int
) -> list[str]:
    hidden, cache, position = _run(lmm, batch, memories, cached=True)
    lmm.adapters.act_everywhere()  # on what is written now
    return write_on(lmm, hidden, cache, position + batch[0].length, most, lmm.precision())


def _groups(memories: Sequence[AnyMemory | None]) -> list[list[int]]:
    """Rows whose memories have one form and size, which are computed together."""
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for row, memory in enumerate(memories):
        facts = ("", 0, 0) if memory is None else (memory.form, memory.tokens, memory.position)
        groups[facts].append(row)
    return list(groups.values())


def _run(
    lmm: Lmm, batch: Sequence[Encoded], memories: Sequence[Any], *, cached: bool = False
) -> tuple[Tensor, Any, int]:
    """Hidden states of tails behind memories of one form and size, padded on the right.

    Returns:
        (n, length, width); the cache if it is asked for; and the position of the tails.
    """
    lmm.language_model.eval()
    with lmm.precision():
        ids = pad_sequence([item.ids for item in batch], batch_first=True).to(lmm.device)
        embedded = lmm.model.get_input_embeddings()(ids)
        last = [item.prompt - 1 for item in batch]
        if isinstance(memories[0], Prefix):
            keys = _side_by_side([memory.keys for memory in memories])
            values = _side_by_side([memory.values for memory in memories])
            position = memories[0].position
        else:
            keys, values = _read_heads(lmm, memories)
            position = int(keys.shape[3])
        lmm.adapters.act_from(last, ids.shape[1])
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
    """Return the input embeddings of a head with memory tokens, or of an empty document's.

    Returns:
        [length, width].
    """
    table = lmm.model.get_input_embeddings()
    if memory is None:
        text = head_text(lmm, "")
        found: Tensor = table(torch.tensor(lmm.tokenize(text), device=lmm.device))
        return found
    before, after = (torch.tensor(ids, dtype=torch.int64) for ids in around_memory(lmm))
    parts = [table(before.to(lmm.device)), memory.embeddings, table(after.to(lmm.device))]
    return torch.cat([part.to(parts[0].dtype) for part in parts])
