"""Base models and bundles on disk: the contract between the factory and the runtime."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valora_data.errors import BundleError

TINY = "tiny"
MANIFEST = "bundle.json"
SCHEMA_VERSION = 1


def base_folder(base: str) -> str:
    """The folder, or the hub name, that a base model's id stands for.

    Args:
        base: ``tiny`` (shipped with the project), a folder, or a name on the hub.

    Raises:
        BundleError: If it looks like a folder that does not hold a model.
    """
    if base == TINY:
        return str(Path(__file__).parents[1] / "tiny")
    path = Path(base).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BundleError(f"{base} holds no config.json: name a folder with a saved model")
        return str(path)
    if base.startswith((".", "/", "~")):
        raise BundleError(f"base model folder {base} does not exist: check the path")
    return base


def base_hash(base: str) -> str:
    """Hash of a base model's weights and configuration.

    Args:
        base: As in `base_folder`; a hub name must be in the local cache.

    Returns:
        sha256 over config.json and every safetensors file by name, in hexadecimal.

    Raises:
        BundleError: If no weights are found.
    """
    folder = Path(base_folder(base))
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(base, allow_patterns=["*.json", "*.safetensors"]))
    files = sorted(folder.glob("*.safetensors"))
    weights = [file for file in files if file.name.startswith("model")]
    if not weights:
        raise BundleError(f"{base} holds no model*.safetensors: save the model as safetensors")
    total = hashlib.sha256()
    for file in [folder / "config.json", *weights]:
        total.update(file.name.encode())
        total.update(file_hash(file).encode())
    return total.hexdigest()


def file_hash(path: Path) -> str:
    """sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read and found whole.

    Attributes:
        folder: Where it is.
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
        """What is promised, by domain."""
        return dict(self.manifest["domains"])

    @property
    def adapters(self) -> dict[str, dict[str, Any]]:
        """Adapters, by name."""
        return dict(self.manifest["adapters"])


def read_bundle(folder: Path) -> Bundle:
    """Read a bundle and verify every file of it.

    Args:
        folder: The bundle.

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


def check_base(bundle: Bundle, base: str, actual: str | None = None) -> None:
    """Make sure that a bundle goes onto the base model that it was made for.

    Args:
        bundle: The bundle.
        base: As in `base_folder`.
        actual: `base_hash` of it, if that is known already.

    Raises:
        BundleError: If the weights of `base` are others.
    """
    wanted = bundle.manifest["base"]
    actual = actual or base_hash(base)
    if actual != wanted["sha256"]:
        raise BundleError(
            f"bundle {bundle.folder} was made for base model {wanted['id']} "
            f"({wanted['sha256'][:12]}), got {base} ({actual[:12]}): use that base model, or fuse "
            "again onto this one"
        )


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
