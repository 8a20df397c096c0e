"""What requests can name: the base model, adapters, and the domains of bundles.

Reading and checking files is slow, and may be done in any thread (`stage_adapter`,
`stage_bundle`). `commit` makes all that was staged nameable, or nothing of it.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from valora_data.contract.base_model import base_hash
from valora_data.contract.bundle import GOLDEN, Bundle, check_base, read_bundle
from valora_data.contract.contexts import ENCODER_FILE, Encoder, Memory, read_encoder
from valora_data.contract.files import read_json, shown
from valora_data.contract.head import Head
from valora_data.contract.heads import read_head
from valora_data.errors import BundleError
from valora_data.models.base import ModelPart
from valora_serve.catalogue.adapters import (
    CONFIG,
    MODEL_CONFIG,
    WEIGHTS,
    Adapter,
    ModelTargets,
    make_classifier,
    read_adapter,
)
from valora_serve.catalogue.contexts import Context, read_context, read_facts
from valora_serve.errors import (
    AdapterError,
    BusyError,
    MissingAdapterError,
    RequestError,
    UnknownModelError,
)
from valora_serve.types import MAX_MIXED, MAX_WEIGHT, ServedModel, short_name

CONTEXT_TASK = "context"  # task of contexts
NAME_LENGTH = 256  # most characters of the name of an adapter or a domain


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedModel:
    """What a name stands for; a request keeps the one that it was prepared with."""

    model: ServedModel  # entry in the list of models
    adapter: Adapter | None = None  # to apply, without its matrices; None for the base model
    head: Head | None = None  # of the domain, None if it generates text
    context: Context | None = None  # that the domain answers about
    encoder: Encoder | None = None  # what an encoder of memory tokens has beside its adapter
    mixed: tuple[tuple[Adapter, float], ...] | None = None  # with weights, instead of `adapter`

    @property
    def terms(self) -> tuple[tuple[Adapter, float], ...]:
        """Adapters to apply, with their weights."""
        if self.mixed is not None:
            return self.mixed
        return () if self.adapter is None else ((self.adapter, 1.0),)

    @property
    def salt(self) -> bytes:
        """Hash of the adapters' content and weights, for keys of caches; empty for the base."""
        terms = self.terms
        if len(terms) == 1 and terms[0][1] == 1:
            return bytes.fromhex(terms[0][0].content)
        told = "|".join(f"{adapter.content}*{weight!r}" for adapter, weight in terms)
        return hashlib.sha256(told.encode()).digest() if terms else b""


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """A bundle or adapter that was read and checked, and cannot be named yet."""

    bundle: str | None  # with its version; None for a plain adapter
    targets: tuple[ResolvedModel, ...]  # adapters before domains
    adapters: Mapping[str, Adapter]  # with matrices, by content hash
    folder: Path
    memories: Mapping[str, Memory] = field(default_factory=dict)  # of contexts, by content hash


