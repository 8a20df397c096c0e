"""Writes decisions to a file that people can read."""

from __future__ import annotations

import logging
from typing import TextIO

from valora_serve.orchestrator.decision import Decision, View

log = logging.getLogger(__name__)


class DecisionTrace:
    """Writes one line per decision, until the file cannot be written any more (a full disk).

    Time in seconds, mode, merged adapter, rows (``d`` decode, ``p`` prompt tokens), running and
    waiting requests, prefetched adapters, preempted and aborted requests if any, reason.
    """

    def __init__(self, file: TextIO) -> None:
        self._file: TextIO | None = file

    def write(self, view: View, decision: Decision) -> None:
        """Write the line of one step."""
        if self._file is None:
            return
        prefilling = {r.id for r in view.waiting} | {r.id for r in view.running if r.prompt_left}
        tokens = sum(n for key, n in decision.batch if key in prefilling)
        decodes = sum(key not in prefilling for key, _ in decision.batch)
        notes = [f"+{name}" for name in decision.prefetch]
        notes += [f"preempt {key}" for key in decision.preempt]
        notes += [f"abort {key}: {why}" for key, why in decision.abort]
        line = (
            f"{view.now:12.6f} {decision.mode:8} {decision.merged or '-':16} "
            f"{decodes:4d}d+{tokens}p run {len(view.running)} wait {len(view.waiting)}  "
            f"{' '.join([*notes, decision.reason])}\n"
        )
        try:
            self._file.write(line)
        except OSError as error:
            log.warning("the decision trace ends here, as it cannot be written: %s", error)
            self._file = None
