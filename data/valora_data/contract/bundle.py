"""Bundles on disk: what training hands over to serving."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valora_data.errors import BundleError

MANIFEST = "bundle.json"
GOLDEN = "golden/golden.json"
"""File of a bundle's golden examples, relative to its folder."""
SCHEMA_VERSION = 1


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


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and verify all its files.

    Args:
        folder: Folder of the bundle.

    Raises:
        BundleError: If it is no bundle, of a schema that is not known, or was changed since it
            was exported.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder} is no bundle: it holds no readable {MANIFEST}") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise BundleError(
            f"bundle {folder} has schema version {manifest.get('schema_version')}, expected "
            f"{SCHEMA_VERSION}: export it again with this version of VaLoRA"
        )
    for name, expected in manifest["files"].items():
        file = folder / name
        if not file.resolve().is_relative_to(folder.resolve()):
            raise BundleError(f"bundle {folder} names {name}, which lies outside of it: refuse it")
        if not file.is_file() or file_hash(file) != expected:
            raise BundleError(
                f"file {name} of bundle {folder} is missing or was changed: export it again"
            )
    return Bundle(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Complete a bundle: hash every file in it and write ``bundle.json``."""
    files = {
        file.relative_to(folder).as_posix(): file_hash(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    content = {"schema_version": SCHEMA_VERSION, **manifest, "files": files}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
