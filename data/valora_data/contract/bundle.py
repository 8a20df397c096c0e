"""Bundles on disk: what training hands over to serving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from valora_data.contract.base_model import base_hash, file_hash
from valora_data.contract.contexts import ContextEntry, context_entry
from valora_data.contract.files import (
    UnreadableError,
    expect,
    first_fault,
    open_regular,
    read_json,
    shown,
)
from valora_data.errors import BundleError

MANIFEST = "bundle.json"
GOLDEN = "golden/golden.json"  # golden examples, relative to the bundle's folder
# Versions of the format. Since 2, the adapter of a domain may be null, and a bundle may have no
# adapter at all; 3 is that of bundles with contexts, which earlier servers would ignore.
READABLE = FIRST, SCHEMA_VERSION, WITH_CONTEXTS = (1, 2, 3)
FILE_BYTES = 16 << 30  # most of a file of a bundle
MAX_FILES = 10_000
PROMPT_LENGTH = 32_768  # most characters of a domain's prompt
Figure = Annotated[float, Field(allow_inf_nan=False)] | None


class _Part(BaseModel):
    """A part of a manifest that readers rely on; docs/bundle.md says what it means."""

    model_config = ConfigDict(strict=True)


class _Base(_Part):
    id: str
    sha256: str
    quantize: Literal["nf4"] | None = None


class _Adapter(_Part):
    path: str
    decode_only: bool | None = None


class _Accuracy(_Part):
    test: Figure = None
    teacher: Figure = None


class _Domain(_Part):
    adapter: str | None  # None where the base model answers
    head: str | None = None
    task: str | None = None
    metric: str | None = None
    prompt: Annotated[str, Field(max_length=PROMPT_LENGTH)] | None = None
    media: str | None = None
    labels: list[str] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    required: Figure = None
    threshold: Figure = None
    accuracy: _Accuracy | None = None


class _Encoder(_Part):
    path: str
    tokens: int


class _Manifest(_Part):
    schema_version: int
    files: Annotated[dict[str, str], Field(max_length=MAX_FILES)]
    name: Annotated[str, Field(pattern=r"^[^@/]*[^@/\s][^@/]*$")]
    version: Annotated[int, Field(ge=1)]
    base: _Base
    adapters: dict[str, _Adapter]
    domains: dict[str, _Domain]
    contexts: dict[str, ContextEntry] | None = None
    encoders: dict[str, _Encoder] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check that the entries fit together; a `ValueError` names one that does not."""
        for domain, facts in self.domains.items():
            if facts.adapter is not None or self.schema_version == FIRST:
                place = f"domains.{shown(domain)}.adapter"
                expect(facts.adapter in self.adapters, place, "an adapter", facts.adapter)
        contexts, version = self.contexts or {}, self.schema_version
        expect(not contexts or version >= WITH_CONTEXTS, "schema_version", "3", version)
        for context, entry in contexts.items():
            place = f"contexts.{shown(context)}"
            expect(context in self.domains, place, "a domain of the same name", None)
            if entry.file is None:
                by = self.domains[context].adapter
                expect(by, f"{place}.form", "an adapter of its domain", by)
            else:
                expect(entry.file in self.files, f"{place}.file", "one with a sha256", entry.file)
            known = entry.encoder is None or entry.encoder in (self.encoders or {})
            expect(known, f"{place}.encoder", "an encoder", entry.encoder)
        return self


@dataclass
class Bundle:
    """A bundle whose files were read and verified; its parts in the manifest by their names."""

    folder: Path
    manifest: dict[str, Any]  # content of ``bundle.json``

    def __post_init__(self) -> None:
        found = self.manifest
        self.name: str = found["name"]
        self.version: int = found["version"]  # from 1
        self.domains: dict[str, dict[str, Any]] = found["domains"]
        self.adapters: dict[str, dict[str, Any]] = found["adapters"]
        self.encoders: dict[str, dict[str, Any]] = found.get("encoders") or {}
        contexts = found.get("contexts") or {}
        self.contexts = {name: context_entry(facts) for name, facts in contexts.items()}


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and verify all its files.

    Raises:
        BundleError: If it is no bundle, of an unknown schema, or was changed since its export.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        try:
            _verify(folder, name, expected)
        except (UnreadableError, OSError) as error:
            raise BundleError(
                f"file {shown(name)} of bundle {folder} is missing or was changed, as it "
                f"{getattr(error, 'reason', error)}: export it again"
            ) from error
    return Bundle(folder, manifest)


def _verify(folder: Path, name: str, expected: str) -> None:
    file = folder / name
    try:
        inside = file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a name too long, with a null, a circle of links
        inside = False
    if not inside:
        raise UnreadableError("lies outside of it", file)
    with open_regular(file, FILE_BYTES) as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != expected:
            raise UnreadableError("has another sha256", file)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``bundle.json`` and check every entry that readers rely on, see `read_bundle`."""
    try:
        manifest = read_json(folder / MANIFEST)
    except UnreadableError as error:
        raise BundleError(
            f"{folder} is no bundle: it holds no readable {MANIFEST}, as that {error.reason}; name "
            "a folder that make fuse exported"
        ) from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else FIRST
    if isinstance(version, bool) or version not in READABLE:
        raise BundleError(
            f"bundle {folder} has schema version {shown(version)}, expected at most "
            f"{WITH_CONTEXTS}: export it again with this version of VaLoRA"
        )
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        what = f"bundle {folder}: its manifest is damaged ({first_fault(error)}): export it again"
        raise BundleError(what) from error
    return dict(manifest)


def check_base(
    bundle: Bundle, base: str, actual: str | None = None, quantize: str | None = None
) -> None:
    """Check that a bundle was made for a base model, and on weights that are rounded alike.

    `actual` is the `base_hash` of `base` if it is known already.
    """
    wanted, actual = bundle.manifest["base"], actual or base_hash(base)
    if actual != wanted["sha256"]:
        raise BundleError(
            f"bundle {bundle.folder} was made for base model {wanted['id']} "
            f"({wanted['sha256'][:12]}), got {base} ({actual[:12]}): use that base model, or fuse "
            "again onto this one"
        )
    if wanted.get("quantize") != quantize:
        trained_on = wanted.get("quantize") or "none"
        raise BundleError(
            f"bundle {bundle.folder} was trained on a base model with quantize={trained_on}, but "
            f"this one has {quantize or 'none'}, with which it would answer differently: use "
            f"valora-serve --quantize {trained_on}, or fuse again"
        )


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Complete a bundle: hash every file in it and write ``bundle.json``."""
    files = {
        file.relative_to(folder).as_posix(): file_hash(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    version = WITH_CONTEXTS if manifest.get("contexts") else SCHEMA_VERSION
    content = {"schema_version": version, **manifest, "files": files}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
