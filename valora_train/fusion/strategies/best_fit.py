"""The strategy that looks for the adapter with the most room."""

from __future__ import annotations

from typing import TYPE_CHECKING

from valora_train.fusion.strategies.base import Proposal, Strategy, slack

if TYPE_CHECKING:
    from valora_train.fusion.strategies.base import View


class BestFit(Strategy):
    """Tries every open adapter, first the one whose domains have the most slack above their bars.

    Training mixes in samples of the domains that the adapter holds.
    """

    rehearse = True

    def propose(self, view: View) -> Proposal | None:
        """The next waiting domain into the adapter with the most slack."""
        room = sorted(view.adapters, key=lambda name: -slack(view, name))
        return self.first_that_may_fit(view, room)
