"""Bundles on disk: what training hands over to serving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valora_data.contract.base_model import base_hash, file_hash
from valora_data.contract.contexts import CONTEXT, ContextEntry, context_entry
from valora_data.contract.files import (
    UnreadableError,
    check_form,
    expect,
    open_regular,
    read_json,
    shown,
)
from valora_data.contract.quantized import NF4
from valora_data.errors import BundleError

MANIFEST = "bundle.json"
GOLDEN = "golden/golden.json"  # golden examples, relative to the bundle's folder
# Versions of the format. Since 2, the adapter of a domain may be null, and a bundle may have no
# adapter at all; 3 is that of bundles with contexts, which earlier servers would ignore.
READABLE = FIRST, SCHEMA_VERSION, WITH_CONTEXTS = (1, 2, 3)
FILE_BYTES = 16 << 30  # most of a file of a bundle
MAX_FILES = 10_000
PROMPT_LENGTH = 32_768  # most characters of a domain's prompt
# What readers rely on in a manifest, see `check_form`; docs/bundle.md says what it means.
FORM = {
    "files": {"*": str},
    "name": str,
    "version": int,
    "base": {"id": str, "sha256": str, "quantize?": str},
    "adapters": {"*": {"path": str, "decode_only?": bool}},
    "domains": {"*": {
        "head?": str, "task?": str, "metric?": str, "prompt?": str, "media?": str, "labels?": [str],
        "max_tokens?": int, "required?": float, "threshold?": float,
        "accuracy?": {"test?": float, "teacher?": float},
    }},
    "contexts?": {"*": CONTEXT},
    "encoders?": {"*": {"path": str, "tokens": int}},
}  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were read and verified."""

    folder: Path
    manifest: dict[str, Any]  # content of ``bundle.json``

    @property
    def name(self) -> str:
        """Name of the bundle."""
        return str(self.manifest["name"])

    @property
    def version(self) -> int:
        """Version, from 1."""
        return int(self.manifest["version"])

    @property
    def domains(self) -> dict[str, dict[str, Any]]:
        """Entry of each domain in the manifest, with its promised accuracy, by name."""
        return dict(self.manifest["domains"])

    @property
    def adapters(self) -> dict[str, dict[str, Any]]:
        """Adapters, by name."""
        return dict(self.manifest["adapters"])

    @property
    def contexts(self) -> dict[str, ContextEntry]:
        """Contexts, by the name of the domain that answers about them."""
        found = self.manifest.get("contexts") or {}
        return {name: context_entry(facts, name) for name, facts in found.items()}

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """Encoders of memory tokens, by name."""
        return dict(self.manifest.get("encoders") or {})


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
    try:
        check_form(manifest, {}, MANIFEST)
        version = manifest.get("schema_version")
        if isinstance(version, bool) or version not in READABLE:
            raise BundleError(
                f"bundle {folder} has schema version {shown(version)}, expected at most "
                f"{WITH_CONTEXTS}: export it again with this version of VaLoRA"
            )
        check_form(manifest, FORM)
        _check_values(manifest)
    except (TypeError, ValueError) as error:
        what = f"bundle {folder}: its manifest is damaged ({error}): export it again"
        raise BundleError(what) from error
    return dict(manifest)


def _check_values(manifest: dict[str, Any]) -> None:
    """Check that the entries of a manifest fit together; a `ValueError` names one that does not."""
    name, version, base = manifest["name"], manifest["schema_version"], manifest["base"]
    adapters, domains, files = manifest["adapters"], manifest["domains"], manifest["files"]
    contexts, encoders = manifest.get("contexts") or {}, manifest.get("encoders") or {}
    quantize = base.get("quantize")
    expect(name.strip() and not {"@", "/"} & set(name), "name", "a name without @ and /", name)
    expect(manifest["version"] >= 1, "version", "1 or more", manifest["version"])
    expect(len(files) <= MAX_FILES, "files", f"at most {MAX_FILES}", len(files))
    expect(quantize in (None, NF4), "base.quantize", f"{NF4} or nothing", quantize)
    for domain, facts in domains.items():
        place, most = f"domains.{shown(domain)}", facts.get("max_tokens")
        expect(most is None or most >= 1, f"{place}.max_tokens", "1 or more", most)
        length = len(facts.get("prompt") or "")
        expect(length <= PROMPT_LENGTH, f"{place}.prompt", f"at most {PROMPT_LENGTH}", length)
        if facts.get("adapter", "") is not None or version == FIRST:  # else the base model answers
            check_form(facts, {"adapter": str}, place)
            by = facts["adapter"]
            expect(by in adapters, f"{place}.adapter", "an adapter", by)
    expect(not contexts or version >= WITH_CONTEXTS, "schema_version", str(WITH_CONTEXTS), version)
    for context, facts in contexts.items():
        place = f"contexts.{shown(context)}"
        entry = context_entry(facts, place)
        expect(context in domains, place, "a domain of the same name", None)
        if entry.file is None:
            by = domains[context]["adapter"]
            expect(by, f"{place}.form", "an adapter of its domain", by)
        else:
            expect(entry.file in files, f"{place}.file", "a file with a sha256", entry.file)
        known = entry.encoder is None or entry.encoder in encoders
        expect(known, f"{place}.encoder", "an encoder", entry.encoder)


def check_base(
    bundle: Bundle, base: str, actual: str | None = None, quantize: str | None = None
) -> None:
    """Check that a bundle was made for a base model, and on weights that are rounded alike.

    `base` is as in `base_folder`, `actual` its `base_hash` if that is known already, and `quantize`
    how its weights are rounded, None if they are not.
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
