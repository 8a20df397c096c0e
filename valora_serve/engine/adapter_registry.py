"""What requests can name, which adapters must therefore be kept, and which one is merged."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from valora_data.contract.contexts import Memory
from valora_kernels.metadata import NONE
from valora_serve.catalogue.adapters import Adapter, read_adapter
from valora_serve.catalogue.contexts import Context, read_file
from valora_serve.catalogue.effect import check_effect
from valora_serve.catalogue.store import Staged, Store
from valora_serve.engine.sequence import SequenceState
from valora_serve.errors import AdapterError, QuarantinedError
from valora_serve.memory.residency import Residency
from valora_serve.memory.unified import AdapterMemory, PackedAdapter, PackedPrefix, PrefixMemory
from valora_serve.model.linears import Linears
from valora_serve.model.lmm import Lmm
from valora_serve.types import Mode, ServedModel

log = logging.getLogger(__name__)

FIXED = "the base weights have 4 or 8 bits"  # why no adapter is merged into some base models
INFINITE = "merging it makes base weights infinite or NaN"  # why a merge was taken back


Read = tuple[Staged, dict[str, PackedAdapter], dict[str, str], dict[str, PackedPrefix]]
"""What was read; by content hash adapters, reasons why some are never merged, and prefixes."""


class MergeState:
    """Owner of the mode and of the merged adapter, which is pinned; only `switch` changes them."""

    def __init__(self, linears: Linears, adapters: AdapterMemory) -> None:
        self.mode = Mode.UNMERGED
        self.adapter: str | None = None
        self.switches = 0
        self._linears, self.adapters = linears, adapters

    @property
    def slot(self) -> int:
        """Slot of the merged adapter, `NONE` while the weights are pristine."""
        return NONE if self.adapter is None else self.adapters[self.adapter].slot

    def switch(self, mode: Mode, adapter: str | None) -> bool:
        """Merge a resident adapter, or restore the pristine weights; return whether they hold it.

        One that makes weights infinite or NaN is quarantined; the mode is unmerged then.
        """
        wanted, before, adapters = adapter, self.adapter, self.adapters
        if adapter in adapters.unmergeable:
            adapter = None
        if adapter != before:
            if adapter is not None:
                adapters.pin(adapter)
                if not self._merge(adapter):
                    adapters.unpin(adapter)
                    adapter = None
            if adapter is None:
                self._linears.unmerge()
            if before is not None:
                adapters.unpin(before)
            self.switches += 1
        self.adapter = adapter
        self.mode = mode if adapter is not None else Mode.UNMERGED
        return adapter == wanted

    def unmerge(self) -> None:
        """Restore the pristine weights; the adapter, which was pinned, makes room for others."""
        self.switch(Mode.UNMERGED, None)

    def _merge(self, adapter: str) -> bool:
        """Merge an adapter; return whether that went well, after which the weights are finite."""
        adapters = self.adapters
        slot = adapters[adapter].slot
        rank, scaling = int(adapters.ranks[slot]), float(adapters.scalings[slot])
        try:
            self._linears.merge(slot, rank, scaling)
            # Content that was merged once gives the same weights every time: wait only once.
            if adapter not in adapters.proven:
                if not self._linears.is_finite():
                    log.error("adapter %s is quarantined: %s", adapter, INFINITE)
                    adapters.unmergeable[adapter] = adapters.quarantined[adapter] = INFINITE
                    return False
                adapters.proven.add(adapter)
        except Exception as error:
            log.exception("adapter %s is not merged any more", adapter)
            adapters.unmergeable[adapter] = f"merging it failed: {error}"
            return False
        return True


@dataclass(eq=False, repr=False)
class AdapterRegistry:
    """The names of the store, and the adapters and prefixes behind them in memory.

    An adapter's key is its folder's name and the start of its content hash; it is freed after its
    last name and request.
    """

    lmm: Lmm
    store: Store
    prefixes: PrefixMemory
    merge_state: MergeState
    mergeable: bool
    on_change: Callable[[], None]  # is called after weights moved, or began to take adapters

    def __post_init__(self) -> None:
        self.adapters, self._memory = self.merge_state.adapters, self.prefixes.memory
        self._row_norms = self.lmm.linears.row_norms() if self.mergeable else {}
        self._key_of: dict[str, str] = {}  # by content hash
        # Of the adapters and prefixes that a name needs, by their keys.
        self._names: dict[str, list[str]] = {}
        self.ranks: dict[str, int] = {}  # of those adapters
        # The same at nearly every step.
        self._names_of = lru_cache(2)(lambda keys: tuple(self.by_name(dict.fromkeys(keys, ""))))
        self.contexts = 0  # that requests can name

    def key(self, adapter: Adapter) -> str:
        """Return the key of an adapter, which those of the same content share."""
        named = f"{adapter.folder.name}#{adapter.content[:12]}"
        return self._key_of.setdefault(adapter.content, named)

    def prefix_key(self, context: Context) -> str:
        """Return the key of a context's prefix, which those of the same content share."""
        return self._key_of.setdefault(context.content, f"{context.name}#{context.content[:12]}")

    def by_name(self, facts: Mapping[str, str]) -> dict[str, str]:
        """Return facts about adapters, given by their keys, by the names that they have."""
        return {name: fact for key, fact in facts.items() for name in self._names.get(key, ())}

    def names(self, keys: Collection[str]) -> tuple[str, ...]:
        """Return all names that requests can use for some adapters."""
        return self._names_of(frozenset(keys))

    def name(self, key: str) -> str:
        """Return the name of an adapter; its key if only running requests still need it."""
        return self._names.get(key, [key])[0]

    def quarantined(self, key: str) -> QuarantinedError:
        """Return the error of the requests of an adapter that is quarantined."""
        return QuarantinedError(
            f"adapter {self.name(key)} is quarantined ({self.adapters.quarantined[key]}): "
            "use another model; loading the adapter again lifts the quarantine"
        )

    def read(self, kind: str, folder: Path, name: str, *, decode_only: bool = False) -> Read:
        """Read, check and pack what `EngineClient.load` loads; for `register`."""
        if kind == "adapter":
            staged = self.store.stage_adapter(name, folder, decode_only=decode_only)
        elif kind == "context":
            staged = self.store.stage_context(name, folder)
        else:
            staged = self.store.stage_bundle(folder)
        unmergeable, dtype = {}, self._memory.storage.dtype
        for content, adapter in staged.adapters.items():
            reason = check_effect(adapter, dtype, self._row_norms)
            if (reason := reason if self.lmm.mergeable else FIXED) is not None:
                unmergeable[content] = reason
        packed = {content: self._memory.pack(one) for content, one in staged.adapters.items()}
        named = {one.context.content: one.context.name for one in staged.targets if one.context}
        prefixes = {
            content: self.pack_prefix(named[content], content, memory)
            for content, memory in staged.memories.items()
        }
        return staged, packed, unmergeable, prefixes

    def pack_prefix(self, name: str, content: str, memory: Memory) -> PackedPrefix:
        """Lay out the prefix of a context in host memory."""
        keys, values = (memory.tensors[part][:, self.lmm.own_kv_heads]
                        for part in ("keys", "values"))  # fmt: skip
        return self._memory.pack_prefix(name, content, keys, values)

    def register(self, read: Read) -> list[ServedModel]:
        """Make what was read nameable, all of it or nothing (`AdapterError`)."""
        staged, packed, unmergeable, prefixes = read
        self.store.check(staged)
        self._activate({name for one in packed.values() for name in one.groups})
        models = self.store.commit(staged)
        for content, adapter in staged.adapters.items():
            key, reason = self.key(adapter), unmergeable.get(content)
            reload = partial(self._reread, adapter.folder)
            self.adapters.add(key, packed[content], reload, unmergeable=reason)
            if reason is not None and reason is not FIXED:
                log.warning("adapter %s is served, but never merged: %s", key, reason)
        for target in staged.targets:
            if (context := target.context) is not None and context.has_prefix:
                reread = partial(self._reread_prefix, context)
                self.prefixes.add(self.prefix_key(context), prefixes[context.content], reread)
        self._refresh()
        return models

    def _reread(self, folder: Path) -> PackedAdapter:
        return self._memory.pack(read_adapter(folder, self.lmm.targets))

    def _reread_prefix(self, context: Context) -> PackedPrefix:
        assert context.file is not None
        base, config = self.store.base_hash(), self.lmm.config.get_text_config()
        memory, content = read_file(context.name, context.file, base, config)
        return self.pack_prefix(context.name, content, memory)

    def unregister(self, kind: str, name: str) -> None:
        """Forget an adapter, a bundle or a context; requests that run on it are finished."""
        self.store.unregister(kind, name)
        self._refresh()

    def released(self, sequence: SequenceState) -> None:
        """Free what the last request has ended on that no name needs any more."""
        for residency, key in sequence.uses:
            self._retire(residency, (key,))

    def _refresh(self) -> None:
        before, self._names = self._names, {}
        self._names_of.cache_clear()
        self.ranks = {}
        for name, adapter in self.store.adapters().items():
            # The first name is the adapter's own; domains that use it come later.
            self._names.setdefault(key := self.key(adapter), []).append(name)
            self.ranks[key] = adapter.rank
        contexts = self.store.contexts().values()
        self.contexts = len(contexts)
        for context in contexts:
            if context.has_prefix:
                self._names.setdefault(self.prefix_key(context), []).append(context.name)
        for residency in (self.adapters, self.prefixes):
            self._retire(residency, before)
        # What is read again gets the key that its first folder gives it then.
        known = self._names, self.adapters, self.prefixes
        self._key_of = {
            content: key for content, key in self._key_of.items() if any(key in x for x in known)
        }

    def _retire(self, residency: Residency[Any], keys: Iterable[str]) -> None:
        """Free what neither a name nor an unfinished request needs."""
        for key in keys:
            if key not in self._names and key not in residency.wanted and key in residency:
                if key == self.merge_state.adapter:
                    self.merge_state.unmerge()
                residency.remove(key)

    def _activate(self, names: set[str]) -> None:
        linears = self.lmm.linears
        if not (new := {name for name in names if linears.groups[name].lora is None}):
            return
        self.merge_state.unmerge()
        try:
            linears.activate(sorted(new), self.mergeable)
        except torch.OutOfMemoryError as error:
            raise AdapterError(
                "the GPU has too little memory for a copy of the weights that adapters are merged "
                "into: lower memory, or choose policy=unmerge_only"
            ) from error
        finally:  # some weights may have moved all the same
            self.on_change()
