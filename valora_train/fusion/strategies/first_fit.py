"""The strategy that looks for room in every adapter."""

from __future__ import annotations

from valora_train.fusion.strategies.base import Strategy


class FirstFit(Strategy):
    """Tries every open adapter, oldest first, and trains it on the new domain alone."""
