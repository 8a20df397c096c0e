"""Prompts: from a request to token ids, encoder inputs and positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from valora_data.contract.base_model import BaseModel
from valora_data.contract.contexts import (
    ADAPTER,
    MEMORY_TOKENS,
    around_memory,
    system_turn,
    tail_text,
)
from valora_data.contract.label_head import places_of
from valora_data.models.base import IMAGE, PIXELS, VIDEO
from valora_serve.catalogue.contexts import Context
from valora_serve.errors import ImageError, RequestError
from valora_serve.memory.block_manager import ImageSpan
from valora_serve.types import Request

PLACEHOLDER = 0  # stands for a token of a context, whose embedding is replaced or not needed


@dataclass(frozen=True, slots=True)
class Visual:
    """An image or a video of a prompt, before it is encoded."""

    kind: str  # `IMAGE` or `VIDEO`
    key: bytes  # sha256 of the encoder's input
    tensors: dict[str, Tensor]  # the encoder's input by argument name, the pixels first
    at: NDArray[np.int64]  # [visual tokens], their indices in the prompt
    size: tuple[int, int]  # width and height of the image as it was sent, in pixels
    grid: tuple[int, int, int] | None  # frames, rows and columns of visual tokens, if known
    # Which of its tokens are the cells of the grid, row by row; None for all, in order.
    cells: NDArray[np.int64] | None = None

    @property
    def read(self) -> NDArray[np.int64]:
        """Indices in the prompt of the tokens that heads read, row by row of the grid."""
        return self.at if self.cells is None else self.at[self.cells]

    def spans(self, key: bytes, *, whole: bool = False) -> list[ImageSpan]:
        """Runs of its tokens for the prefix cache; `key` hashes the adapter's vision weights."""
        cuts = np.flatnonzero(np.diff(self.at) != 1) + 1
        runs = np.split(self.at, cuts)
        return [
            ImageSpan(int(run[0]), int(run[-1]) + 1, self.key + b"|%d|" % number + key, whole)
            for number, run in enumerate(runs)
        ]

    def places(self) -> Tensor:
        """Return the place of each token that heads read, see `label_head.places_of`."""
        assert self.grid is not None, "heads are trained only where the grid is known"
        times, rows, columns = self.grid
        return places_of(rows, columns, times)


@dataclass(frozen=True, slots=True)
class VisualFeatures:
    """An encoded image or video."""

    embeddings: Tensor  # [visual tokens, width], of its tokens in the prompt
    # [visual tokens, width] for each of the first layers to whose output features are added
    # (DeepStack of Qwen3-VL).
    deep: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Size in memory, in bytes."""
        return sum(part.numel() * part.element_size() for part in (self.embeddings, *self.deep))

    def alone(self) -> VisualFeatures:
        """Return a copy in memory that nothing else lies in, such as others encoded with it."""
        return VisualFeatures(self.embeddings.clone(), tuple(part.clone() for part in self.deep))


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTokens:
    """Memory tokens of a context in a prompt."""

    key: bytes  # content hash of the context
    at: NDArray[np.int64]  # [tokens], their indices in the prompt, one after another
    embeddings: Tensor  # [tokens, width] on the CPU, in place of token embeddings

    @property
    def span(self) -> ImageSpan:
        """Their place, for the keys of the prefix cache."""
        return ImageSpan(int(self.at[0]), int(self.at[-1]) + 1, b"memory|" + self.key)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, ready for the engine."""

    ids: list[int]  # with one placeholder for each visual token
    visuals: tuple[Visual, ...] = ()  # in the order of their first tokens
    # [3, tokens] int64 if rotary positions have three parts; None if a token's position is its
    # index plus `delta`.
    positions: NDArray[np.int64] | None = None
    delta: int = 0  # position minus index of the generated tokens
    given: int = 0  # first tokens, placeholders, whose keys and values a context gives
    memory: MemoryTokens | None = None  # of a context, for which placeholders stand

    @property
    def words(self) -> list[int]:
        """Token ids without the placeholders of a context."""
        if self.memory is None:
            return self.ids[self.given :]
        first, last = int(self.memory.at[0]), int(self.memory.at[-1])
        return self.ids[:first] + self.ids[last + 1 :]


