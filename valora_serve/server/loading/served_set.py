"""Loads adapters and bundles and makes contexts at run time, and restores them after a restart.

What is served, what the state file says and what the client is told agree, whatever fails: a load
or unload is recorded in a draft first, then made, then the draft is renamed to the state file.
Whatever can fail for lack of space thus fails before anything has changed.
"""

import asyncio
import contextlib
import secrets
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from itertools import chain
from pathlib import Path

from valora_data.contract.bundle import MANIFEST, read_manifest
from valora_data.errors import BundleError, ValoraError
from valora_serve import errors
from valora_serve.server.loading.state_file import KINDS, SavedState, StateFile, check_content
from valora_serve.server.resolving.cache import Entry
from valora_serve.server.resolving.sources import FETCHED, leads_inside
from valora_serve.server.settings import existing_folder
from valora_serve.server.telemetry import logs
from valora_serve.types import EngineClient, NewContext, ServedModel, short_name

CONTEXTS = "contexts"  # folder of the contexts made at run time, in the adapter folder


class ServedSet:
    """Loads and unloads at run time, one request at a time, and records it in the state file.

    Names that an operator has given stay the operator's while nothing has them: no request loads an
    adapter under them. An adapter that a request has loaded before gives way.
    """

    def __init__(
        self, engine: EngineClient, folder: str | Path | None, file: StateFile,
        replay: Callable[[Path], Awaitable[int]] | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._file, self.replay = engine, file, replay
        self._folder = existing_folder("adapter_folder", folder) if folder else None
        self.state = SavedState()  # what was loaded and unloaded at run time
        self._given: dict[str, Path] = {}  # bundles of the command line
        self._lock = asyncio.Lock()
        # Contexts of earlier runs by the adapter that they wait for.
        self.waiting: dict[str, list[str]] = {}
        # Adapters that requests have loaded, least recently used first.
        self.found: OrderedDict[str, Entry] = OrderedDict()
        self._reserved: set[str] = set()  # as `bundle_names` gives them, in lower case

    def read(self) -> list[str]:
        """Read the state file; the names of bundles that the command line's do not serve now."""
        if self._folder is None:
            return []
        self.state = self._file.read()
        for names in (*map(self.state.of, KINDS), *self.state.reserved.values()):
            self.reserve(names)
        return list(dict.fromkeys((*self.state.unloaded, *self.state.bundles)))

    def reserve(self, names: Iterable[str]) -> None:
        """Keep names, as `bundle_names` gives them, from adapters that requests load."""
        self._reserved |= {name.casefold() for name in names}

    def reserves(self, name: str) -> bool:
        """Return whether a name is an operator's, in capital or small letters."""
        return _is_among(name.casefold(), self._reserved)

    def _reserve_served(self) -> None:
        models = [model for model in self._engine.models() if model.name not in self.found]
        bundles = {short_name(model.bundle) for model in models if model.bundle}
        names = [model.name for model in models], bundles, [f"{one}/" for one in bundles]
        self.reserve(chain(*names, *self.state.reserved.values()))

    async def _give_way(self, names: Collection[str]) -> None:
        """Unload adapters that requests have loaded under names which an operator wants."""
        for name in [one for one in self.found if _is_among(one, names)]:
            await self._engine.unload("adapter", name)
            self.found.pop(name, None)
            logs.LOG.warning("unloaded %s: an operator loads something else of this name", name)

    async def restore(self) -> list[str]:
        """Load what earlier runs loaded; a sentence for each that could not be, which is kept."""
        problems = []
        for kind in KINDS:
            problems += await self._restored(kind, list(self.state.of(kind)))
        self._reserve_served()
        return problems

    async def _restored(self, kind: str, names: Iterable[str]) -> list[str]:
        problems = []
        for name in names:
            try:
                await self._load_again(kind, name)
            except Exception as error:  # noqa: BLE001 - the others are served all the same
                problems.append(f"{kind} {name} is not served again: {error}")
                logs.LOG.error("%s", problems[-1])
                if isinstance(error, errors.MissingAdapterError):
                    self.waiting.setdefault(error.adapter, []).append(name)
        return problems

    async def _load_again(self, kind: str, name: str) -> None:
        path = self.state.of(kind).get(name)
        if path is None:  # a bundle of the command line, which another had replaced
            if name in self._given:
                await self._engine.load("bundle", self._given[name])
            return
        if sha256 := self.state.sha256.get(f"{kind} {name}"):
            await asyncio.to_thread(check_content, kind, Path(path), sha256)
        folder = await asyncio.to_thread(self._checked, kind, path)
        if kind == "bundle":
            return await self._load_bundle(folder)
        if kind == "context":
            await self._give_way([name])
        late = kind == "adapter" and name in self.state.decode_only
        await self._engine.load(kind, folder, name, decode_only=late)
        self.found.pop(name, None)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[SavedState]:
        """Context in which nothing else changes what is served, in other replicas neither."""
        async with self._file.turn() as state, self._lock:
            if state is not None:
                await self._follow(state)
            yield self.state.model_copy(deep=True)

    async def follow(self, state: SavedState, before: SavedState) -> bool:
        """Serve what another replica has recorded, if the state is still the one `before`."""
        async with self._lock:
            if self.state is not before:
                return False
            await self._follow(state)
            return True

    async def _follow(self, state: SavedState) -> None:
        if state != self.state:
            await self._move(state)
            self._reserve_served()
            await self._serve_waiting()

    async def _move(self, state: SavedState, *key: str) -> None:
        """Serve what a state asks for; the kind and name of `key` in any case."""
        served = self._served_bundles()
        self._given |= {n: path for n, path in served.items() if n not in self.state.bundles}
        old, new = self._wanted(self.state), self._wanted(state)
        self.state = state
        for kind, name in sorted(old.keys() - new.keys(), key=lambda key: -KINDS.index(key[0])):
            if name in served if kind == "bundle" else self._served(name):
                await self._engine.unload(kind, name)
        changed = [one for one, content in new.items() if old.get(one) != content or one == key]
        for kind, name in sorted(changed, key=lambda one: KINDS.index(one[0])):
            await self._load_again(kind, name)

    def _wanted(self, state: SavedState) -> dict[tuple[str, ...], tuple[str | None, ...]]:
        """What a state asks for, by kind and name; equal values are the same content."""
        found: dict[tuple[str, ...], tuple[str | None, ...]] = {
            ("bundle", name): () for name in self._given if name not in state.unloaded
        }
        for kind in KINDS:
            for name, path in state.of(kind).items():
                late = str(kind == "adapter" and name in state.decode_only)
                found[kind, name] = path, state.sha256.get(f"{kind} {name}"), late
        return found

    async def _change(self, kind: str, name: str, new: SavedState) -> list[ServedModel]:
        """Record a change and make it: both, or neither; returns what is served of it then."""
        what, old = f"{kind} {name}", self.state
        new.sha256.pop(what, None)
        self._reserve_served()
        try:
            draft = await asyncio.to_thread(self._file.draft, new, what)
        except OSError as error:
            raise self._unrecorded(what, error) from error
        try:
            await self._move(new, kind, name)
        except BaseException:  # loading changes nothing if it fails
            self._file.discard()
            self.state = old
            raise
        try:
            await asyncio.to_thread(self._file.publish, draft)
        except (OSError, errors.ServeError) as error:  # also of a replica that cannot serve it
            self._file.discard()
            said = "nothing was changed"
            try:
                await self._move(old)
            except ValoraError as failure:
                logs.LOG.exception("%s: what was served before could not be loaded again", what)
                said = f"what was served before could not be loaded again ({failure})"
            if isinstance(error, OSError):
                raise self._unrecorded(what, error, said) from error
            raise
        self._reserve_served()
        await self._serve_waiting()
        own = (lambda one: short_name(one.bundle)) if kind == "bundle" else (lambda one: one.name)
        return [one for one in self._engine.models() if own(one) == name]

    def _unrecorded(
        self, what: str, error: OSError, but: str = "nothing was changed"
    ) -> errors.StorageError:
        return errors.StorageError(
            f"{what} could not be recorded in {self._file.path} ({error.strerror or error}), so "
            f"{but}: {errors.disk_remedy(error)}, and try again"
        )

    async def _serve_waiting(self) -> None:
        """Load the contexts whose adapter has come, unless they were forgotten or replaced."""
        served = {model.name for model in self._engine.models()}
        came = [name for name in self.waiting if name in served]
        waiting = {context for name in came for context in self.waiting.pop(name)} - served
        await self._restored("context", sorted(waiting & set(self.state.contexts)))

    async def load_adapter(
        self, name: str, path: str, *, replace: bool, decode_only: bool = False
    ) -> ServedModel:
        """Load a PEFT adapter."""
        async with self._alone() as new:
            self._check_free(
                "adapter", name, replace,
                "unload it first, or set load_inplace to replace an adapter that was loaded at "
                "run time",
            )  # fmt: skip
            new.adapters[name] = str(await asyncio.to_thread(self._checked, "adapter", path))
            new.decode_only = [one for one in new.decode_only if one != name]
            new.decode_only += [name] * decode_only
            return (await self._change("adapter", name, new))[0]

    def _check_free(self, kind: str, name: str, replace: bool, remedy: str) -> None:
        """Check that a name is free, or that of something which may be replaced."""
        taken = self._served(name)
        if taken and not (replace and (name in self.state.of(kind) or name in self.found)):
            raise errors.BusyError(f"The name {name} is taken by a served {taken.kind}: {remedy}")

    def _served(self, name: str) -> ServedModel | None:
        return next((model for model in self._engine.models() if model.name == name), None)

    def needed(self) -> set[str]:
        """Return the names of adapters that something else needs, such as a context."""
        return {m.adapter for m in self._engine.models() if m.adapter and m.adapter != m.name}

    async def load_found(self, entry: Entry) -> None:
        """Load an adapter that a request named, unless its name is served; it is not recorded."""
        async with self._lock:
            if self._served(entry.name) is not None:
                return
            if self.reserves(entry.name):
                raise errors.UnknownModelError(
                    f"There is no model {entry.name!r}, and its name is kept for what an operator "
                    "has loaded: name one of /v1/models"
                )
            await self._engine.load("adapter", entry.folder, entry.name)
            self.found[entry.name] = entry
            await self._serve_waiting()

    async def unload_found(self, entry: Entry, may: Callable[[], bool]) -> bool:
        """Unload what `load_found` has loaded, if `may` says so when nothing else changes."""
        async with self._lock:
            if self.found.get(entry.name) is not entry or not may():
                return False
            await self._engine.unload("adapter", entry.name)
            self.found.pop(entry.name, None)
            return True

    async def unload(self, kind: str, name: str) -> str | None:
        """Unload an ``adapter`` or a ``context`` of no bundle; its folder if it was recorded."""
        async with self._alone() as new:
            folder = new.of(kind).pop(name, None)
            if folder is None:
                await self._engine.unload(kind, name)  # says what is wrong with the name
                self.found.pop(name, None)
                return None
            new.decode_only = [one for one in new.decode_only if one != name or kind != "adapter"]
            await self._change(kind, name, new)
            return folder

    async def make_context(self, wanted: NewContext, *, replace: bool) -> ServedModel:
        """Make a context of a document and serve it; its files lie in the adapter folder."""
        name = wanted.name
        async with self._alone() as new:
            assert self._folder is not None, "settings that load at run time name it"
            self._check_free(
                "context", name, replace,
                "delete it first, or set replace for a context that was made at run time",
            )  # fmt: skip
            folder = self._folder / CONTEXTS / f"{name}-{secrets.token_hex(4)}"
            unused, new.contexts[name] = new.contexts.get(name), str(folder)
            try:
                await self._engine.make_context(wanted, folder)
                return (await self._change("context", name, new))[0]
            except BaseException as error:
                unused = str(folder)
                if isinstance(error, OSError):
                    raise self._unrecorded(f"context {name}", error) from error
                raise
            finally:
                if unused is not None:
                    await asyncio.to_thread(shutil.rmtree, unused, ignore_errors=True)

    async def forget_context(self, name: str) -> None:
        """Forget a context that was made at run time, and delete its files."""
        if (folder := await self.unload("context", name)) is None:
            return
        try:
            inside = await asyncio.to_thread(self._checked, "context", folder)
            await asyncio.to_thread(shutil.rmtree, inside, ignore_errors=True)
        except errors.AdapterError as error:  # gone, or the adapter folder is another one now
            logs.LOG.warning("the files of context %s are left where they are: %s", name, error)

    async def load_bundle(self, path: str) -> list[ServedModel]:
        """Load a bundle from the adapter folder and replay its golden examples."""
        async with self._alone() as new:
            folder = await asyncio.to_thread(self._checked, "bundle", path)
            names = await asyncio.to_thread(bundle_names, folder)
            name = names[0]
            new.reserved[name] = sorted({*new.reserved.get(name, ()), *names})
            if name in self._served_bundles() and name not in (*new.bundles, *new.unloaded):
                new.unloaded.append(name)  # the command line's, which this one replaces
            new.bundles[name] = str(folder)
            return await self._change("bundle", name, new)

    async def unload_bundle(self, name: str) -> None:
        """Unload a bundle with its domains."""
        async with self._alone() as new:
            known = {model.bundle for model in self._engine.models() if model.bundle}
            short = short_name(name)
            if name not in {*known, *map(short_name, known), *new.bundles}:
                await self._engine.unload("bundle", name)  # says what is wrong with the name
            if new.bundles.pop(short, None) is None and short not in new.unloaded:
                new.unloaded.append(short)
            await self._change("bundle", short, new)

    async def _load_bundle(self, folder: Path) -> None:
        """Load a bundle and replay its examples; the version before is served if they differ."""
        name, *others = await asyncio.to_thread(bundle_names, folder)
        before = self._served_bundles().get(name)
        await self._give_way((name, *others))
        await self._engine.load("bundle", folder)
        try:
            if self.replay is not None:
                await self.replay(folder)
        except BaseException as error:
            try:
                await self._engine.unload("bundle", name)
                if before is not None and before.resolve() != folder:  # it was not overwritten
                    await self._engine.load("bundle", before)
            except ValoraError as failure:
                raise errors.AdapterError(
                    f"{error}; the version before it could not be loaded again: {failure}"
                ) from error
            raise

    def _served_bundles(self) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for model in self._engine.models():
            if model.bundle:
                root = Path(model.root)  # of an adapter, its own folder
                inside = (p for p in root.parents if (p / MANIFEST).is_file())
                folder = root if model.kind == "domain" else next(inside, root)
                found[short_name(model.bundle)] = folder
        return found

    def _checked(self, kind: str, path: str) -> Path:
        """The folder of an adapter, a bundle or a context, links resolved; all files checked."""
        assert self._folder is not None, "settings that load at run time name it"
        outside = errors.AdapterError(
            "The path names no folder below adapter_folder: put the adapter there, unpacked, and "
            "name it relative to that folder"
        )
        try:
            folder = (self._folder / path).resolve(strict=True)
            if self._folder not in folder.parents or not folder.is_dir():
                raise outside
            read = (folder / f for f in FETCHED) if kind == "adapter" else folder.rglob("*")
            for item in read:
                if not leads_inside(folder, item.resolve(), self._folder):
                    raise errors.AdapterError(
                        f"{item.name} in {folder.name} is a link that leads outside: copy the file"
                    )
        except (OSError, ValueError, RuntimeError) as error:
            raise outside from error
        return folder


def bundle_names(folder: Path) -> list[str]:
    """Return a bundle's name, it with a slash for all that begin so, and those of its domains."""
    try:
        manifest = read_manifest(folder)
    except BundleError as error:
        raise errors.AdapterError(str(error)) from error
    return [manifest["name"], f"{manifest['name']}/", *manifest["domains"]]


def _is_among(name: str, names: Collection[str]) -> bool:
    """Return whether names as `bundle_names` gives them stand for this one, too."""
    return name in names or f"{name.partition('/')[0]}/" in names
