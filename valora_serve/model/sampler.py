"""Sampling: chooses the next token of each row from its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from valora_serve.types import SamplingParams


@dataclass(slots=True)
class TokenChoice:
    """How one row's token is chosen.

    Attributes:
        params: The request's sampling parameters.
        generator: The request's own random generator, so that a seed gives the same tokens in any
            batch; None for greedy decoding.
        forbidden: Ids of tokens that must not be chosen, e.g. the stop ids before `min_tokens`.
        allowed: [vocabulary] bool, the tokens that the request's constraint allows; None without a
            constraint.
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    forbidden: Sequence[int] = ()
    allowed: NDArray[np.bool_] | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax of all logits."""
        return self.params.temperature == 0 and not self.forbidden and self.allowed is None


def make_generator(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """Random generator of a request, without a seed a random one; None for greedy decoding."""
    if params.temperature == 0:
        return None
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed & (2**63 - 1))
    return generator


def sample(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Choose a token for every row.

    Args:
        logits: [rows, vocabulary] float32; they are not changed.
        choices: How the token of each row is chosen.

    Returns:
        [rows] int64 token ids.
    """
    if all(choice.is_argmax for choice in choices):
        return logits.argmax(-1)
    logits = _restrict(logits, choices)
    tokens = logits.argmax(-1)
    random = [row for row, choice in enumerate(choices) if choice.params.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(logits[rows], [choices[row] for row in random])
    return tokens


def _restrict(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Set the logits of forbidden tokens to −∞: [rows, vocabulary], a copy."""
    logits = logits.clone()
    for row, choice in enumerate(choices):
        if choice.forbidden:
            logits[row, list(choice.forbidden)] = -torch.inf
        if choice.allowed is not None:
            refused = torch.from_numpy(~choice.allowed).to(logits.device)
            logits[row].masked_fill_(refused, -torch.inf)
    return logits


def _draw(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Sample with temperature, top-k, top-p and min-p: [rows, vocabulary] → [rows]."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    params = [choice.params for choice in choices]
    logits = logits / column([p.temperature for p in params])
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    order_index = torch.arange(logits.shape[1], device=logits.device)
    top_k = column([p.top_k or logits.shape[1] for p in params])
    before = probabilities.cumsum(-1) - probabilities
    kept = (order_index < top_k) & (before < column([p.top_p for p in params]))
    kept &= probabilities >= column([p.min_p for p in params]) * probabilities[:, :1]
    kept[:, 0] = True
    # The argmax of p / e with exponential noise e is a sample from p; each request has its own
    # generator of e.
    noise = torch.empty_like(probabilities)
    for row, choice in enumerate(choices):
        noise[row].exponential_(generator=choice.generator)
    noise.clamp_(min=torch.finfo(noise.dtype).tiny)  # 0 / 0 is NaN, which argmax would choose
    best = (probabilities.masked_fill(~kept, 0) / noise).argmax(-1, keepdim=True)
    return order.gather(-1, best)[:, 0]


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of a step's rows, on the device.

    Attributes:
        chosen: [rows] float32, log probability of the chosen token.
        tokens: [rows, n] int64, the n most likely tokens.
        values: [rows, n] float32, their log probabilities.
    """

    chosen: Tensor
    tokens: Tensor
    values: Tensor


def top_logprobs(logits: Tensor, tokens: Tensor, most: int) -> StepLogprobs:
    """Log probabilities, before temperature and restrictions.

    Args:
        logits: [rows, vocabulary] float32.
        tokens: [rows] int64, the chosen tokens.
        most: Number of most likely tokens to return.
    """
    scores = logits.log_softmax(-1)
    values, ids = scores.topk(max(most, 1), -1)
    return StepLogprobs(scores.gather(-1, tokens[:, None])[:, 0], ids, values)
