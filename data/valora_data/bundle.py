"""Base models and bundles on disk: the contract between the factory and the runtime."""

from __future__ import annotations

import hashlib
from pathlib import Path

from valora_data.errors import BundleError

TINY = "tiny"


def base_folder(base: str) -> str:
    """The folder, or the hub name, that a base model's id stands for.

    Args:
        base: ``tiny`` (shipped with the project), a folder, or a name on the hub.

    Raises:
        BundleError: If it looks like a folder that does not hold a model.
    """
    if base == TINY:
        return str(Path(__file__).parent / "tiny")
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
