"""Contexts: documents that were learnt once and are answered about without being read again.

A context is what stands before a request's own turns. The prompt of a request about a context is
its *head*, the system turn with the document, and its *tail*, the conversation:

    <s> <|system|> document   |   <|user|> question <|assistant|>
            head                            tail

A memory replaces the head: by keys and values (`prefix`), by embeddings in place of the document
(`memory_tokens`), or by nothing (`adapter`: LoRA alone answers, closed book). The tail is the same
in every form. docs/bundle.md describes the files; training writes them with this module and the
server reads them with it.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from valora_data.contract.files import read_safetensors, shown
from valora_data.errors import BundleError
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor

ADAPTER = "adapter"
"""Form without a file: an adapter alone answers."""
PREFIX = "prefix"
"""Form: keys and values of every layer."""
MEMORY_TOKENS = "memory_tokens"
"""Form: input embeddings in place of the document."""
FORMS = (ADAPTER, PREFIX, MEMORY_TOKENS)
FILE_BYTES = 4 << 30
"""Most bytes of a memory's file."""
MOST_TOKENS = 1 << 20
"""Most tokens of a memory."""
ENCODER_FILE = "memory.safetensors"
"""File with the queries of an encoder, in the folder of its adapter."""
_MARK = "@@context@@"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Template(Protocol):
    """What a `valora_data.contract.base_model.BaseModel` does with text."""

    base: str
    tokenizer: Any

    def render(self, messages: Sequence[Mapping[str, Any]], *, generate: bool = True) -> str:
        """Write messages as the chat template has them."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a prompt."""
        ...


# ------------------------------------------------------------------ prompts


def system_turn(text: str, images: int = 0) -> dict[str, Any]:
    """Return the turn that holds a document.

    Args:
        text: The document.
        images: Number of images behind it (an album).
    """
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    return {"role": "system", "content": [*parts, *[{"type": "image"}] * images]}


def head_text(model: Template, document: str, images: int = 0) -> str:
    """Return the head of prompts about a document, as text.

    Its tokens are `model.tokenize(head_text(…))`, with the beginning-of-sequence token at position
    0; with images, those of the model's processor.

    Args:
        model: The base model.
        document: The document's text.
        images: Number of images of an album.
    """
    return model.render([system_turn(document, images)], generate=False)


def tail_text(model: Template, turns: Sequence[Mapping[str, Any]]) -> str:
    """Return the tail of a prompt: its turns, up to where the answer begins.

    Args:
        model: The base model.
        turns: The conversation, without a system turn: the context takes its place.

    Raises:
        BundleError: The chat template writes no system turn before the others.
    """
    head = head_text(model, _MARK)
    whole = model.render([system_turn(_MARK), *turns])
    if _MARK not in head or not whole.startswith(head):
        raise BundleError(
            f"the chat template of base model {model.base} writes no system turn before the "
            "others, so it cannot read contexts: choose another base model"
        )
    return whole[len(head) :]


