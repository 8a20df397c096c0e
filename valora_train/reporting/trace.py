"""The trace of a fusion: a waterfall of stages and attempts, added when they have ended."""

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
    """The trace of a fusion, linked to the active run by the tag ``valora.trace``."""

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
            self.add_attempt(Span(decision.attempt.name, start, end), decision, ())
            start = end

    @contextmanager
    def around(self, name: str) -> Iterator[None]:
        """Add the span of a `with` block."""
        spans: list[Span] = []
        with timed(spans, name):
            yield
        self.add(spans[0])

    def add(self, span: Span, parent: Any = None, facts: Any = None, failed: str = "") -> Any:
        """Add a span below another one; `failed` says why it is marked as an error."""
        added = mlflow.start_span_no_context(
            span.name, SpanType.TASK, parent or self._root, None, facts, start_time_ns=span.start
        )
        if failed:
            added.set_status(SpanStatus(SpanStatusCode.ERROR, failed))
        added.end(end_time_ns=span.end)
        return added

    def add_attempt(
        self, span: Span, decision: AttemptDecision, inside: Sequence[Span], steps: int = 0
    ) -> None:
        """Add an attempt: what its domains reached, what was asked, what it cost, the verdict."""
        committed = decision.verdict is Verdict.COMMITTED
        domains: dict[str, dict[str, Any]] = {
            name: {
                "accuracy": accuracy, "required": self._required.get(name),
                "asked": decision.asked.get(name), "kept": name in decision.kept,
            }
            for name, accuracy in decision.accuracy.items()
        }  # fmt: skip
        verdict = {"verdict": str(decision.verdict), "reason": decision.reason}
        facts = verdict | {"domains": domains, "seconds": (span.end - span.start) / SECOND}
        if inside:
            held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # most so far
            held += torch.cuda.max_memory_allocated()
            facts |= {"steps": steps, "peak_memory_gb": round(held / 1e9, 2)}
        if not committed or decision.left_out:  # first, as pages cut off the ends of names
            what = f"{', '.join(decision.left_out)} rolled back" if committed else decision.verdict
            span = span._replace(name=f"{what}: {span.name}")
        added = self.add(span, None, facts, "" if committed else decision.reason)
        for one in inside:
            name = one.name.removeprefix("evaluate ")
            missed = f"below {decision.asked[name]}" if name in decision.below else ""
            self.add(one, added, domains.get(name, {}), missed)
        self.add(Span("decide", span.end, span.end), added, verdict)

    def end(self, error: str = "", **outputs: Any) -> None:
        """End the trace, with what the fusion made or the error that ended it."""
        self._root.set_outputs(outputs)
        if error:
            self._root.set_status(SpanStatus(SpanStatusCode.ERROR, error))
        self._root.end()
