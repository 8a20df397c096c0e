"""What a domain is expected to reach beside others, learned from the attempts so far.

A Gaussian model: a domain reaches something alone, and loses something to every domain beside it.
What it loses is made of a part that all pairs share, a part of the one that loses, a part of the
one that it loses to, and a part of the pair. All are learned together from every accuracy that was
measured, so that an attempt says something about groups that were never tried.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from valora_train.fusion.strategies.base import View

    Array = NDArray[np.floating[Any]]

# Before anything was measured, as shares of a domain's bar: mean and standard deviation.
ALONE = (1.03, 0.05)
LOST = (0.012, 0.010)  # to each domain beside it
OWN, OTHERS, PAIR = 0.010, 0.010, 0.025  # deviations of one that loses, of one lost to, of a pair
NOISE = 0.006
FARTHEST = 0.08  # more than this from what it must keep, an accuracy says no more


class Expectation:
    """Predicts whether groups of domains keep what they must.

    Args:
        names: The domains.
        view: What was measured so far and what each domain must keep.
    """

    def __init__(self, names: Sequence[str], view: View) -> None:
        self.names = tuple(names)
        self._place = {name: at for at, name in enumerate(names)}
        bars = np.array([view.requirements[name].bar for name in names])
        self._floors = np.array([view.floors[name] for name in names]) / bars
        self._means, self._deviations = _prior(len(names))
        points, values = [], []
        for decision in view.history:
            group = tuple(self._place[name] for name in decision.accuracy if name in self._place)
            for at in group:
                accuracy = decision.accuracy[names[at]]
                value = 0.0 if math.isnan(accuracy) else accuracy / bars[at]
                low, high = self._floors[at] - FARTHEST, self._floors[at] + FARTHEST
                points.append((at, group))
                values.append(min(max(value, low), high))
        self._known = _features(len(names), points)
        known = self._known * self._deviations
        self._factor = np.linalg.cholesky(known @ known.T + NOISE**2 * np.eye(len(points)))
        self._residual = _solve(self._factor, np.array(values) - self._known @ self._means)

    def log_chances(self, groups: Sequence[Sequence[int]]) -> Array:
        """Logarithm of the chance that all domains of a group keep what they must.

        Args:
            groups: Groups of places in `names`.
        """
        points = [(at, group) for group in groups for at in group]
        features = _features(len(self.names), points)
        return self._sums(features, [at for at, _ in points], [len(group) for group in groups])

    def log_chances_of_all(self) -> Array:
        """The same for every group of the names as a bit mask: entry 0 is of the empty group."""
        features, places, sizes = _all_groups(len(self.names))
        return np.concatenate([[0.0], self._sums(features, places, sizes)])

    def _sums(self, features: Array, places: Sequence[int], sizes: Sequence[int]) -> Array:
        mean = features @ self._means
        scaled = features * self._deviations
        variance = (scaled**2).sum(axis=1)
        if len(self._known):
            cross = _solve(self._factor, (self._known * self._deviations) @ scaled.T)
            mean = mean + cross.T @ self._residual
            variance = variance - (cross**2).sum(axis=0)
        deviation = np.sqrt(np.maximum(variance, 0.0) + NOISE**2)
        z = (mean - self._floors[np.asarray(places, dtype=int)]) / deviation
        each = -np.logaddexp(0.0, -1.702 * z)  # the normal distribution's, within 0.01
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
        return np.add.reduceat(each, starts)


def _solve(factor: Array, right: Array) -> Array:
    return np.linalg.solve(factor, right) if len(factor) else right


def _prior(count: int) -> tuple[Array, Array]:
    """Means and standard deviations of all parts, in the order of `_features`."""
    sizes = (count, 1, count, count, count**2)
    means = np.repeat((ALONE[0], LOST[0], 0.0, 0.0, 0.0), sizes)
    return means, np.repeat((ALONE[1], LOST[1], OWN, OTHERS, PAIR), sizes)


def _features(count: int, rows: Sequence[tuple[int, Sequence[int]]]) -> Array:
    """One row for each domain in its group: alone, shared, own, others', and pairs' parts."""
    alone = np.zeros((len(rows), count))
    beside = np.zeros((len(rows), count))
    places = np.array([at for at, _ in rows], dtype=int)
    line = np.arange(len(rows))
    alone[line, places] = 1.0
    for row, (_, group) in enumerate(rows):
        beside[row, list(group)] = 1.0
    beside[line, places] = 0.0
    many = beside.sum(axis=1, keepdims=True)
    pairs = (alone[:, :, None] * beside[:, None, :]).reshape(len(rows), count * count)
    return np.concatenate([alone, -many, -alone * many, -beside, -pairs], axis=1)


@lru_cache(maxsize=4)
def _all_groups(count: int) -> tuple[Array, list[int], list[int]]:
    groups = [[at for at in range(count) if mask >> at & 1] for mask in range(1, 1 << count)]
    rows = [(at, group) for group in groups for at in group]
    return _features(count, rows), [at for at, _ in rows], [len(group) for group in groups]