def prepare_prompt(
    model: BaseModel,
    request: Request,
    domain_prompt: str | None = None,
    context: Context | None = None,
) -> Prompt:
    """Tokenize a request and process its images and videos; a `RequestError` says why not.

    The `domain_prompt` precedes images that come without any text; `context` is what the request
    is about.
    """
    if request.images or request.videos:
        model.check_takes_images(RequestError)
    given = (request.messages, request.text, request.token_ids)
    if sum(one is not None for one in given) > 1:
        raise RequestError("request: give one of messages, text and token_ids")
    inside = context is not None and context.form != ADAPTER
    if request.token_ids is not None:
        return _within(model, _from_ids(request), context)
    if request.text is not None:
        asked = model.plain.text(request.text) if request.embed else request.text
        found = _process(model, asked, request.images, request.videos, special=not inside)
        return _within(model, found, context)
    messages = request.messages
    if messages is None:
        if not (request.images or request.videos) or domain_prompt is None:
            raise RequestError("request: nothing is asked: give messages with a text")
        parts: list[dict[str, Any]] = [{"type": "text", "text": domain_prompt}]
        parts += [{"type": IMAGE} for _ in request.images]
        parts += [{"type": VIDEO} for _ in request.videos]
        messages = [{"role": "user", "content": parts}]
    messages = [  # all chat templates of LMMs read lists of parts
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else dict(turn)
        for turn in messages
    ]
    videos, images = request.videos, list(request.images)
    if videos and model.video_token is None:
        messages, images = _frames_as_images(messages, images, videos)
        videos = ()
    if context is not None and any(turn.get("role") == "system" for turn in messages):
        raise RequestError(
            f"{context.name} is a context, which stands in place of the system turn: leave that out"
        )
    try:
        if context is None:
            text = model.render(messages)
        elif inside:
            text = tail_text(model, messages)
        else:
            text = model.render([system_turn(""), *messages])
    except Exception as error:
        raise RequestError(f"messages do not fit the chat template: {error}") from error
    special = False if inside else None
    return _within(model, _process(model, text, images, videos, special=special), context)


def _within(model: BaseModel, tail: Prompt, context: Context | None) -> Prompt:
    """Return a prompt behind its context, see `valora_data.contract.contexts`."""
    if context is None or context.form == ADAPTER:
        return tail
    before: list[int] = []
    after: list[int] = []
    memory, given, shift = None, context.tokens, context.position
    if context.form == MEMORY_TOKENS:
        before, after = around_memory(model)
        at = np.arange(len(before), len(before) + context.tokens)
        assert context.embeddings is not None
        memory = MemoryTokens(bytes.fromhex(context.content), at, context.embeddings)
        given, shift = 0, len(before) + context.tokens + len(after)
    ids = [*before, *[PLACEHOLDER] * context.tokens, *after, *tail.ids]
    start = len(ids) - len(tail.ids)
    visuals = tuple(replace(visual, at=visual.at + start) for visual in tail.visuals)
    positions = tail.positions
    if positions is not None:
        first = np.broadcast_to(np.arange(start) + shift - start, (3, start))
        positions = np.concatenate([first, positions + shift], axis=1)
    return Prompt(ids, visuals, positions, tail.delta + shift - start, given, memory)


def _from_ids(request: Request) -> Prompt:
    if request.images or request.videos:
        raise RequestError("token_ids: images need text or messages")
    ids = [int(i) for i in request.token_ids or ()]
    if not ids:
        raise RequestError("token_ids: expected at least one token, got none")
    return Prompt(ids)


