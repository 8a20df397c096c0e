"""The trace of a fusion: a waterfall of its stages and attempts, which MLflow's pages open with.

Spans are added when they have ended, with the times that were measured; MLflow stores the trace as
a whole when it ends. A fusion that was killed has a trace from its next start on, which begins with
the attempts before.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlflow
import torch
from mlflow.entities import SpanStatus, SpanStatusCode, SpanType

from valora_train.fusion.decision import AttemptDecision, Verdict
from valora_train.stage import Span, timed

SECOND = 1_000_000_000  # nanoseconds


class Trace:
    """The trace of a fusion, linked to the active run, whose tag ``valora.trace`` names it.

    Args:
        name: Its name.
        required: Required accuracy of every domain.
        before: Stages before the fusion.
        earlier: Seconds of attempts before an interruption, which the trace begins with.
    """

    def __init__(
        self, name: str, required: Mapping[str, float], before: Sequence[Span], earlier: float
    ) -> None:
        self._required, now = required, time.time_ns()
        self._earlier = now - int(SECOND * earlier)
        self._root = mlflow.start_span_no_context(
            name, SpanType.CHAIN, inputs={"required": dict(required)},
            start_time_ns=min([self._earlier, *(one.start for one in before)]),
        )  # fmt: skip
        mlflow.set_tag("valora.trace", self._root.trace_id)
        for one in before:
            self.add(one)

    def add_earlier(self, decisions: Sequence[AttemptDecision], seconds: Sequence[float]) -> None:
        """Add attempts before an interruption, one after the other."""
        start = self._earlier
        for decision, took in zip(decisions, seconds, strict=True):
            end = start + int(SECOND * took)
            self.add_attempt(Span("", start, end), decision, ())
            start = end

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Add the span of a `with` block."""
        spans: list[Span] = []
        with timed(spans, name):
            yield
        self.add(*spans)

    def add(
        self, span: Span, *inside: Span, failed: str = "", facts: Mapping[str, Any] | None = None
    ) -> None:
        """Add a span with others inside; `failed` says why it is marked, `facts` are shown."""
        opened = self._start(span, self._root, facts or {})
        for one in inside:
            part = dict(facts or {}).get("domains", {}).get(one.name.removeprefix("evaluate "), {})
            self._start(one, opened, part).end(end_time_ns=one.end)
        if failed:
            opened.set_status(SpanStatus(SpanStatusCode.ERROR, failed))
        opened.end(end_time_ns=span.end)

    def add_attempt(self, span: Span, decision: AttemptDecision, inside: Sequence[Span]) -> None:
        """Add an attempt: what its domains reached, what was asked, what it cost, the verdict."""
        rolled_back = decision.verdict is not Verdict.COMMITTED
        domains = {
            name: {
                "accuracy": accuracy,
                "asked": decision.asked.get(name),
                "kept": name in decision.kept,
            }
            for name, accuracy in decision.accuracy.items()
        }
        facts = {
            "verdict": str(decision.verdict), "reason": decision.reason, "domains": domains,
            "required": {name: self._required.get(name) for name in domains},
            "seconds": (span.end - span.start) / SECOND, "peak_memory_gb": peak_memory(),
        }  # fmt: skip
        mark = f" ({decision.verdict})" if rolled_back else ""
        span = span._replace(name=f"{decision.attempt.name}{mark}")
        decided = Span("decide", span.end, span.end)
        self.add(span, *inside, decided, failed=decision.reason if rolled_back else "", facts=facts)

    def end(self, error: str = "", **outputs: Any) -> None:
        """End the trace, with what the fusion made or the error that ended it."""
        self._root.set_outputs(outputs)
        if error:
            self._root.set_status(SpanStatus(SpanStatusCode.ERROR, error))
        self._root.end()

    def _start(self, span: Span, parent: Any, facts: Mapping[str, Any]) -> Any:
        return mlflow.start_span_no_context(
            span.name, SpanType.TASK, parent, attributes=dict(facts), start_time_ns=span.start
        )


def peak_memory() -> float:
    """Most memory that this process has held so far, on the host and on a GPU, in GB."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return round((host + torch.cuda.max_memory_allocated()) / 1e9, 2)
