"""From examples to what the language model takes: token ids, positions, pixels or features."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from valora_data.contract.contexts import tail_tokens
from valora_data.contract.grid_pooling import places_of
from valora_data.errors import BundleError, DataError
from valora_data.models.base import IMAGE, VIDEO
from valora_train.model.prompts import Encoded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from valora_data.contract.base_model import BaseModel
    from valora_train.model.prompts import Example


class Encoder:
    """Turns examples into the language model's inputs.

    The question precedes the images: in a causal language model, visual tokens that follow the
    question know what is asked, so that a label head on them can answer in one pass. (Chat
    templates that put images first, such as that of LLaVA-1.5, are used as they are.)

    With `keep_features`, images are encoded here, once, and their features kept. Pixels stay on the
    host until they are encoded: those of some thousand images would fill a GPU.
    """

    def __init__(self, model: BaseModel, batch_size: int, *, keep_features: bool) -> None:
        self._model, self._batch_size, self._keep = model, batch_size, keep_features
        self._place = model.device if keep_features else torch.device("cpu")
        self._answers: dict[str, Tensor] = {}

    def __call__(self, examples: Sequence[Example], whole: bool = True) -> list[Encoded]:
        """Encode examples, whose images may have any size.

        Heads on visual tokens do without the tokens behind the last of them (`whole`).
        """
        if examples and not any(example.images or example.video for example in examples):
            return [self._tail(example) for example in examples]
        found: list[Encoded] = []
        for batch in _batches(examples, self._batch_size):
            part = [self._processed(example) for example in batch]
            if not whole:
                part = [_cut(item) for item in part]
            found += self._with_features(part) if self._keep else part
        return found

    def _tail(self, example: Example) -> Encoded:
        """Encode a question about a context: the tail of its prompt, with the answer."""
        parts = [{"type": "text", "text": example.question}]
        ids = torch.tensor(tail_tokens(self._model, [{"role": "user", "content": parts}]))
        none = torch.zeros(0, dtype=torch.int64)
        item = Encoded(ids, torch.zeros_like(ids, dtype=torch.bool), len(ids), (0, 0), (0, 0), none)
        return self._with_answer(item, example)

    def _render(self, question: str, kind: str, count: int, answer: str | None = None) -> str:
        parts = [{"type": "text", "text": question}, *[{"type": kind}] * count]
        turns: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if answer is not None:
            said = [{"type": "text", "text": answer}]
            turns.append({"role": "assistant", "content": said})
        return self._model.render(turns, generate=answer is None)

    def _processed(self, example: Example) -> Encoded:
        """Encode an example by the processor, which knows how many tokens each image has."""
        model = self._model
        if example.video and model.video_token is not None:
            kind, token = VIDEO, model.video_token
            text = self._render(example.question, VIDEO, 1)
            inputs = model.process(text, videos=[example.images])
        else:
            kind, token = IMAGE, model.image_token
            text = self._render(example.question, IMAGE, len(example.images))
            inputs = model.process(text, example.images)
        ids = inputs["input_ids"][0]
        visual = ids == token
        parts = model.split(kind, inputs, int(visual.sum()))
        grids = [part.grid for part in parts if part.grid is not None]
        if len(grids) < len(parts):
            raise BundleError(
                f"base model {model.base} does not say how its visual tokens lie in an image: "
                "register its architecture, with the grid, in valora.architectures"
            )
        places = torch.cat([places_of(rows, columns, times) for times, rows, columns in grids])
        if len(places) != visual.sum():
            raise BundleError(
                f"expected {len(places)} visual tokens for {len(parts)} images, got "
                f"{int(visual.sum())}: check the processor of the base model"
            )
        pixels = {
            name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors
        }
        pixels = {
            name: part.to(self._place, model.dtype if part.is_floating_point() else part.dtype)
            for name, part in pixels.items()
        }
        positions = (model.positions(inputs) or (None,))[0]
        item = Encoded(
            ids, visual, len(ids), parts[0].size, grids[0][1:], places, pixels, positions=positions
        )
        return self._with_answer(item, example)

    def _with_answer(self, item: Encoded, example: Example) -> Encoded:
        if example.answer is None:
            return item
        answer, positions = self._answer(example.answer(item.seen)), item.positions
        if positions is not None:
            more = int(positions.max()) + 1 + torch.arange(len(answer))
            positions = torch.cat([positions, more.expand(3, -1)], dim=1)
        return replace(
            item,
            ids=torch.cat([item.ids, answer]),
            visual=torch.cat([item.visual, torch.zeros_like(answer, dtype=torch.bool)]),
            positions=positions,
        )

    def _answer(self, answer: str) -> Tensor:
        """The token ids of an answer as the chat template writes it, with its end token."""
        if answer not in self._answers:
            tokenizer = self._model.tokenizer
            text = self._render("?", IMAGE, 0, answer)
            before = self._render("?", IMAGE, 0)
            text = (text.removeprefix(before) if text.startswith(before) else answer).rstrip()
            text = text.removesuffix(tokenizer.eos_token or "").rstrip()
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            self._answers[answer] = torch.tensor([*ids, tokenizer.eos_token_id])
        return self._answers[answer]

    @torch.no_grad()
    def _with_features(self, batch: Sequence[Encoded]) -> list[Encoded]:
        """Replace pixels by features."""
        features, deep = visual_features(self._model, batch)
        counts = [int(item.visual.sum()) for item in batch]
        rows = zip(*(part.split(counts) for part in (features, *deep)), strict=True)
        return [
            replace(item, features=first, deep=tuple(others), pixels={})
            for item, (first, *others) in zip(batch, rows, strict=True)
        ]


def visual_features(model: BaseModel, batch: Sequence[Encoded]) -> tuple[Tensor, list[Tensor]]:
    """Return the visual features of a batch, (visual tokens, width), kept or encoded now.

    And the same for each of the first layers to whose outputs features are added.
    """
    if batch[0].features is not None:
        kept = zip(*((item.features, *item.deep) for item in batch), strict=True)
        features, *deep = (torch.cat(parts) for parts in kept)
        return features, deep
    names = list(batch[0].pixels)
    if any(list(item.pixels) != names for item in batch):  # images and videos
        found = [visual_features(model, [item]) for item in batch]
        layers = zip(*(deep for _, deep in found), strict=True)
        return torch.cat([part for part, _ in found]), [torch.cat(layer) for layer in layers]
    parts, deep = model.visual_features([item.pixels for item in batch])
    return torch.cat(parts), deep


def _batches(examples: Sequence[Example], most: int) -> Iterator[Sequence[Example]]:
    """Yield examples with at most `most` images together, but at least one example."""
    start = images = 0
    for at, example in enumerate(examples):
        if not example.images:
            raise DataError("an example has no image, or a video no frames: leave it out")
        if at > start and images + len(example.images) > most:
            yield examples[start:at]
            start, images = at, 0
        images += len(example.images)
    if examples:
        yield examples[start:]


def _cut(item: Encoded) -> Encoded:
    """Remove the tokens behind the last visual token; no token before them sees them."""
    end = int(torch.nonzero(item.visual)[-1]) + 1
    positions = None if item.positions is None else item.positions[:, :end]
    return replace(
        item, ids=item.ids[:end], visual=item.visual[:end], prompt=end, positions=positions
    )
