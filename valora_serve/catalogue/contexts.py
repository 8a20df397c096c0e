"""Contexts that requests can name: documents that were learnt once (docs/how-to/documents.md)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.contexts import ADAPTER, MEMORY_TOKENS, PREFIX, Memory, read_memory
from valora_data.contract.files import first_fault, read_json, shown
from valora_data.errors import BundleError
from valora_data.hashing import file_hash
from valora_serve.errors import AdapterError

if TYPE_CHECKING:
    from torch import Tensor

    from valora_data.contract.manifest import ContextEntry

FACTS_FILE = "context.json"  # what a context that was made at run time is
MEMORY_FILE = "memory.safetensors"  # its memory


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """A context, as requests about it need it."""

    name: str
    form: str  # `ADAPTER`, `PREFIX` or `MEMORY_TOKENS`
    tokens: int = 0  # of its memory; 0 where an adapter alone answers
    position: int = 0  # of the first token behind a prefix
    content: str = ""  # hexadecimal sha256 of its file; empty without one
    bytes: int = 0  # size of its memory
    source_tokens: int = 0  # of the document
    file: Path | None = None
    embeddings: Tensor | None = None  # [tokens, width] on the CPU; of `MEMORY_TOKENS` alone

    @property
    def has_prefix(self) -> bool:
        """Whether it has keys and values."""
        return self.form == PREFIX


def read_context(
    name: str, entry: ContextEntry, folder: Path, base: str, config: Any
) -> tuple[Context, Memory | None]:
    """Read a context of a manifest, and the memory to be packed, if any; or `AdapterError`."""
    if entry.form == ADAPTER or entry.file is None:
        return Context(name, ADAPTER, source_tokens=entry.source_tokens), None
    file = folder / entry.file
    memory, content = read_file(name, file, base, config)
    embeddings = memory.tensors["embeddings"] if memory.form == MEMORY_TOKENS else None
    facts = (memory.form, memory.tokens, memory.position, content, memory.bytes)
    context = Context(name, *facts, entry.source_tokens, file, embeddings)
    return context, None if embeddings is not None else memory


def read_file(name: str, file: Path, base: str, config: Any) -> tuple[Memory, str]:
    """Read the memory of a context's file, and the file's content hash; or `AdapterError`."""
    try:
        return read_memory(file, base, config), file_hash(file)
    except (BundleError, OSError) as error:
        raise AdapterError(f"context {name}: {error}") from error


def write_context(folder: Path, memory: Memory, entry: ContextEntry, adapter: str | None) -> None:
    """Write a context that was made at run time into a new folder, with what answers about it."""
    memory.write(folder / MEMORY_FILE)
    text = json.dumps({**asdict(entry), "adapter": adapter}, indent=1)
    (folder / FACTS_FILE).write_text(text + "\n", encoding="utf-8")


def read_facts(folder: Path) -> tuple[ContextEntry, str | None]:
    """Read what `write_context` wrote besides the memory: the entry and the adapter's name."""
    from valora_data.contract.manifest import context_entry

    try:
        facts: Any = read_json(folder / FACTS_FILE)
        adapter = facts.pop("adapter", None)
        entry = context_entry(facts)
        if not isinstance(adapter, str | None) or entry.file != MEMORY_FILE:
            raise ValueError(f"adapter {shown(adapter)}, file {shown(entry.file)}")  # noqa: TRY301
    except (BundleError, TypeError, ValueError, AttributeError) as error:
        raise AdapterError(f"{folder} holds no context: {first_fault(error)}") from error
    return entry, adapter
