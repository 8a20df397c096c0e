"""Sampling: chooses the next token of each row from its logits, by settings of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from valora_serve.types import SamplingParams

Bias = tuple[NDArray[np.int64], NDArray[np.float32]]


BROKEN = -1  # stands for a token that was chosen from logits that are not finite


class TokenCounts:
    """The distinct tokens of a request, and how often each was generated, for its penalties."""

    def __init__(self, prompt: Sequence[int]) -> None:
        # In the order of their first occurrence, so that each token has a fixed place.
        self._column = {token: column for column, token in enumerate(dict.fromkeys(prompt))}
        self.ids = np.fromiter(self._column, np.int64, len(self._column))
        self.counts = np.zeros(len(self.ids), np.float32)
        self._generated = 0

    def update(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens of an answer, which starts at `start` and only grows."""
        for token in tokens[start + self._generated :]:
            if token not in self._column:
                self._column[token] = len(self._column)
                self.ids = np.append(self.ids, token)
                self.counts = np.append(self.counts, np.float32(0))
            self.counts[self._column[token]] += 1
            self._generated += 1


@dataclass(slots=True)
class TokenChoice:
    """How one row's token is chosen."""

    params: SamplingParams
    generator: torch.Generator | None = None  # of the request; None for greedy decoding
    forbidden: Sequence[int] = ()  # ids, e.g. the stop ids before `min_tokens`
    allowed: NDArray[np.bool_] | None = None  # [vocabulary] by the constraint
    counts: TokenCounts | None = None  # so far; None without penalties
    bias: Bias | None = None

    @property
    def is_argmax(self) -> bool:
        """Whether the choice is the argmax of all logits."""
        changed = self.allowed is not None or self.counts is not None or self.bias is not None
        return self.params.greedy and not self.forbidden and not changed


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
    """Choose a token for every row: [rows, vocabulary] float32, not changed → [rows] int64."""
    if all(choice.is_argmax for choice in choices):
        return logits.argmax(-1)
    logits = logits.clone()
    _penalise(logits, choices)
    _bias(logits, choices)
    for row, choice in enumerate(choices):
        if choice.forbidden:
            logits[row, list(choice.forbidden)] = -torch.inf
        if choice.allowed is not None:
            refused = torch.from_numpy(~choice.allowed).to(logits.device)
            logits[row].masked_fill_(refused, -torch.inf)
    tokens = logits.argmax(-1)
    random = [row for row, choice in enumerate(choices) if not choice.params.greedy]
    if random:
        rows = torch.tensor(random, device=logits.device)
        tokens[rows] = _draw(logits[rows], [choices[row] for row in random])
    return tokens


def _joined(parts: Sequence[NDArray[np.generic]], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device)


def _penalise(logits: Tensor, choices: Sequence[TokenChoice]) -> None:
    """Apply the penalties to the logits, [rows, vocabulary], in place."""
    rows, ids, repetition, minus = [], [], [], []
    for row, choice in enumerate(choices):
        if choice.counts is None:
            continue
        params, tokens, counts = choice.params, choice.counts.ids, choice.counts.counts
        rows.append(np.full(tokens.size, row))
        ids.append(tokens)
        repetition.append(np.full(tokens.size, params.repetition_penalty, np.float32))
        minus.append(params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    if rows:
        where = _joined(rows, logits), _joined(ids, logits)
        values, factor = logits[where], _joined(repetition, logits)
        values = torch.where(values > 0, values / factor, values * factor)
        logits[where] = values - _joined(minus, logits).float()


def _bias(logits: Tensor, choices: Sequence[TokenChoice]) -> None:
    """Add the requests' biases to the logits, [rows, vocabulary], in place."""
    found = [(row, *choice.bias) for row, choice in enumerate(choices) if choice.bias is not None]
    if found:
        rows = [np.full(ids.size, row) for row, ids, _ in found]
        where = _joined(rows, logits), _joined([ids for _, ids, _ in found], logits)
        logits[where] += _joined([values for *_, values in found], logits)


def _draw(logits: Tensor, choices: Sequence[TokenChoice]) -> Tensor:
    """Sample with temperature, top-k, top-p and min-p: [rows, vocabulary] → [rows]."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        largest = torch.finfo(dtype).max
        clamped = [min(value, largest) for value in values]
        return torch.tensor(clamped, dtype=dtype, device=logits.device)[:, None]

    params = [choice.params for choice in choices]
    # The largest logit becomes 0 before the division, so that nothing overflows to ∞, and is set,
    # not subtracted, as ∞ − ∞ is NaN.
    largest = logits.amax(-1, keepdim=True)
    logits = torch.where(logits == largest, 0, logits - largest)
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


class StepLogprobs(NamedTuple):
    """Log probabilities of a step's rows, on the device; the n most likely tokens of each."""

    chosen: Tensor  # [rows] float32, of the chosen token
    tokens: Tensor  # [rows, n] int64
    values: Tensor  # [rows, n] float32


def top_logprobs(logits: Tensor, tokens: Tensor, largest: int) -> StepLogprobs:
    """Log probabilities of `logits` [rows, vocabulary] float32, of chosen and best tokens."""
    scores = logits.log_softmax(-1)
    values, ids = scores.topk(max(largest, 1), -1)
    return StepLogprobs(scores.gather(-1, tokens[:, None])[:, 0], ids, values)


def finite_rows(values: Tensor) -> Tensor:
    """Return which rows are finite and not constant: [rows, width] → [rows] bool; capturable.

    A hidden state whose squares overflow in a norm becomes zero, and then every logit is equal.
    """
    low, high = torch.aminmax(values, dim=-1)  # both are NaN if any value is
    return low.isfinite() & high.isfinite() & (low < high)


def mark_broken(tokens: Tensor, finite: Tensor) -> Tensor:
    """Return the tokens of finite rows and `BROKEN` for others: [rows] int64; `tokens` stays."""
    return torch.where(finite, tokens, BROKEN)
