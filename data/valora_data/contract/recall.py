"""How a base model reads a document and answers from what it kept: the reference of `contexts`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from valora_data.contract.base_model import BaseModel
from valora_data.contract.contexts import head_text
from valora_data.errors import DataError
from valora_data.models.base import IMAGE
from valora_data.wording import plural

ROOM = 64  # positions that are left for a question and its answer behind a document


def head_inputs(model: BaseModel, document: str, images: Sequence[Image] = ()) -> Any:
    """Return the processor's output for the head of prompts about a document or album."""
    return model.process(head_text(model, document, len(images)), images)


@torch.no_grad()
def read_head(
    model: BaseModel, document: str, images: Sequence[Image] = ()
) -> tuple[Tensor, Tensor, int]:
    """Keys and values [layers, kv_heads, tokens, head_dim], and the tail's position, of a head."""
    inputs = head_inputs(model, document, images)
    ids = inputs["input_ids"].to(model.device)
    limit = model.context_length - ROOM
    if ids.shape[1] > limit:
        raise DataError(
            f"the document has {plural(ids.shape[1], 'token')}, but base model {model.name} reads "
            f"at most {limit} beside a question: split the document, or choose another base model"
        )
    model.check_tokens(ids)
    embedded, position = model.model.get_input_embeddings()(ids), ids.shape[1]
    extra: dict[str, Any] = {}
    if images:
        family, visual = model.architecture, ids == model.image_token
        parts = family.split(IMAGE, inputs, int(visual.sum()), model.config)
        features, deep = model.visual_features([part.tensors for part in parts])
        embedded = embedded.masked_scatter(visual[..., None], torch.cat(features).to(embedded))
        if deep:
            extra |= family.deep_arguments(visual, deep)
        extra |= family.attention(model.model, embedded, visual)
        if (found := family.positions(model.model, inputs, model.config)) is not None:
            extra["position_ids"] = found[0][:, None].to(model.device)
            position = int(found[0].max()) + 1
    model.language_model.eval()
    output = model.language_model(inputs_embeds=embedded, use_cache=True, **extra)
    layers = output.past_key_values.layers
    keys, values = [layer.keys for layer in layers], [layer.values for layer in layers]
    return torch.cat(keys), torch.cat(values), position


def run_tails(
    model: BaseModel, embedded: Tensor, first: int, keys: Tensor | None = None,
    values: Tensor | None = None, *, cached: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Compute hidden states (n, length, width) and the cache behind a prefix, or without one.

    `embedded` are input embeddings (n, length, width), padded on the right, whose first token has
    position `first`; keys and values are those of the prefix of each row, [layers, n, kv_heads,
    tokens, head_dim]. Without them the cache is kept for `write_on` if `cached`.
    """
    from transformers import DynamicCache

    past = None
    if keys is not None and values is not None:
        past = DynamicCache([*zip(keys.to(model.dtype), values.to(model.dtype), strict=True)])
    output = model.language_model(
        inputs_embeds=embedded,
        past_key_values=past,
        use_cache=cached or past is not None,
        position_ids=_positions(model, first, embedded.shape[1], len(embedded)),
    )
    return output.last_hidden_state, output.past_key_values


@torch.no_grad()
def write_on(
    model: BaseModel, hidden: Tensor, cache: Any, position: int, limit: int,
    precision: AbstractContextManager[Any] | None = None,
) -> list[str]:  # fmt: skip
    """Write the likeliest answers of at most `limit` tokens behind `hidden` (n, length, width).

    They are states of prompts of one length with this cache, the first answered at `position`.
    """
    stops = torch.tensor(sorted(model.stop_ids), device=hidden.device)
    tokens = [model.logits(hidden[:, -1]).argmax(-1)]
    ended = torch.isin(tokens[0], stops)
    with precision or nullcontext():
        while len(tokens) < limit and not bool(ended.all()):
            output = model.language_model(
                inputs_embeds=model.model.get_input_embeddings()(tokens[-1][:, None]),
                past_key_values=cache,
                use_cache=True,
                position_ids=_positions(model, position + len(tokens) - 1, 1, len(hidden)),
            )
            tokens.append(model.logits(output.last_hidden_state[:, -1]).argmax(-1))
            ended |= torch.isin(tokens[-1], stops)
    return [model.text_of(row) for row in torch.stack(tokens, dim=1).tolist()]


def _positions(model: BaseModel, first: int, count: int, rows: int) -> Tensor:
    found = torch.arange(first, first + count, device=model.device).expand(rows, -1)
    return found.expand(3, -1, -1) if model.three_positions else found
