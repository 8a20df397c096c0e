"""Bundles on disk: what training hands over to serving."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valora_data.contract.base_model import base_hash
from valora_data.contract.files import UnreadableError, first_fault, open_regular, read_json, shown
from valora_data.errors import BundleError
from valora_data.hashing import file_hash

MANIFEST = "bundle.json"
GOLDEN = "golden/golden.json"  # golden examples, relative to the bundle's folder
FILE_BYTES = 16 << 30  # most of a file of a bundle


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
        from valora_data.contract.manifest import context_entry

        contexts = found.get("contexts") or {}
        self.contexts = {name: context_entry(facts) for name, facts in contexts.items()}


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and verify all its files; a `BundleError` if they are not as exported."""
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
    from valora_data.contract.manifest import FIRST, READABLE, WITH_CONTEXTS, Manifest

    try:
        manifest = read_json(folder / MANIFEST)
    except UnreadableError as error:
        text = f"{folder} is no bundle: it holds no readable {MANIFEST}, as that {error.reason}"
        raise BundleError(f"{text}; name a folder that make fuse exported") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else FIRST
    if isinstance(version, bool) or version not in READABLE:
        text = f"bundle {folder} has schema version {shown(version)}, expected at most"
        raise BundleError(f"{text} {WITH_CONTEXTS}: export it again with this version of VaLoRA")
    try:
        Manifest.model_validate(manifest)
    except ValueError as error:  # pydantic's
        what = f"bundle {folder}: its manifest is damaged ({first_fault(error)}): export it again"
        raise BundleError(what) from error
    return dict(manifest)


def check_base(
    bundle: Bundle, base: str, actual: str | None = None, quantize: str | None = None
) -> None:
    """Check that a bundle fits a base model (with this `base_hash`), quantized as in training."""
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
    from valora_data.contract.manifest import SCHEMA_VERSION, WITH_CONTEXTS

    files = {
        file.relative_to(folder).as_posix(): file_hash(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    version = WITH_CONTEXTS if manifest.get("contexts") else SCHEMA_VERSION
    content = {"schema_version": version, **manifest, "files": files}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