def tail_tokens(model: Template, turns: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the token ids of a tail without images, see `tail_text`."""
    text = tail_text(model, turns)
    return [int(i) for i in model.tokenizer(text, add_special_tokens=False)["input_ids"]]


def around_memory(model: Template) -> tuple[list[int], list[int]]:
    """Return the token ids of a head before and after the memory tokens.

    Returns:
        Those before, which begin with the beginning-of-sequence token if the model has one, and
        those after, of which there may be none.
    """
    before, mark, after = head_text(model, _MARK).partition(_MARK)
    if not mark:
        raise BundleError(
            f"the chat template of base model {model.base} writes no system turn, so it cannot "
            "read contexts: choose another base model"
        )
    ends = model.tokenizer(after, add_special_tokens=False)["input_ids"]
    return model.tokenize(before), [int(i) for i in ends]


# ------------------------------------------------------------------ the manifest


@dataclass(frozen=True, slots=True)
class ContextEntry:
    """A context in the manifest; the domain of the same name says how well it answers.

    Attributes:
        form: One of `FORMS`.
        file: File of the memory, relative to the bundle; None for `ADAPTER`.
        tokens: Tokens of the memory; 0 for `ADAPTER`.
        position: Position of the tail's first token with `PREFIX`. It may be more than `tokens`
            (keys may keep the positions that they had in the document) or less (where positions
            have three parts, those of images grow more slowly than their tokens).
        bytes: Size of the memory's tensors; 0 for `ADAPTER`.
        source_tokens: Tokens of the document's head.
        source_sha256: Hash of the document, see `source_hash`.
        encoder: Name of the encoder that made the memory tokens; None if they were trained.
    """

    form: str
    file: str | None
    tokens: int
    position: int
    bytes: int
    source_tokens: int
    source_sha256: str
    encoder: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the entry as the manifest holds it."""
        return {name: getattr(self, name) for name in self.__slots__}


def source_hash(document: str, images: Sequence[Image] = ()) -> str:
    """Return the hash of a document: sha256 of its text, and of sizes and pixels of its images."""
    total = hashlib.sha256(document.encode("utf-8", "surrogatepass"))
    for image in images:
        total.update(f"\0{image.mode} {image.width}x{image.height} ".encode())
        total.update(image.tobytes())
    return total.hexdigest()


def context_entry(facts: Mapping[str, Any], place: str) -> ContextEntry:
    """Read an entry of the manifest's `contexts`.

    Args:
        facts: The entry.
        place: Where it stands, for messages.

    Raises:
        TypeError: A value has another type.
        ValueError: A value is impossible.
    """
    form, file, encoder = facts.get("form"), facts.get("file"), facts.get("encoder")
    if form not in FORMS:
        raise ValueError(f"{place}form: expected one of {', '.join(FORMS)}, got {shown(form)}")
    counts: dict[str, int] = {}
    for name in ("tokens", "position", "bytes", "source_tokens"):
        value = facts.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{place}{name}: expected a whole number, got {shown(value)}")
        if value < 0:
            raise ValueError(f"{place}{name}: expected 0 or more, got {value}")
        counts[name] = value
    digest = facts.get("source_sha256")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise ValueError(f"{place}source_sha256: expected a sha256, got {shown(digest)}")
    for name, text in (("file", file), ("encoder", encoder)):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"{place}{name}: expected a text, got {shown(text)}")
    if (form == ADAPTER) != (file is None):
        raise ValueError(f"{place}file: expected {'none' if file else 'one'} for form {form}")
    least = 0 if form == ADAPTER else 1
    if not least <= counts["tokens"] <= (MOST_TOKENS if least else 0):
        raise ValueError(f"{place}tokens: {counts['tokens']} is impossible for form {form}")
    if form == PREFIX and not counts["position"]:
        raise ValueError(f"{place}position: expected 1 or more, got 0")
    return ContextEntry(form=form, file=file, source_sha256=digest, encoder=encoder, **counts)


# ------------------------------------------------------------------ the files


