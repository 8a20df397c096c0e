"""The default strategy: earlier domains are rehearsed, so that adapters forget less."""

from __future__ import annotations

from valora_train.fusion.strategies.first_fit import FirstFit


class Rehearsal(FirstFit):
    """Tries every open adapter, oldest first; training mixes in samples of the domains it holds."""

    rehearse = True
