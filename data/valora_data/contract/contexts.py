"""Contexts: memories of documents, which replace the head of prompts (docs/reference/bundle.md)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.files import read_safetensors, write_safetensors
from valora_data.errors import BundleError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from valora_data.contract.base_model import BaseModel

ADAPTER, PREFIX, MEMORY_TOKENS = "adapter", "prefix", "memory_tokens"
FILE_BYTES = 4 << 30  # most of a memory's file
ENCODER_FILE = "memory.safetensors"  # with its queries, in the folder of its adapter
_MARK = "@@context@@"


def system_turn(text: str, images: int = 0) -> dict[str, Any]:
    """Return the turn that holds a document, with so many images behind it (an album)."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    return {"role": "system", "content": [*parts, *[{"type": "image"}] * images]}


def head_text(model: BaseModel, document: str, images: int = 0) -> str:
    """Return the head of prompts about a document, with so many images, as text."""
    return model.render([system_turn(document, images)], generate=False)


def tail_text(model: BaseModel, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return the tail of a prompt: its turns, without a system turn, up to the answer."""
    whole = model.render([system_turn(_MARK), *turns])
    return whole.removeprefix(_marked_head(model, whole))


def tail_tokens(model: BaseModel, turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a tail without images, see `tail_text`."""
    return model.tokenize(tail_text(model, turns), special=False)


def around_memory(model: BaseModel) -> tuple[list[int], list[int]]:
    """Return the token ids of a head before (the beginning-of-sequence token, …) and after it."""
    before, _, after = _marked_head(model).partition(_MARK)
    return model.tokenize(before), model.tokenize(after, special=False)


def _marked_head(model: BaseModel, prompt: str | None = None) -> str:
    head = head_text(model, _MARK)
    if _MARK not in head or not (prompt or head).startswith(head):
        text = f"the chat template of base model {model.name} writes no system turn before the"
        raise BundleError(f"{text} others, so it cannot read contexts: choose another base model")
    return head


def source_hash(document: str, images: Sequence[Image] = ()) -> str:
    """Return the sha256 of a text, and of sizes and pixels of its images."""
    total = hashlib.sha256(document.encode("utf-8", "surrogatepass"))
    for image in images:
        total.update(f"\0{image.mode} {image.width}x{image.height} ".encode())
        total.update(image.tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Memory:
    """The tensors of a context.

    With `PREFIX` `keys` and `values`, each [layers, kv_heads, tokens, head_dim], keys after their
    rotary positions; with `MEMORY_TOKENS` `embeddings` [tokens, width].
    """

    form: str
    base: str  # `base_hash` of the base model that it was made for
    tensors: Mapping[str, Tensor]
    position: int = 0  # of the tail's first token; only with `PREFIX`

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.tensors["keys" if self.form == PREFIX else "embeddings"].shape[-2])

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(part.nbytes for part in self.tensors.values())

    def write(self, file: Path) -> None:
        """Write the memory as safetensors."""
        file.parent.mkdir(parents=True, exist_ok=True)
        facts = {"form": self.form, "base": self.base, "position": str(self.position)}
        write_safetensors(file, self.tensors, facts)


def read_memory(file: Path, base: str, config: Any) -> Memory:
    """Read a memory and check that it fits a base model, by hash and configuration of its text."""
    facts, tensors = read_safetensors(file, FILE_BYTES)
    form, written, tokens = facts.get("form", ""), facts.get("position", "0"), _tokens(tensors)
    position = int(written) if re.fullmatch(r"[0-9]{1,9}", written) else -1
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    width = int(getattr(config, "head_dim", None) or int(config.hidden_size) // heads)
    shapes: dict[str, tuple[int, ...]] = {}
    if form == PREFIX:
        shapes = dict.fromkeys(("keys", "values"), (layers, kv_heads, tokens, width))
    elif form == MEMORY_TOKENS:
        shapes = {"embeddings": (tokens, int(config.hidden_size))}
    if facts.get("base") != base:
        text = f"{file} was made for base model {facts.get('base', '')[:12]}, got {base[:12]}"
        raise BundleError(f"{text}: use that base model, or make the context again")
    _check_tensors(file, "memory", tensors, shapes)
    if position < (form == PREFIX):
        raise BundleError(f"{file} has {tokens} tokens before position {position}: make it again")
    return Memory(form, base, tensors, position)


def _tokens(tensors: Mapping[str, Tensor]) -> int:
    return max((int(part.shape[-2]) for part in tensors.values() if part.dim() > 1), default=0)


def _check_tensors(
    file: Path, what: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if set(tensors) != set(shapes) or not _tokens(tensors):
        raise BundleError(f"{file} holds no {what}: export the bundle again")
    for name, part in tensors.items():
        if (shape := tuple(part.shape)) != shapes[name]:
            why = f"has shape {shape}, which does not fit the base model ({shapes[name]})"
            raise BundleError(f"{file}: {name} {why}: make it again")
        if not part.is_floating_point() or not bool(part.isfinite().all()):
            raise BundleError(f"{file}: {name} has no finite numbers: make it again")


@dataclass(frozen=True)
class Encoder:
    """What an encoder has beside its adapter: it compresses documents to memory tokens.

    The base model reads `around_memory`'s tokens before the memory, the document's, and `queries`.
    `memory` is made of its last hidden states, after the final norm.
    """

    queries: Tensor  # [tokens, width]
    scale: Tensor  # [width]

    def memory(self, hidden: Tensor) -> Tensor:
        """Return memory tokens of the last hidden states: […, length, width] → […, k, width]."""
        return hidden[..., -len(self.queries) :, :] * self.scale.to(hidden)

    def write(self, folder: Path) -> None:
        """Write `ENCODER_FILE` into the folder of the encoder's adapter."""
        write_safetensors(folder / ENCODER_FILE, vars(self), {})


def read_encoder(folder: Path, config: Any) -> Encoder:
    """Read an encoder in the folder of its adapter; `config` as in `read_memory`."""
    file, width = folder / ENCODER_FILE, int(config.hidden_size)
    _, tensors = read_safetensors(file, FILE_BYTES)
    shapes = {"queries": (_tokens(tensors), width), "scale": (width,)}
    _check_tensors(file, "encoder", tensors, shapes)
    return Encoder(**tensors)
