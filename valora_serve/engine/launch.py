"""What the model computes for a request in a step, and for its head."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.metadata import NONE
from valora_serve.errors import RequestError
from valora_serve.model.heads import HeadLogits, HeadRequest
from valora_serve.model.sampler import TokenChoice
from valora_serve.model.work import StepResult, Work

if TYPE_CHECKING:
    from valora_serve.engine.sequence import SequenceState
    from valora_serve.memory.adapter_memory import AdapterMemory
    from valora_serve.model.lmm import Lmm
    from valora_serve.types import Mode


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose results the host has not read yet."""

    choosing: list[SequenceState]  # get the tokens of `result`
    result: StepResult
    answering: list[SequenceState]  # get those of `heads`, riders included
    heads: HeadLogits | None
    mode: Mode
    merged: str | None  # key of the adapter in the weights


def make_work(
    sequence: SequenceState, count: int, table: list[int], adapters: AdapterMemory, lmm: Lmm
) -> Work:
    """Return what the model computes for the next tokens; `RequestError` if none is allowed."""
    start, prompt = sequence.computed, sequence.prompt
    end = start + count
    terms = [(adapters.slot(key), weight) for key, weight in sequence.adapters.items()]
    work = Work(
        place=sequence.place if sequence.place is not None else 0,
        start=start,
        count=count,
        tokens=None,
        table=table,
        adapter=terms[0][0] if terms else NONE,
        weighted=() if sequence.view.adapter in sequence.adapters else terms,
        plain=min(max(sequence.own_from - start, 0), count),
        delta=prompt.delta,
    )
    if not (sequence.chosen and count == 1):
        work.tokens = sequence.ids[start:end]
    if start < sequence.prompt_tokens:
        if prompt.positions is not None:
            work.positions = sequence.positions(start, end)
        work.visuals = sequence.visuals(start, end)
        blocks = sequence.view.blocks
        work.blocks = [one for one in blocks if start <= one[0] and one[1] <= end]
        if sequence.scores is not None:  # those of the prompt's tokens that follow
            work.targets = sequence.ids[start + 1 : min(end + 1, sequence.prompt_tokens)]
        work.prompt_logprobs = sequence.request.sampling.prompt_logprobs or 0
    if sequence.head is not None:
        work.keep = sequence.kept(start, end)
    elif end == sequence.length:
        work.choice = _choice(sequence, lmm)
        work.logprobs = sequence.request.sampling.logprobs
    return work


def _choice(sequence: SequenceState, lmm: Lmm) -> TokenChoice:
    params = sequence.request.sampling
    early = sequence.generated < params.min_tokens
    forbidden = tuple(lmm.stop_ids) if early else ()
    counts = sequence.counts
    if counts is not None:
        counts.update(sequence.ids, sequence.prompt_tokens)
    choice = TokenChoice(params, sequence.generator, forbidden, None, counts, sequence.bias)
    if params.constraint is None:
        return choice
    allowed = np.ones(lmm.vocabulary, dtype=np.bool_)
    began = time.monotonic()
    params.constraint.mask(allowed)
    sequence.mask_seconds += time.monotonic() - began
    if not allowed.any():
        raise RequestError(
            f"request {sequence.id} was given up, as its JSON schema allows no token that the "
            "model has: simplify the schema"
        )
    if forbidden and allowed.sum() == allowed[list(forbidden)].sum():
        forbidden = ()  # only stop tokens are allowed: the answer ends before min_tokens
    return replace(choice, allowed=allowed, forbidden=forbidden)


def head_request(sequence: SequenceState) -> HeadRequest:
    """Return what the head of a request computes from the hidden states that it reads."""
    head, visuals = sequence.head, sequence.prompt.visuals
    assert head is not None
    (hidden,), sequence.hidden = sequence.hidden, []
    visual, places = None, None
    sizes: list[tuple[int, int]] = []
    if head.reads_visual:
        if any(item.cells is not None for item in visuals):
            # They were kept in the order of the prompt, and a head reads whole rows of the grid.
            order = np.concatenate([item.read for item in visuals]).argsort().argsort()
            hidden = hidden[torch.from_numpy(order).to(hidden.device)]
        visual = torch.ones(len(hidden), dtype=torch.bool)
        sizes = [item.size for item in visuals]
    if head.reads_places:
        places = torch.cat([item.places() for item in visuals])
    return HeadRequest(head, hidden, visual, sizes, sequence.request.min_score, places)
