"""Sampling: chooses the next token of each row from its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from valora_serve.types import SamplingParams

    Bias = tuple[NDArray[np.int64], NDArray[np.float32]]


class TokenCounts:
    """How often each token of a request has come, for its penalties.

    Args:
        prompt: Token ids of the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        # In the order of their first occurrence, so that each token has a fixed place.
        self._place = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = np.fromiter(self._place, np.int64, len(self._place))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._generated = 0

    def update(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens of an answer.

        Args:
            tokens: All tokens so far; those of the last call come first.
            start: Index of the first one of the answer.
        """
        for token in tokens[start + self._generated :]:
            if token not in self._place:
                self._place[token] = len(self._place)
                self._ids = np.append(self._ids, token)
                self._counts = np.append(self._counts, np.float32(0))
            self._counts[self._place[token]] += 1
            self._generated += 1

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the distinct tokens of prompt and answer.

        Returns:
            [tokens] int64, their ids; [tokens] float32, how often each was generated.
        """
        return self._ids, self._counts


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
        counts: Tokens so far; None without penalties.
        bias: The request's `logit_bias` as `bias_arrays`.
    """

    params: SamplingParams
    generator: torch.Generator | None = None
    forbidden: Sequence[int] = ()
    allowed: NDArray[np.bool_] | None = None
    counts: TokenCounts | None = None
    bias: Bias | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax of all logits."""
        return (
            self.params.greedy
            and not self.forbidden
            and self.allowed is None
            and self.counts is None
            and self.bias is None
        )


def bias_arrays(params: SamplingParams) -> Bias | None:
    """The biases of a request, [tokens] int64 and [tokens] float32; None without any."""
    if not params.logit_bias:
        return None
    ids, values = zip(*params.logit_bias, strict=True)
    return np.array(ids, np.int64), np.array(values, np.float32)


def make_generator(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """Random generator of a request, without a seed a random one; None for greedy decoding."""
    if params.greedy:
        return None
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed % 2**64)
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
    logits = logits.clone()
    _penalise(logits, choices)
    _bias(logits, choices)
    _restrict(logits, choices)
    tokens = logits.argmax(-1)
    random = [row for row, choice in enumerate(choices) if not choice.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(logits[rows], [choices[row] for row in random])
    return tokens


def _penalise(logits: Tensor, choices: Sequence[TokenChoice]) -> None:
    """Apply the penalties to the logits, [rows, vocabulary], in place."""
    rows, ids, repetition, minus = [], [], [], []
    for row, choice in enumerate(choices):
        if choice.counts is None:
            continue
        params = choice.params
        tokens, counts = choice.counts.arrays()
        rows.append(np.full(tokens.size, row))
        ids.append(tokens)
        repetition.append(np.full(tokens.size, params.repetition_penalty, np.float32))
        minus.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    if not rows:
        return

    def send(parts: Sequence[NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(logits.device)

    where = send(rows), send(ids)
    values, factor = logits[where], send(repetition)
    values = torch.where(values > 0, values / factor, values * factor)
    logits[where] = values - send(minus).float()


def _bias(logits: Tensor, choices: Sequence[TokenChoice]) -> None:
    """Add the requests' biases to the logits, [rows, vocabulary], in place."""
    found = [(row, *choice.bias) for row, choice in enumerate(choices) if choice.bias is not None]
    if found:
        rows = np.repeat([row for row, _, _ in found], [len(ids) for _, ids, _ in found])
        ids, values = (np.concatenate([one[part] for one in found]) for part in (1, 2))
        where = (torch.from_numpy(part).to(logits.device) for part in (rows, ids))
        logits[tuple(where)] += torch.from_numpy(values).to(logits.device)


def _restrict(logits: Tensor, choices: Sequence[TokenChoice]) -> None:
    """Set the logits of forbidden tokens to −∞, in place; `logits` is [rows, vocabulary]."""
    for row, choice in enumerate(choices):
        if choice.forbidden:
            logits[row, list(choice.forbidden)] = -torch.inf
        if choice.allowed is not None:
            refused = torch.from_numpy(~choice.allowed).to(logits.device)
            logits[row].masked_fill_(refused, -torch.inf)


def _draw(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Sample with temperature, top-k, top-p and min-p: [rows, vocabulary] → [rows]."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        most = torch.finfo(dtype).max
        clamped = [min(value, most) for value in values]
        return torch.tensor(clamped, dtype=dtype, device=logits.device)[:, None]

    params = [choice.params for choice in choices]
    # The largest logit becomes 0 before the division, so that nothing overflows to ∞, and is set,
    # not subtracted, as ∞ − ∞ is NaN.
    most = logits.amax(-1, keepdim=True)
    logits = torch.where(logits == most, 0, logits - most)
    logits /= column([p.temperature for p in params], logits.dtype)
    # Stable, so that of equal tokens the one that greedy decoding takes comes first.
    probabilities, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    order_index = torch.arange(logits.shape[1], device=logits.device)
    top_k = torch.tensor([p.top_k or logits.shape[1] for p in params], device=logits.device)
    # In float64, as the error of 100,000 float32 sums would cut unlikely tokens off.
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    top_p = column([p.top_p if p.top_p < 1 else torch.inf for p in params], before.dtype)
    kept = (order_index < top_k[:, None]) & (before < top_p)
    kept &= probabilities >= column([p.min_p for p in params], logits.dtype) * probabilities[:, :1]
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
    """Log probabilities, before temperature, penalties, bias and restrictions.

    Args:
        logits: [rows, vocabulary] float32.
        tokens: [rows] int64, the chosen tokens.
        most: Number of most likely tokens to return.
    """
    scores = logits.log_softmax(-1)
    values, ids = scores.topk(max(most, 1), -1)
    return StepLogprobs(scores.gather(-1, tokens[:, None])[:, 0], ids, values)
