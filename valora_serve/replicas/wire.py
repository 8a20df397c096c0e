"""What the server and the replicas send each other; all of it can be pickled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from valora_serve.errors import RequestError
from valora_serve.server.constrain import GrammarConstraint

if TYPE_CHECKING:
    from valora_serve.errors import ServeError
    from valora_serve.replicas.served import Revision
    from valora_serve.server.constrain import Grammar, Grammars
    from valora_serve.types import EngineStats, Output, Request, Times


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica.

    Attributes:
        request: The request, without its constraint.
        adapter: Name of the adapter that it needs, by which it is routed; None for the base model.
        revision: What the server served when it sent the request.
        grammar: What the answer follows; None if it is free.
    """

    request: Request
    adapter: str | None
    revision: Revision
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Outputs of a request, as far as they were there when it was sent.

    Attributes:
        replica: Name of the replica.
        sent: When it was sent, in seconds of the replica's `time.monotonic`.
        outputs: The outputs; empty in the first batch, which says that the replica has the request.
    """

    replica: str
    sent: float
    outputs: tuple[Output, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """Result of a call to all replicas.

    Attributes:
        replica: Name of the replica.
        value: What the call returned.
        error: Why it failed, None if it did not.
    """

    replica: str
    value: Any = None
    error: ServeError | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the server needs to know of the base model.

    Attributes:
        base: Id of the base model.
        context_length: Longest prompt and answer together, in tokens.
        tokenizer: Its tokenizer, from transformers.
    """

    base: str
    context_length: int
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Report:
    """State of a replica.

    Attributes:
        replica: Name of the replica.
        host: Its machine.
        pid: Its process.
        healthy: Whether its engine runs.
        revision: What it serves; None before its first bundle.
        stats: State and counters of its engine.
    """

    replica: str
    host: str
    pid: int
    healthy: bool
    revision: Revision | None
    stats: EngineStats


def packed(request: Request, adapter: str | None, revision: Revision) -> Call:
    """Return what is sent to a replica for a request.

    Args:
        request: The request.
        adapter: Name of the adapter that it needs, None for the base model.
        revision: What is served now.

    Raises:
        RequestError: Its constraint is none that another process can make.
    """
    constraint = request.sampling.constraint
    if constraint is None:
        return Call(request, adapter, revision)
    if not isinstance(constraint, GrammarConstraint):
        raise RequestError(
            f"request {request.id} is constrained by {type(constraint).__name__}, which replicas "
            "cannot make: use a JSON schema"
        )
    sampling = dataclasses.replace(request.sampling, constraint=None)
    bare = dataclasses.replace(request, sampling=sampling)
    return Call(bare, adapter, revision, constraint.grammar)


async def unpacked(call: Call, grammars: Grammars) -> Request:
    """Return the request of a call, with its constraint.

    Raises:
        RequestError: The constraint cannot be made.
        OverloadedError: Too many grammars wait to be compiled.
    """
    if call.grammar is None:
        return call.request
    # The server has counted them by client already: here each request counts as one.
    (constraint,) = await grammars.constraints(call.grammar, client=call.request.id)
    sampling = dataclasses.replace(call.request.sampling, constraint=constraint)
    return dataclasses.replace(call.request, sampling=sampling)


def localised(output: Output, arrival: float, later: float) -> Output:
    """Return an output with its times on this machine's clock.

    Args:
        output: Output of a replica.
        arrival: When the request arrived here, in seconds of `time.monotonic`.
        later: By how much this machine's clock is ahead of the replica's, in seconds.
    """
    times = output.times
    if times is None:
        return output

    def here(moment: float | None) -> float | None:
        return None if moment is None else max(arrival, moment + later)

    made: Times = dataclasses.replace(
        times,
        arrival=arrival,
        started=here(times.started),
        first_token=here(times.first_token),
        finished=here(times.finished),
    )
    return dataclasses.replace(output, times=made)