def _process(
    model: BaseModel,
    text: str,
    images: Sequence[Image],
    videos: Sequence[Sequence[Image]],
    *,
    special: bool | None,
) -> Prompt:
    """Return the prompt of a text; `special` is `BaseModel.tokenize`'s."""
    _check_placeholders(model, IMAGE, text, len(images))
    _check_placeholders(model, VIDEO, text, len(videos))
    if not (images or videos):
        words = model.tokenize(text, special=special)
        if not words:
            raise RequestError("prompt: expected some text, got none")
        return Prompt(words)
    _check_resized(model, images, videos)
    try:
        inputs = model.process(text, images, videos, special=special)
        ids = inputs["input_ids"][0]
        visuals = _visuals(model, inputs, ids, images, videos)
    except (ValueError, TypeError, StopIteration, IndexError) as error:
        if "temporal" in str(error) and any(len(video) == 1 for video in videos):
            raise ImageError(
                "a video has one frame, and this model needs more: send the frame as an image"
            ) from error
        raise ImageError(f"images and prompt do not fit each other: {error}") from error
    found = model.architecture.positions(model.model, inputs, model.config)
    if found is None:
        return Prompt(ids.tolist(), tuple(visuals))
    positions, delta = found
    return Prompt(ids.tolist(), tuple(visuals), positions.numpy(), delta)


def _check_placeholders(model: BaseModel, kind: str, text: str, given: int) -> None:
    """Check that a prompt names as many images or videos as were sent; not all processors do."""
    word = model.placeholders.get(kind)
    if word is None:
        if given:
            raise RequestError(f"The base model takes no {kind}s in such a prompt: leave them out")
    elif (named := text.count(word)) != given:
        raise RequestError(f"prompt: names {named} {kind}s, but {given} were sent: send as many")


def _check_resized(
    model: BaseModel, images: Sequence[Image], videos: Sequence[Sequence[Image]]
) -> None:
    """Refuse images that resizing enlarges too much: 1 x 40,000,000 pixels would take terabytes."""
    family, processor = model.architecture, model.processor.image_processor
    limit = model.context_length * family.pixels_per_token
    every = [*images, *(frame for video in videos for frame in video)]
    pixels = sum(family.resized_pixels(processor, *image.size) for image in every)
    if pixels > limit:
        raise ImageError(
            f"images: the base model would resize them to {pixels} pixels together, more than "
            f"{limit}: send fewer, or cut long ones into parts"
        )


def _visuals(
    model: BaseModel,
    inputs: Any,
    ids: Tensor,
    images: Sequence[Image],
    videos: Sequence[Sequence[Image]],
) -> list[Visual]:
    found: list[Visual] = []
    kinds = (
        (IMAGE, model.image_token, [image.size for image in images]),
        (VIDEO, model.video_token, [video[0].size for video in videos]),
    )
    for kind, token, sizes in kinds:
        if PIXELS[kind] not in inputs:
            continue
        at = np.flatnonzero(ids.numpy() == token)
        parts = model.architecture.split(kind, inputs, len(at), model.config)
        if len(parts) > len(sizes):
            raise RequestError(
                "This base model cuts images into several parts, which is not served: use "
                "LLaVA-NeXT, SmolVLM, InternVL3 or Qwen-VL"
            )
        counts = [part.tokens for part in parts]
        if sum(counts) != len(at):
            raise ValueError(f"{kind}s have {sum(counts)} visual tokens, the prompt {len(at)}")
        indices = np.split(at, np.cumsum(counts)[:-1])
        for part, where, size in zip(parts, indices, sizes, strict=True):
            key = _hash(kind, part.tensors)
            cells = None if part.cells is None else part.cells.numpy()
            found.append(Visual(kind, key, part.tensors, where, size, part.grid, cells))
    return sorted(found, key=lambda visual: int(visual.at[0]))


def _hash(kind: str, tensors: dict[str, Tensor]) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for tensor in tensors.values():
        digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.digest()


def _frames_as_images(
    messages: Sequence[dict[str, Any]], images: Sequence[Image], videos: Sequence[Sequence[Image]]
) -> tuple[list[dict[str, Any]], list[Image]]:
    image, video, found = iter(images), iter(videos), list[Image]()

    def shown(part: dict[str, Any]) -> list[dict[str, Any]]:
        if part.get("type") == IMAGE:
            found.extend(islice(image, 1))
        if part.get("type") != VIDEO:
            return [part]
        frames = next(video, ())
        found.extend(frames)
        return [{"type": IMAGE} for _ in frames]

    turns = [
        {**turn, "content": [one for part in turn.get("content") or () for one in shown(part)]}
        for turn in messages
    ]
    return turns, found
