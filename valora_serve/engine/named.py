"""What requests can name, and which adapters must therefore be kept: load, register, unload."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from valora_serve.catalogue.adapters import read_adapter
from valora_serve.catalogue.effect import check_effect
from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping
    from pathlib import Path

    from valora_serve.catalogue.adapters import Adapter
    from valora_serve.catalogue.store import Staged, Store
    from valora_serve.engine.merge import MergeState
    from valora_serve.memory.adapter_memory import AdapterMemory
    from valora_serve.memory.unified import PackedAdapter, UnifiedMemory
    from valora_serve.model.lmm import Lmm

log = logging.getLogger(__name__)


class Named:
    """The names of the store, and the adapters behind them in memory.

    An adapter's key is its folder's name and the start of its content hash. Adapters that no name
    needs any more are freed, after the last request that runs on them.

    Args:
        lmm: The base model.
        store: Names that requests can use.
        memory: Packs adapters.
        adapters: Holds packed adapters.
        merge_state: State of the base weights.
        in_use: Keys of the adapters that unfinished requests use.
        mergeable: Whether adapters can be merged into the base weights.
        on_change: Called after weights of the base model were moved or began to take adapters.
    """

    def __init__(
        self,
        lmm: Lmm,
        store: Store,
        memory: UnifiedMemory,
        adapters: AdapterMemory,
        merge_state: MergeState,
        *,
        in_use: Container[str],
        mergeable: bool,
        on_change: Callable[[], None],
    ) -> None:
        self._lmm, self._store = lmm, store
        self._memory, self._adapters, self._merge_state = memory, adapters, merge_state
        self._in_use, self._mergeable, self._on_change = in_use, mergeable, on_change
        self._row_norms = lmm.linears.row_norms() if mergeable else {}
        self._key_of: dict[str, str] = {}  # by content hash
        self._names: dict[str, list[str]] = {}  # of the adapters that a name needs, by key

    def known(self) -> list[str]:
        """Return the keys of all adapters that a name needs, sorted."""
        return sorted(self._names)

    def key(self, adapter: Adapter) -> str:
        """Return the key of an adapter.

        Folders of the same content are one adapter, and its key has the name of the first folder.
        """
        named = f"{adapter.folder.name}#{adapter.content[:12]}"
        return self._key_of.setdefault(adapter.content, named)

    def by_name(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return what is known of some adapters, by each name that requests can use for them.

        Args:
            facts: By key of the adapter.
        """
        return {name: fact for key, fact in facts.items() for name in self._names.get(key, ())}

    def name(self, key: str) -> str:
        """Return the name of an adapter; its key if only running requests still need it."""
        return self._names.get(key, [key])[0]

    def load(self, folder: Path, name: str | None = None) -> list[str]:
        """Read, check, pack and register a folder.

        Args:
            folder: A bundle, or a PEFT adapter if it gets a name.
            name: Name of the adapter, None for a bundle.

        Returns:
            The names that requests can now use.

        Raises:
            AdapterError: The folder cannot be served; nothing has changed then.
        """
        return self.register(*self.read(folder, name))

    def read(
        self, folder: Path, name: str | None = None
    ) -> tuple[Staged, dict[str, PackedAdapter], dict[str, str]]:
        """Do the slow part of `load`, which changes nothing; may be called from any thread.

        Returns:
            Arguments for `register`.

        Raises:
            AdapterError: The folder cannot be served.
        """
        store = self._store
        staged = store.stage_bundle(folder) if name is None else store.stage_adapter(name, folder)
        adapters, dtype = staged.adapters.items(), self._memory.storage.dtype
        unmergeable = {}
        for content, adapter in adapters:
            reason = check_effect(adapter, dtype, self._row_norms)
            if reason is not None:
                unmergeable[content] = reason
        pack = self._memory.pack
        return staged, {content: pack(adapter) for content, adapter in adapters}, unmergeable

    def register(
        self,
        staged: Staged,
        packed: Mapping[str, PackedAdapter],
        unmergeable: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Make what was read nameable; all of it, or nothing.

        Args:
            staged: The names, and the adapters by content hash.
            packed: The same adapters laid out for the device, by content hash.
            unmergeable: Why adapters must not be merged, by content hash.

        Returns:
            The names.

        Raises:
            AdapterError: Something else has one of the names.
        """
        models = self._store.commit(staged)
        for content, adapter in staged.adapters.items():
            folder = adapter.folder

            def reload(folder: Path = folder) -> PackedAdapter:
                return self._memory.pack(read_adapter(folder, self._lmm.targets))

            key, reason = self.key(adapter), (unmergeable or {}).get(content)
            self._adapters.add(key, packed[content], reload, unmergeable=reason)
            if reason is not None:
                log.warning("adapter %s is served, but never merged: %s", key, reason)
        self._activate({name for one in packed.values() for name in one.groups})
        self._refresh()
        return [model.name for model in models]

    def unregister(self, name: str, *, bundle: bool) -> None:
        """Forget an adapter or a bundle; requests that run on it are finished.

        Args:
            name: Its name.
            bundle: Whether it is a bundle.

        Raises:
            UnknownModelError: Nothing has this name.
            BusyError: The adapter belongs to a bundle.
        """
        if bundle:
            self._store.unregister_bundle(name)
        else:
            self._store.unregister_adapter(name)
        self._refresh()

    def released(self, key: str) -> None:
        """Free an adapter whose last request has ended, if no name needs it any more."""
        if key not in self._names:
            self._retire((key,))

    def _refresh(self) -> None:
        """Find out which adapters are needed now, and free the others."""
        before = set(self._names)
        self._names = {}
        for name, adapter in self._store.adapters().items():
            # The first name is the adapter's own; domains that use it come later.
            self._names.setdefault(self.key(adapter), []).append(name)
        self._retire(before - set(self._names))

    def _retire(self, keys: Iterable[str]) -> None:
        """Free adapters, except those that unfinished requests use: `released` frees them."""
        for key in keys:
            if key not in self._in_use and key in self._adapters:
                if key == self._merge_state.adapter:
                    self._merge_state.switch(Mode.UNMERGED, None)
                self._adapters.remove(key)

    def _activate(self, names: set[str]) -> None:
        """Let groups of linears apply adapters, and be merged into, from now on."""
        linears = self._lmm.linears
        new = {name for name in names if linears.groups[name].lora is None}
        if not new:
            return
        if self._merge_state.adapter is not None:
            self._merge_state.switch(Mode.UNMERGED, None)
        linears.activate(new, self._memory.lora, mergeable=self._mergeable)
        self._on_change()
