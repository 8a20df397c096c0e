"""Loads the adapters that requests name before they are loaded, once for all that wait for one."""

import asyncio
import contextlib
import copy
import fnmatch
import math
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future

from valora_serve import errors
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.resolving import sources
from valora_serve.server.resolving.cache import AdapterCache, Entry
from valora_serve.server.service import Service
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs
from valora_serve.server.telemetry.metrics import ABSENT, LOADED, REFUSED, UNAVAILABLE

AT_ONCE = 4  # adapters that are fetched at a time
MAX_LOADING = 64  # most adapters that are fetched or wait for it; further ones get a 429
REMEMBERED = 4096  # most names whose failure is remembered; the oldest is dropped first
NAME = re.compile(r"(?=.{1,200}\Z)[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}")
"""Names that are looked for: they are parts of paths and URLs."""


class _Attempt:
    """A load: its name, the scheme of its source, and an event that ends its download."""

    def __init__(self, name: str) -> None:
        self.name, self.source, self.ended = name, "none", threading.Event()


class OnRequest:
    """Loads adapters on request; for the event loop's thread.

    A load goes on if those who wait for it leave, so that their next attempt finds it done. It ends
    after `adapter_seconds`, or with the server.
    """

    def __init__(self, service: Service, served: ServedSet, settings: ServerSettings) -> None:
        self._service, self._served, self._settings = service, served, settings
        self._resolvers = sources.make_resolvers(settings.adapter_sources)
        self._now = time.monotonic
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._users: Counter[str] = Counter()  # requests that name an adapter
        self._failed: OrderedDict[str, tuple[float, errors.ServeError]] = OrderedDict()
        self._places, self._serving = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
        self.results: Counter[tuple[str, str]] = Counter()
        self.cache = AdapterCache(settings, lambda one: one in served.found or one in self._loading)

    def allows(self, name: str) -> bool:
        """Return whether requests may load an adapter of this name."""
        named = any(fnmatch.fnmatchcase(name, one) for one in self._settings.adapter_allow)
        return named and bool(NAME.fullmatch(name)) and not self._served.reserves(name)

    def source(self, name: str) -> str | None:
        """Return the scheme of the place that a loaded adapter came from; None for others."""
        entry = self._served.found.get(name)
        return None if entry is None else entry.source

    def is_lost(self, name: str) -> bool:
        """Return whether a loaded adapter is on disk alone, and the cache has lost its files."""
        entry = self._served.found.get(name)
        if entry is None or name not in self._service.engine.stats().on_disk:
            return False
        return not entry.is_there()

    @property
    def schemes(self) -> list[str]:
        """Schemes of all places."""
        return list(dict.fromkeys(resolver.scheme for resolver in self._resolvers))

    def waiting(self) -> list[Entry]:
        """Return the adapters that are on disk, and loaded as soon as a request names them."""
        return [
            one for one in self.cache.entries()
            if not self._service.serves(one.name) and self.allows(one.name)
            and any(one.is_from(resolver) for resolver in self._resolvers)
            and not isinstance(self._failed.get(one.name, (0, None))[1], errors.AdapterError)
        ]  # fmt: skip

    @contextlib.contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Context in which the adapter of a name is not unloaded."""
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
            if name in self._served.found:
                self._served.found.move_to_end(name)

    async def load(self, name: str) -> None:
        """Load an adapter, or wait until it is loaded."""
        until, error = self._failed.get(name, (0.0, None))
        if error is not None and self._now() < until:
            raise copy.copy(error)
        task = self._loading.get(name)
        if task is None:
            if len(self._loading) >= MAX_LOADING:
                raise errors.OverloadedError(
                    f"{len(self._loading)} other adapters are being loaded: try again in 5 s", 5.0
                )
            task = self.begin(name)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise errors.StoppedError("The server is shutting down: ask another one") from None
            raise
        if (failed := self._failed.get(name)) is not None:
            raise copy.copy(failed[1])

    def begin(self, name: str) -> asyncio.Task[None]:
        """Begin to load an adapter that is not being loaded; what goes wrong is logged."""
        task = self._loading[name] = asyncio.create_task(self._load(name))
        task.add_done_callback(lambda _: self._loading.pop(name, None))
        return task

    async def close(self) -> None:
        """End all loads, and release the cache."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.cache.close()

    async def _load(self, name: str) -> None:
        """Load an adapter, or remember why it cannot be."""
        self._failed.pop(name, None)
        attempt, result = _Attempt(name), LOADED
        passing = errors.SourceError | errors.OverloadedError | errors.StorageError
        try:
            entry = await self._fetched(attempt)
            async with self._serving:
                if name not in self._served.found:
                    await self._make_place()
                await self._serve(entry)
            logs.LOG.info("loaded %s", name, extra={"facts": {"source": entry.source}})
        except Exception as caught:  # noqa: BLE001 - remembered as well, whatever it is
            error = caught
            if not isinstance(error, errors.ServeError):
                logs.LOG.error("loading adapter %s", name, exc_info=caught)
                error = errors.AdapterError(
                    f"Adapter {name} cannot be loaded ({type(caught).__name__}): save it again "
                    "with PEFT, and see the server's log"
                )
            logs.LOG.warning("adapter %s is not loaded: %s", name, error)
            result = UNAVAILABLE if isinstance(error, passing) else REFUSED
            result = ABSENT if isinstance(error, errors.UnknownModelError) else result
            busy = isinstance(error, errors.OverloadedError)
            seconds = min(self._settings.adapter_retry_seconds, 1.0 if busy else math.inf)
            # A copy has no traceback, whose frames would keep what was read.
            self._failed[name] = (self._now() + seconds, copy.copy(error))
            if len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)
        self.results[attempt.source, result] += 1

    async def _serve(self, entry: Entry) -> None:
        lost = self._served.found.get(entry.name)
        try:
            if lost is not None and lost.folder != entry.folder:  # another version came instead
                self._service.hide(entry.name)
                await self._served.unload_found(lost, lambda: True)
            await self._served.load_found(entry)
        finally:
            self._service.show(entry.name)

    async def _fetched(self, attempt: _Attempt) -> Entry:
        """Fetch in a thread that may outlive the server; one that hangs keeps its place."""
        loop, seconds = asyncio.get_running_loop(), self._settings.adapter_seconds
        future: Future[Entry] = Future()
        future.set_running_or_notify_cancel()  # it ends although its caller is cancelled

        def run() -> None:
            try:
                future.set_result(self._fetch(attempt))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._places.release)

        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
                threading.Thread(target=run, name="adapter", daemon=True).start()
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise errors.SourceError(
                f"Adapter {attempt.name} was not fetched within {seconds:g} s: try again later, or "
                "have --adapter-seconds raised"
            ) from error
        finally:
            attempt.ended.set()

    def _fetch(self, attempt: _Attempt) -> Entry:
        name = attempt.name
        for resolver in self._resolvers:
            attempt.source = scheme = resolver.scheme
            try:
                if (found := resolver.find(name)) is None:
                    continue
                entry = self.cache.get(name, resolver, found.version)
                return entry or self.cache.fetch(resolver, name, found, attempt.ended)
            except errors.ServeError:
                raise
            except Exception as error:
                said = sources.without_password(error)
                logs.LOG.warning("adapter %s: %s: %s", name, type(error).__name__, said)
                if sources.is_denied(error):
                    raise errors.ForbiddenError(
                        f"The server may not read adapter {name} from its source {scheme}: give it "
                        "the right to read and to list there"
                    ) from error
                entry = self.cache.get(name, resolver)
                if entry is not None:  # of the version that was there last
                    return entry
                raise errors.SourceError(
                    f"The source {scheme} of adapter {name} cannot be read now "
                    f"({type(error).__name__}): try again later, and see the server's log"
                ) from error
        attempt.source = "none"
        remedies = ", ".join(dict.fromkeys(resolver.remedy for resolver in self._resolvers))
        raise errors.UnknownModelError(
            f"There is no model {name!r}, and no source of adapters has it ({sources.CONFIG} and "
            f"{sources.WEIGHTS}): {remedies}, or name one of /v1/models"
        )

    async def _make_place(self) -> None:
        """Unload the least recently used adapters until one more may be loaded."""
        found, most = self._served.found, self._settings.max_found_adapters
        for name, entry in tuple(found.items()):
            if len(found) >= most and self._is_idle(name):
                await self._unload(entry)
        if len(found) >= most:
            raise errors.OverloadedError(
                f"All {len(found)} adapters that requests may load are in use: try again in 1 s, "
                "or have --max-found-adapters raised"
            )

    def _is_idle(self, name: str) -> bool:
        return not self._users[name] and name not in self._served.needed()

    async def _unload(self, entry: Entry) -> None:
        """Unload an adapter unless it has come into use meanwhile."""

        def leaves() -> bool:
            if idle := self._is_idle(entry.name):
                self._service.hide(entry.name)  # the next request that names it loads it again
            return idle

        try:
            if await self._served.unload_found(entry, leaves):
                logs.LOG.info("unloaded %s", entry.name)
        finally:
            self._service.show(entry.name)