@dataclass(frozen=True)
class Memory:
    """The tensors of a context.

    Attributes:
        form: `PREFIX` or `MEMORY_TOKENS`.
        base: `base_hash` of the base model that it was made for.
        tensors: With `PREFIX`, `keys` and `values`, each [layers, kv_heads, tokens, head_dim], as
            transformers caches them: keys after their rotary positions. With `MEMORY_TOKENS`,
            `embeddings` [tokens, width].
        position: Position of the tail's first token; with `MEMORY_TOKENS` unused (positions are
            consecutive).
    """

    form: str
    base: str
    tensors: Mapping[str, Tensor]
    position: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.tensors["keys" if self.form == PREFIX else "embeddings"].shape[-2])

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return sum(part.nelement() * part.element_size() for part in self.tensors.values())

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values by layer, each [1, kv_heads, tokens, head_dim].

        `transformers.DynamicCache(memory.layers())` is the reference of a `PREFIX`.
        """
        keys, values = self.tensors["keys"], self.tensors["values"]
        return [(key[None], value[None]) for key, value in zip(keys, values, strict=True)]

    def write(self, file: Path) -> None:
        """Write the memory as safetensors."""
        from safetensors.torch import save_file

        facts = {"form": self.form, "base": self.base, "position": str(self.position)}
        tensors = {name: part.detach().cpu().contiguous() for name, part in self.tensors.items()}
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file, facts)


_DIMENSIONS = {PREFIX: {"keys": 4, "values": 4}, MEMORY_TOKENS: {"embeddings": 2}}


def read_memory(file: Path, base: str, config: Any) -> Memory:
    """Read a memory and check that it fits a base model.

    Args:
        file: The safetensors file.
        base: `base_hash` of the base model.
        config: transformers' configuration of its language model (`config.get_text_config()`).

    Raises:
        BundleError: It is damaged, of an unknown form, made for another base model, not finite, or
            of the wrong shape.
    """
    import torch

    facts, tensors = read_safetensors(file, FILE_BYTES)
    form = facts.get("form", "")
    wanted = _DIMENSIONS.get(form)
    if wanted is None or set(tensors) != set(wanted):
        raise BundleError(f"{file} holds no memory of a context: export the bundle again")
    if facts.get("base") != base:
        raise BundleError(
            f"{file} was made for base model {facts.get('base', '')[:12]}, got {base[:12]}: use "
            "that base model, or make the context again"
        )
    for name, part in tensors.items():
        shape = tuple(part.shape)
        if part.dim() != wanted[name] or shape != _shape(form, config, shape):
            raise BundleError(
                f"{file}: {name} has shape {list(shape)}, which does not fit the base model "
                f"(expected {list(_shape(form, config, shape))}): make the context again"
            )
        if not part.is_floating_point() or not bool(torch.isfinite(part).all()):
            raise BundleError(
                f"{file}: {name} has values that are no finite numbers: make it again"
            )
    memory = Memory(form, base, tensors, _position(facts, file))
    if form == PREFIX and tensors["keys"].shape != tensors["values"].shape:
        raise BundleError(f"{file} has keys and values of different sizes: make it again")
    if not memory.tokens or (form == PREFIX and not memory.position):
        raise BundleError(
            f"{file} has {plural(memory.tokens, 'token')} before position {memory.position}: make "
            "it again"
        )
    return memory


@dataclass(frozen=True)
class Encoder:
    """What an encoder has beside its adapter: it compresses documents to memory tokens.

    The base model with the encoder's adapter reads `around_memory`'s tokens before the memory, the
    document's (tokenised alone, without special tokens), and then `queries` as input embeddings, at
    consecutive positions. The memory tokens are its last hidden states, after the final norm, at
    the queries, times `scale`.

    Attributes:
        queries: [tokens, width].
        scale: [width].
    """

    queries: Tensor
    scale: Tensor

    def memory(self, hidden: Tensor) -> Tensor:
        """Return memory tokens of the last hidden states: […, length, width] → […, k, width]."""
        return hidden[..., -len(self.queries) :, :] * self.scale.to(hidden)

    def write(self, folder: Path) -> None:
        """Write `ENCODER_FILE` into the folder of the encoder's adapter."""
        from safetensors.torch import save_file

        tensors = {"queries": self.queries, "scale": self.scale}
        save_file(
            {name: part.detach().cpu().contiguous() for name, part in tensors.items()},
            folder / ENCODER_FILE,
        )


def read_encoder(folder: Path, config: Any) -> Encoder:
    """Read the queries of an encoder.

    Args:
        folder: Folder of its adapter.
        config: transformers' configuration of the language model.

    Raises:
        BundleError: It is damaged or does not fit the base model.
    """
    import torch

    _, tensors = read_safetensors(folder / ENCODER_FILE, FILE_BYTES)
    width = int(config.hidden_size)
    if set(tensors) != {"queries", "scale"} or tensors["scale"].shape != (width,):
        raise BundleError(f"{folder} holds no encoder of this base model: export the bundle again")
    queries = tensors["queries"]
    if queries.dim() != 2 or queries.shape[1] != width or not len(queries):
        raise BundleError(
            f"{folder}: queries have shape {list(queries.shape)}, expected [tokens, {width}]: "
            "export the bundle again"
        )
    if not all(bool(torch.isfinite(part).all()) for part in tensors.values()):
        raise BundleError(f"{folder}: queries are no finite numbers: export the bundle again")
    return Encoder(**tensors)


def _shape(form: str, config: Any, found: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that fits a language model, for as many tokens as were found."""
    tokens = found[-2] if len(found) > 1 else 1
    if form == MEMORY_TOKENS:
        return (tokens, int(config.hidden_size))
    heads = int(config.num_attention_heads)
    width = getattr(config, "head_dim", None) or int(config.hidden_size) // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return (int(config.num_hidden_layers), int(kv_heads), tokens, int(width))


def _position(facts: Mapping[str, str], file: Path) -> int:
    text = facts.get("position", "0")
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise BundleError(f"{file} names no position ({shown(text)}): make the context again")
    return int(text)
