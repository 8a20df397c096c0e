"""Sends requests to the engine, with admission control, metrics, spans and cancellation."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, starmap
from pathlib import Path
from typing import Any, TypeVar

from valora_serve.errors import CancelledRequestError, ServeError, StoppedError, UnknownModelError
from valora_serve.server.access.admission import Admission
from valora_serve.server.access.guard import caller, caller_key
from valora_serve.server.samples import Samples
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry.logs import LOG
from valora_serve.server.telemetry.metrics import Metrics
from valora_serve.server.telemetry.spans import Tracer
from valora_serve.types import EngineClient, Finish, Output, Request, ServedModel, Times

T = TypeVar("T")
NAMED = 20  # names that an error lists


@dataclass(eq=False)
class Ticket:
    """Requests that were admitted together at `since`, of which `left` have not finished."""

    admission: Admission
    model: ServedModel
    client: str
    left: int
    since: float

    def leave(self, times: Times | None) -> None:
        """Count one request as finished; `times` is None if it failed."""
        if self.left:
            self.left -= 1
            self.admission.leave(self.model.name, times, time.monotonic(), self.client)


@dataclass(eq=False)
class Service:
    """Sends the requests of all endpoints to the engine."""

    engine: EngineClient
    admission: Admission
    metrics: Metrics
    tracer: Tracer
    settings: ServerSettings
    share_by: str = "none"

    def __post_init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._changes: set[asyncio.Task[Any]] = set()
        self._hidden: set[str] = set()
        self.samples = Samples(self.settings)
        self.refresh()

    def refresh(self) -> None:
        """Update the models that requests can name, after a load or an unload."""
        base, *others = self.engine.models()  # of which there may be thousands
        found = {one.name: one for one in (base, *others)} | {self.engine.base: base}
        self._models = {name: found[name] for name in found if name not in self._hidden}

    async def changed(self, change: Coroutine[Any, Any, T]) -> T:
        """Make a change of what is served to its end, also if its client leaves meanwhile."""
        task = asyncio.create_task(change)
        self._changes.add(task)  # the event loop itself holds tasks weakly
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        self.refresh()
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.warning("a change of what is served failed: %s", error)

    def hide(self, name: str) -> None:
        """Let no request name a model that is about to be unloaded, until `show`."""
        self._hidden.add(name)
        self._models.pop(name, None)

    def show(self, name: str) -> None:
        """Let requests name a model again, if the engine still serves it."""
        self._hidden.discard(name)
        self.refresh()

    def serves(self, name: str) -> bool:
        """Return whether a request can name this."""
        return name in self._models

    def sees(self, name: str) -> bool:
        """Return whether the caller's key may see and ask what has, or would have, this name."""
        key, found = caller_key.get(), self._models.get(name)
        named = (name,) if found is None else (found.name, found.bundle)
        return key is None or key.sees(*named)

    def models(self) -> list[ServedModel]:
        """Return what the caller may see of what the engine serves."""
        key, found = caller_key.get(), self.engine.models()
        limited = key is not None and key.models  # there may be thousands of adapters
        return [model for model in found if self.sees(model.name)] if limited else found

    def model(self, name: str | None) -> ServedModel:
        """The domain, adapter or base model of a name; the base model if the name is None."""
        wanted = next(iter(self._models)) if name is None else name
        if (found := self._models.get(wanted)) is not None and self.sees(wanted):
            return found
        others = dict.fromkeys(one.name for key, one in self._models.items() if self.sees(key))
        known = listed(others) or "those that this key may ask, which are none"
        if name is None:
            raise UnknownModelError(f"This key may not ask the base model: name one of {known}")
        shown = name[:100].encode("utf-8", "replace").decode()
        raise UnknownModelError(f"There is no model {shown!r}: name one of {known}")

    def domains(self) -> dict[str, ServedModel]:
        """Domains, and adapters that have a head, by name, as far as the caller may see them."""
        models = sorted(self.models(), key=lambda model: model.name)
        return {m.name: m for m in models if m.kind == "domain" or m.head is not None}

    @contextlib.contextmanager
    def admitted(
        self, asked: Sequence[tuple[ServedModel, Sequence[Request]]]
    ) -> Iterator[dict[str, Ticket | ServeError]]:
        """Context in which requests count as admitted; tickets by model, or why there is none.

        The queue has room for all of them or takes none; each model has a deadline of its own.
        """
        if not self.engine.healthy:
            raise StoppedError("The engine has stopped: see the server's log")
        now, running = time.monotonic(), self.engine.stats().running
        made: dict[str, Ticket | ServeError] = {}
        tickets = []
        for model, requests in asked:
            client = model.client(self.share_by, caller.get()) or ""
            tickets.append(Ticket(self.admission, model, client, len(requests), now))
        counts: Counter[str] = Counter()
        for one in tickets:
            counts[one.client] += one.left
        for one, (model, requests) in zip(tickets, asked, strict=True):
            due, own = requests[0].deadline, counts[one.client]
            try:
                self.admission.check(model.name, running, due, counts.total(), one.client, own)
                made[model.name] = one
            except ServeError as error:
                made[model.name] = error
        tickets = [one for one in tickets if made[one.model.name] is one]
        for one in tickets:
            self.admission.enter(one.left, one.client)
        try:
            yield made
        finally:
            for one in tickets:
                while one.left:
                    one.leave(None)

    def _cache_salt(self, salt: str | None) -> str | None:
        """Return what requests share cached prompts and images by, from a request's own salt."""
        key, sharing = caller.get(), self.settings.cache_sharing
        if sharing == "all" or (sharing == "salt" and salt is not None):
            key = None
        return None if key is None and salt is None else repr((key, salt))

    async def ask(self, ticket: Ticket, request: Request, give: Callable[[Output], None]) -> None:
        """Ask an admitted request, and `give` its outputs; cancelling this cancels the request."""
        answering = self.engine.generate(self._sent(ticket, request))
        with self._taken(ticket, request) as take:
            async with contextlib.aclosing(answering) as outputs:
                async for output in outputs:
                    take(output)
                    give(output)

    @contextlib.contextmanager
    def _taken(self, ticket: Ticket, request: Request) -> Iterator[Callable[[Output], None]]:
        """Context of an answer, which takes note of outputs or raises their error; then leaves."""
        name, constraint = ticket.model.name, request.sampling.constraint
        tokens_at: list[float] = []
        text, last = "", None

        def take(output: Output) -> None:
            nonlocal text, last, tokens_at
            tokens_at += [time.monotonic()] * len(output.token_ids)
            if isinstance(output.error, UnknownModelError):  # which lists all names
                raise UnknownModelError(f"{name} was unloaded: name one of /v1/models")
            if output.finish in (Finish.ERROR, Finish.CANCELLED):
                raise output.error or CancelledRequestError("The request was cancelled")
            if constraint is not None:
                text += output.text
                if output.finish is Finish.STOP:
                    constraint.check(text)
            if output.finish is not None:
                last = output
                if not request.stream:
                    tokens_at = _spread(output.times, len(tokens_at))
                ended(output)
                for one in {name, *(adapter for adapter, _ in request.adapters)}:
                    self.metrics.ended(one, output, tokens_at)
                self.samples.offer(ticket.model, request, output)

        try:
            with self.tracer.span(name, ticket.since) as ended:
                yield take
                if last is None:
                    raise StoppedError("The engine stopped while it answered: try again")
        finally:
            ticket.leave(last.times if last is not None else None)

    def _sent(self, ticket: Ticket, request: Request) -> Request:
        """A request as the engine gets it: with client, arrival and whom it shares caches with."""
        salt = self._cache_salt(request.cache_salt)
        return replace(request, client=caller.get(), cache_salt=salt, arrival=ticket.since)

    async def ask_together(
        self, asked: Sequence[tuple[Ticket, Request]]
    ) -> list[Output | ServeError]:
        """Answers to requests about the same images, which share passes; or the error of each."""
        first, *others = starmap(self._sent, asked)
        stream = self.engine.generate(replace(first, also=tuple(others)))
        async with contextlib.aclosing(stream) as outputs:
            whole = {output.id: output async for output in outputs}
        found: list[Output | ServeError] = []
        for ticket, request in asked:
            try:
                with self._taken(ticket, request) as take:
                    if request.id in whole:
                        take(whole[request.id])
                found.append(whole[request.id])
            except ServeError as error:
                found.append(error)
        return found


def last_part(name: str) -> str:
    """The name of a folder if this is an absolute path; otherwise the name itself."""
    return Path(name).name if name.startswith("/") else name


def listed(names: Mapping[str, Any]) -> str:
    """The first of these names, and how many more there are."""
    more = f" and {len(names) - NAMED} more (see /v1/models)" if len(names) > NAMED else ""
    return ", ".join(islice(names, NAMED)) + more


def domain_of(domains: Mapping[str, ServedModel], name: str) -> ServedModel:
    """One of the domains; refused if there is none of this name."""
    if name not in domains:
        known = listed(domains) or "none: load a bundle"
        raise UnknownModelError(f"There is no domain {name[:100]!a}: the domains are {known}")
    return domains[name]


def _spread(times: Times | None, count: int) -> list[float]:
    """When the tokens of an answer that came as a whole were generated: evenly, in the mean."""
    if times is None or times.first_token is None or times.finished is None:
        return []
    step = (times.finished - times.first_token) / max(1, count - 1)
    return [times.first_token + number * step for number in range(count)]
