"""Bundles on disk: what training hands over to serving."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valora_data.contract.contexts import ContextEntry, context_entry
from valora_data.contract.files import UnreadableError, open_regular, read_json, shown
from valora_data.errors import BundleError

MANIFEST = "bundle.json"
GOLDEN = "golden/golden.json"
"""File of a bundle's golden examples, relative to its folder."""
NF4 = "nf4"
"""How the weights of a base model can be rounded, see `valora_data.contract.quantized`."""
SCHEMA_VERSION = 2
"""Version of the format. Since 2, the adapter of a domain may be null, and a bundle may have no
adapter at all."""
WITH_CONTEXTS = 3
"""Version of bundles with contexts, which earlier servers would ignore."""
READABLE = (1, 2, 3)
"""The versions that are read."""
FILE_BYTES = 16 << 30
"""Most bytes of a file of a bundle."""
MOST_FILES = 10_000
"""Most files of a bundle."""
PROMPT_LENGTH = 32_768
"""Most characters of a domain's prompt, which every request without text is sent with."""

_NAMES = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}


def file_hash(path: Path) -> str:
    """sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A bundle whose files were read and verified.

    Attributes:
        folder: Folder of the bundle.
        manifest: Content of ``bundle.json``.
    """

    folder: Path
    manifest: dict[str, Any]

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
        return {name: context_entry(facts, "") for name, facts in found.items()}

    @property
    def encoders(self) -> dict[str, dict[str, Any]]:
        """Encoders of memory tokens, by name."""
        return dict(self.manifest.get("encoders") or {})


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and verify all its files.

    Args:
        folder: Folder of the bundle.

    Raises:
        BundleError: If it is no bundle, of a schema that is not known, or was changed since it
            was exported.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        _verify(folder, name, expected)
    return Bundle(folder, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read ``bundle.json`` and check that every entry has the type that readers rely on.

    Args:
        folder: Folder of the bundle.

    Raises:
        BundleError: It is no bundle, of a schema that is not known, or an entry is wrong.
    """
    try:
        manifest = read_json(folder / MANIFEST)
    except UnreadableError as error:
        raise BundleError(
            f"{folder} is no bundle: it holds no readable {MANIFEST}, as that {error.reason}; name "
            "a folder that make fuse exported"
        ) from error
    if not isinstance(manifest, dict):
        raise BundleError(f"bundle {folder}: its manifest is damaged: export it again")
    version = manifest.get("schema_version")
    if isinstance(version, bool) or version not in READABLE:
        raise BundleError(
            f"bundle {folder} has schema version {shown(version)}, expected at most "
            f"{WITH_CONTEXTS}: export it again with this version of VaLoRA"
        )
    try:
        _check(manifest)
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"bundle {folder}: its manifest is damaged ({error}): export it again"
        ) from error
    return manifest


def _verify(folder: Path, name: str, expected: str) -> None:
    """Check that a file is inside the bundle and has the hash that the manifest says."""
    file = folder / name
    try:
        inside = file.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError, RuntimeError):  # a name too long, with a null, a circle of links
        inside = False
    if not inside:
        raise BundleError(
            f"bundle {folder} names {shown(name)}, which lies outside of it: export it again"
        )
    try:
        with open_regular(file, FILE_BYTES) as opened:
            same = hashlib.file_digest(opened, "sha256").hexdigest() == expected
    except (UnreadableError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise BundleError(
            f"file {name} of bundle {folder} is missing or was changed, as it {reason}: export it "
            "again"
        ) from error
    if not same:
        raise BundleError(f"file {name} of bundle {folder} was changed: export it again")


def _check(manifest: dict[str, Any]) -> None:
    """Check the types of the entries.

    Raises:
        TypeError: One has another type; the message names it.
        ValueError: One has an impossible value; the message names it.
    """
    _entries(manifest, "", {"files": dict, "name": str, "base": dict, "domains": dict})
    _entries(manifest, "", {"adapters": dict, "version": int})
    if not (name := manifest["name"]).strip() or {"@", "/"} & set(name):
        raise ValueError(f"name: expected a name without @ and /, got {shown(name)}")
    if manifest["version"] < 1:
        raise ValueError(f"version: expected 1 or more, got {manifest['version']}")
    if len(manifest["files"]) > MOST_FILES:
        raise ValueError(f"files: expected at most {MOST_FILES}, got {len(manifest['files'])}")
    _entries(manifest["base"], "base.", {"id": str, "sha256": str})
    if (rounded := manifest["base"].get("quantize")) not in (None, NF4):
        raise ValueError(f"base.quantize: expected {NF4} or nothing, got {shown(rounded)}")
    for file in manifest["files"]:
        _entries(manifest["files"], "files.", {file: str})
    for name in manifest["adapters"]:
        _entries(manifest["adapters"], "adapters.", {name: dict})
        _entries(manifest["adapters"][name], f"adapters.{shown(name)}.", {"path": str})
    for name in manifest["domains"]:
        _entries(manifest["domains"], "domains.", {name: dict})
        facts = manifest["domains"][name]
        _check_domain(facts, f"domains.{shown(name)}.")
        if facts.get("adapter", "") is None and manifest["schema_version"] > 1:
            continue  # the base model answers
        _entries(facts, f"domains.{shown(name)}.", {"adapter": str})
        if facts["adapter"] not in manifest["adapters"]:
            by = shown(facts["adapter"])
            raise ValueError(f"domains.{shown(name)}.adapter: expected an adapter, got {by}")
    _check_contexts(manifest)


def _check_contexts(manifest: dict[str, Any]) -> None:
    """Check contexts and encoders: that they fit together, and that their files have hashes."""
    _entries(manifest, "", {"contexts": dict, "encoders": dict}, needed=False)
    contexts, encoders = manifest.get("contexts") or {}, manifest.get("encoders") or {}
    if contexts and manifest["schema_version"] < WITH_CONTEXTS:
        raise ValueError(f"schema_version: expected {WITH_CONTEXTS} of a bundle with contexts")
    for name, facts in manifest["adapters"].items():
        if not isinstance(facts.get("decode_only", False), bool):
            raise TypeError(f"adapters.{shown(name)}.decode_only: expected true or false")
    for name in encoders:
        _entries(encoders, "encoders.", {name: dict})
        _entries(encoders[name], f"encoders.{shown(name)}.", {"path": str, "tokens": int})
    for name in contexts:
        _entries(contexts, "contexts.", {name: dict})
        place = f"contexts.{shown(name)}."
        entry = context_entry(contexts[name], place)
        domain = manifest["domains"].get(name)
        if domain is None:
            raise ValueError(f"{place[:-1]}: expected a domain of the same name")
        if entry.file is None and domain.get("adapter") is None:
            raise ValueError(f"{place}form: expected an adapter in domains.{shown(name)}")
        if entry.file is not None and entry.file not in manifest["files"]:
            raise ValueError(f"{place}file: expected a sha256 of {shown(entry.file)} in files")
        if entry.encoder is not None and entry.encoder not in encoders:
            raise ValueError(f"{place}encoder: expected an encoder, got {shown(entry.encoder)}")


def _check_domain(facts: dict[str, Any], place: str) -> None:
    texts = dict.fromkeys(("head", "task", "metric", "prompt", "media"), str)
    others = {"accuracy": dict, "labels": list, "max_tokens": int}
    _entries(facts, place, {**texts, **others}, needed=False)
    if (most := facts.get("max_tokens")) is not None and most < 1:
        raise ValueError(f"{place}max_tokens: expected 1 or more, got {most}")
    for label in facts.get("labels") or ():
        if not isinstance(label, str):
            raise TypeError(f"{place}labels: expected texts, got {shown(label)}")
    if len(facts.get("prompt") or "") > PROMPT_LENGTH:
        raise ValueError(f"{place}prompt: expected at most {PROMPT_LENGTH} characters")
    accuracy = facts.get("accuracy") or {}
    for name, value in (
        ("accuracy.test", accuracy.get("test")),
        ("accuracy.teacher", accuracy.get("teacher")),
        ("required", facts.get("required")),
        ("threshold", facts.get("threshold")),
    ):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and math.isfinite(value)):
            raise ValueError(f"{place}{name}: expected a number, got {shown(value)}")


def _entries(
    found: dict[str, Any], place: str, types: dict[str, type], *, needed: bool = True
) -> None:
    """Check that an object has entries of these types; None counts as absent."""
    for name, wanted in types.items():
        value = found.get(name)
        if value is None and not needed:
            continue
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise TypeError(
                f"{place}{name}: expected {_NAMES[wanted]}, got {shown(value)}"
                if name in found
                else f"it lacks '{place}{name}'"
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