class Store:
    """All names that requests can use.

    The adapters of a bundle are named ``bundle/adapter``. Domains have names of their own, which no
    two bundles may share.
    """

    def __init__(
        self,
        base: str,  # name on the hub, or folder, whose name is one, too
        targets: ModelTargets,
        *,
        width: int,  # of its hidden states
        device: torch.device | str = "cpu",  # for heads
        quantize: str | None = None,  # how its weights were quantized
        config: Any = None,  # of its language model; None if it reads no contexts
    ) -> None:
        self.base = base
        self.base_name = Path(base).name if Path(base).is_absolute() else base
        self._targets, self._width, self._device = targets, width, device
        self._quantize, self._config = quantize, config
        self._base_hash: str | None = None
        media = None if {*targets.parts.values()} - {ModelPart.LANGUAGE} else "text"
        now, short = time.time(), self.base_name
        self._base = ResolvedModel(ServedModel(short, "base", base, media=media, loaded_at=now))
        self._named: dict[str, ResolvedModel] = {}

    def base_hash(self) -> str:
        """Return the hash of the base model; BundleError if it has no weights."""
        self._base_hash = self._base_hash or base_hash(self.base)
        return self._base_hash

    def resolve(self, name: str | None) -> ResolvedModel:
        """Return what a name stands for, None for the base model; UnknownModelError if nothing."""
        if name is None or name in (self.base, self.base_name):
            return self._base
        if name not in self._named:
            known = ", ".join([self.base_name, *self._named])
            raise UnknownModelError(f"no model is named {name}: use one of {known}")
        return self._named[name]

    def mix(self, name: str | None, weights: Sequence[tuple[str, float]]) -> ResolvedModel:
        """Return what a request names: a model, or adapters with weights, see `Request`."""
        named = self.resolve(name)
        if not weights:
            return named
        if len(weights) > MAX_MIXED or any(not abs(one) <= MAX_WEIGHT for _, one in weights):
            raise RequestError(f"valora.adapters takes up to {MAX_MIXED} adapters, with weights "
                               f"from {-MAX_WEIGHT:g} to {MAX_WEIGHT:g}")  # fmt: skip
        found = [self.resolve(one) for one, _ in weights]
        if named not in (self._base, found[0]):
            raise RequestError(f"{named.model.name} and valora.adapters: name the base model, or "
                               "the first of the adapters")  # fmt: skip
        terms: dict[str, tuple[Adapter, float]] = {}
        for target, (_, weight) in zip(found, weights, strict=True):
            model, adapter = target.model, target.adapter
            if adapter is None or model.kind != "adapter":
                wrong = f"is no adapter (name {model.adapter or 'one'})"
            elif adapter.vision_content and (weight != 1 or len(weights) > 1):
                wrong = "changes how images are encoded"
            elif model.decode_only != found[0].model.decode_only:
                wrong = f"is not loaded as {found[0].model.name}: one of them is decode_only"
            else:
                before = terms.get(adapter.content, (adapter, 0.0))[1]
                terms[adapter.content] = (adapter, before + weight)
                continue
            raise RequestError(f"{model.name} takes no weight here, as it {wrong}: name it alone")
        mixed = tuple(term for _, term in sorted(terms.items()) if term[1])
        return replace(found[0], adapter=None, mixed=mixed)

    def models(self) -> list[ServedModel]:
        """Return what can be named: the base model, then adapters, then domains."""
        listed = [target.model for target in self._named.values()]
        return [self._base.model, *sorted(listed, key=lambda model: model.kind == "domain")]

    def contexts(self) -> dict[str, Context]:
        """Return the contexts by their names."""
        return {name: one.context for name, one in self._named.items() if one.context is not None}

    def adapters(self) -> dict[str, Adapter]:
        """Return the adapters by name, without matrices, those of bundles before their domains."""
        return {name: one.adapter for name, one in self._named.items() if one.adapter is not None}

    def stage_adapter(self, name: str, folder: Path, *, decode_only: bool = False) -> Staged:
        """Read and check a PEFT folder, without making it nameable; or `AdapterError`."""
        adapter, target = self._adapter(name, folder, decode_only=decode_only)
        return Staged(None, (target,), {adapter.content: adapter}, folder)

    def _adapter(
        self, name: str, folder: Path, *, decode_only: bool, encoder: Encoder | None = None
    ) -> tuple[Adapter, ResolvedModel]:
        """An adapter, and its entry."""
        adapter, head = read_adapter(folder, self._targets), None
        if adapter.score is not None:
            try:
                head = make_classifier(adapter, adapter.score, self._width).to(self._device)
            except (BundleError, ValueError) as error:
                raise AdapterError(
                    f"adapter {folder}: its output layer cannot be used ({error}): serve it with "
                    f"transformers, or correct {MODEL_CONFIG}"
                ) from error
        if decode_only and adapter.vision_content:
            raise AdapterError(
                f"adapter {folder} changes how images are encoded, which decode_only leaves to the "
                "base model: load it without decode_only"
            )
        model = ServedModel(
            name, "adapter", str(folder), parent=self.base_name, adapter=name, rank=adapter.rank,
            head=None if head is None else head.kind, labels=() if head is None else head.labels,
            decode_only=decode_only, encodes=None if encoder is None else len(encoder.queries),
        )  # fmt: skip
        kept = replace(adapter, modules={}, score=None)
        return adapter, ResolvedModel(model, kept, head, encoder=encoder)

    def stage_bundle(self, folder: Path) -> Staged:
        """Read a bundle, verify all its files, and check its adapters and heads, as above."""
        try:
            bundle = read_bundle(folder)
            check_base(bundle, self.base, self.base_hash(), self._quantize)
            return self._stage(bundle)
        except BundleError as error:
            raise AdapterError(str(error)) from error
        except OSError as error:
            raise AdapterError(f"{folder} cannot be read ({error}): copy it again") from error
        except ValueError as error:
            raise AdapterError(f"bundle {folder}: {error}: export it again") from error

    def _stage(self, bundle: Bundle) -> Staged:
        if not bundle.adapters and not bundle.domains:
            raise ValueError("it holds no domain")
        examples = _golden_examples(bundle)
        adapters: dict[str, Adapter] = {}
        listed: dict[str, ResolvedModel] = {}
        targets: list[ResolvedModel] = []
        for short, facts in (*bundle.adapters.items(), *bundle.encoders.items()):
            folder, encoder = bundle.folder / facts["path"], None
            encodes = facts is bundle.encoders.get(short)
            for file in (CONFIG, WEIGHTS, ENCODER_FILE) if encodes else (CONFIG, WEIGHTS):
                _verified(bundle, f"{facts['path']}/{file}")
            if encodes:
                encoder = read_encoder(folder, self._config)
            late = bool(facts.get("decode_only"))
            name = f"{bundle.name}/{short}"
            adapter, target = self._adapter(name, folder, decode_only=late, encoder=encoder)
            adapters[adapter.content] = adapter
            listed.setdefault(short, target)
            targets.append(target)
        memories: dict[str, Memory] = {}
        for name, facts in bundle.domains.items():
            context = None
            if (entry := bundle.contexts.get(name)) is not None:
                context, memory = read_context(
                    name, entry, bundle.folder, self.base_hash(), self._config
                )
                memories |= {} if memory is None else {context.content: memory}
            golden = [one for one in examples if one.get("domain") == name]
            by = listed.get(facts["adapter"], self._base)
            head = self._head(bundle, name, facts, by)
            targets.append(self._domain(name, bundle.folder, facts, by, head, context, golden))
        named = f"{bundle.name}@{bundle.version}"
        return Staged(named, tuple(targets), adapters, bundle.folder, memories)

    def stage_context(self, name: str, folder: Path) -> Staged:
        """Read a context of `contexts.write_context`, without making it nameable; as above."""
        entry, adapter = read_facts(folder)
        context, memory = read_context(name, entry, folder, self.base_hash(), self._config)
        by = self._base if adapter is None else self.adapter_of(name, adapter)
        facts = {"task": CONTEXT_TASK, "prompt": "{}"}
        target = self._domain(name, folder, facts, by, None, context)
        memories = {} if memory is None else {context.content: memory}
        return Staged(None, (target,), {}, folder, memories)

    def adapter_of(self, context: str, name: str) -> ResolvedModel:
        """Return the adapter that answers about a context; MissingAdapterError if there is none."""
        found = self._named.get(name)
        if found is None or found.model.kind != "adapter":
            text = f"context {context} needs adapter {shown(name)}, which is not served: load it"
            raise MissingAdapterError(text, name)
        return found

    def encoder(self, name: str | None) -> ResolvedModel:
        """Return an encoder of memory tokens, ``bundle/encoder``; the only one for None."""
        known = {n: one for n, one in self._named.items() if one.encoder is not None}
        if name is None and len(known) == 1:
            return next(iter(known.values()))
        if name is None or name not in known:
            asked = "no encoder is named" if name is None else f"{shown(name)} is no encoder"
            listed = f"use one of {', '.join(known)}" if known else "load a bundle that has one"
            raise UnknownModelError(f"{asked}: {listed}, or make a prefix")
        return known[name]

    def _head(
        self, bundle: Bundle, name: str, facts: Mapping[str, Any], by: ResolvedModel
    ) -> Head | None:
        if not facts.get("head"):
            return None
        head = read_head(_verified(bundle, facts["head"]), self._width).to(self._device)
        labels = tuple(facts.get("labels") or head.labels)
        if head.labels != labels:
            raise ValueError(f"domain {name} has labels {shown(labels)}, not {head.labels}")
        head = head.configured(facts)
        if by.model.decode_only and head.reads_visual:
            raise ValueError(f"the head of {name} reads images, which decode_only forbids")
        return head

    def _domain(
        self, name: str, folder: Path, facts: Mapping[str, Any], by: ResolvedModel,
        head: Head | None, context: Context | None, golden: Sequence[dict[str, Any]] = (),
    ) -> ResolvedModel:  # fmt: skip
        """A domain by its facts in a manifest; `by` is the adapter or base model that answers."""
        rests = (one.get("rest") for one in golden if facts.get("media") != "text")
        counts = {1 + len(rest) if isinstance(rest, list) else 1 for rest in rests}
        accuracy = facts.get("accuracy") or {}
        same = ("task", "metric", "required", "prompt", "media", "max_tokens")
        taken: dict[str, Any] = {key: facts.get(key) for key in same}
        if context is not None:
            taken |= {
                "form": context.form,
                "memory_tokens": context.tokens,
                "memory_bytes": context.bytes,
                "source_tokens": context.source_tokens,
            }
        model = ServedModel(
            name, "domain", str(folder), by.model.name, by.model.adapter,
            rank=by.model.rank, decode_only=by.model.decode_only,
            head=None if head is None else head.kind,
            boxes=head is not None and head.finds_boxes,
            labels=tuple(facts.get("labels") or ()) if head is None else head.labels,
            accuracy=accuracy.get("test"), teacher=accuracy.get("teacher"),
            prompted="{}" in str(facts.get("prompt")) or any("question" in one for one in golden),
            images=counts.pop() if len(counts) == 1 else None, **taken,
        )  # fmt: skip
        return ResolvedModel(model, by.adapter, head, context)

    def check(self, staged: Staged) -> frozenset[str]:
        """Return the names that it replaces, of its own name; or `AdapterError`, if of another."""
        names, owner = [target.model.name for target in staged.targets], short_name(staged.bundle)
        replaced = frozenset(
            name for name in (self._named if owner else names) if self._owner(name) == owner
        )
        for name in names:
            plain = name and name == name.strip() and name.isprintable()
            if not plain or len(name) > NAME_LENGTH:
                text = f"{shown(name)} is no name: use {NAME_LENGTH} visible characters"
                raise AdapterError(text)
            if name in (self.base, self.base_name):
                raise AdapterError(f"{name} is the base model's name: choose another one")
            if names.count(name) > 1 or (name in self._named and name not in replaced):
                raise AdapterError(f"{staged.folder} brings {name}, which is taken: rename it")
        return replaced

    def commit(self, staged: Staged) -> list[ServedModel]:
        """Make what was staged nameable; AdapterError, and nothing has changed, as for `check`."""
        replaced = self.check(staged)
        facts: dict[str, Any] = {"bundle": staged.bundle, "loaded_at": time.time()}
        new = [replace(one, model=replace(one.model, **facts)) for one in staged.targets]
        kept = {name: target for name, target in self._named.items() if name not in replaced}
        self._named = kept | {target.model.name: target for target in new}
        return [target.model for target in new]

    def unregister(self, kind: str, name: str) -> None:
        """Forget an ``adapter``, ``bundle`` (or NAME@VERSION) or ``context``.

        A `BusyError` says that an adapter or a context belongs to a bundle.
        """
        owners = {key: one.model.bundle for key, one in self._named.items()}
        if kind == "bundle":
            names = {key for key, own in owners.items() if own and name in (own, short_name(own))}
            known = [short_name(owner) for owner in owners.values() if owner]
        else:
            known = [key for key, one in self._named.items()
                     if (one.model.kind == kind if kind == "adapter" else one.context)]  # fmt: skip
            names = {name} & {*known}
            if names and (owner := self._owner(name)):
                raise BusyError(f"{kind} {name} belongs to bundle {owner}: unload that")
        if not names:
            others = ", ".join(dict.fromkeys(known)) or "none"
            raise UnknownModelError(f"no {kind} is named {shown(name)[1:-1]}: known are {others}")
        # A new dict, as other threads may be iterating over the old one.
        self._named = {key: one for key, one in self._named.items() if key not in names}

    def _owner(self, name: str) -> str:
        """Return the bundle that an adapter or domain belongs to; empty if it is none's."""
        one = self._named.get(name)
        return short_name(one.model.bundle) if one else ""


def _golden_examples(bundle: Bundle) -> list[dict[str, Any]]:
    try:
        listed = read_json(bundle.folder / GOLDEN)
    except BundleError:
        return []  # the replay of the examples says what is wrong
    return [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []


def _verified(bundle: Bundle, name: str) -> Path:
    """Return the path of a file, if the bundle's manifest has its sha256."""
    if name not in bundle.manifest["files"]:
        raise ValueError(f"it uses {shown(name)}, but its manifest has no sha256 of it")
    return bundle.folder / name
