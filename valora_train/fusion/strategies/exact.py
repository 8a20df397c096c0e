"""The strategy that knows the optimum: from an oracle table."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from valora_train.errors import SettingsError
from valora_train.fusion.exact import exact_packing
from valora_train.fusion.strategies.affinity import grouped
from valora_train.fusion.strategies.base import Options, Proposal, Strategy, View

if TYPE_CHECKING:
    from typing import Self

    from valora_train.fusion.oracle import OracleTable


class Exact(Strategy):
    """Trains the groups of the optimal packing, each from the start.

    Domains that miss their bar although the table promised it are placed like by `rehearsal`.

    Args:
        table: A complete oracle table of the domains.
        seed: Seed of the fusion; the table's first seed counts if it has not this one.
    """

    rehearse = True

    def __init__(self, table: OracleTable, seed: int) -> None:
        self._table = table
        self._seed = seed if seed in table.seeds else table.seeds[0]

    @classmethod
    def create(cls, options: Options) -> Self:
        """Read the oracle table of `options`.

        Raises:
            SettingsError: If there is none.
        """
        if options.oracle is None:
            raise SettingsError(
                "fusion.strategy=exact needs an oracle table: make one with command=oracle and "
                "name its file with fusion.oracle"
            )
        return cls(options.oracle, options.seed)

    def propose(self, view: View) -> Proposal | None:
        """A domain that is out of reach, then the first optimal group that is not packed yet."""
        there = {*view.waiting, *chain(*view.adapters.values())}
        tried = {name for one in view.history for name in one.attempt.domains}  # may take none now
        names = {*there, *tried}
        asked = {name: view.requirements[name] for name in view.requirements if name in names}
        best = exact_packing(self._table, asked, self._seed, head_only=view.head_only)
        # What no adapter holds may help to train one, as long as it is not flagged.
        helpers = {*chain(*best.trained)}.difference(*best.packing)
        for name in best.unreachable:
            if name in view.waiting and name not in helpers:
                return Proposal((name,))
        # Domains of a group that was trained may have moved on to another one since.
        done = [set(one.attempt.domains) for one in view.history if one.kept]
        for group, trained in zip(best.packing, best.trained, strict=True):
            if set(trained) in done or not there.issuperset(trained):
                continue
            # Beside domains that it will not hold, an adapter is trained from the start.
            proposal = grouped(view, frozenset(group)) if group == trained else Proposal(trained)
            if proposal.new and not view.failed(proposal):
                return proposal
        return super().propose(view)
