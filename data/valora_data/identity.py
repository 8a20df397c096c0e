"""Content hashes of what is no data file: code, models, and repositories of the hub."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from valora_data.contract.files import expanded
from valora_data.hashing import hash_files, hash_path

OURS = {"valora_data", "valora_teachers", "valora_train", "valora_serve", "valora_kernels"}
"""Packages whose changes are told by the versions of the stages that use them."""
HUB_SECONDS = 5.0  # longest wait for the hub's answer


def place_hash(place: str | Path, cache: Path | None = None) -> str:
    """Hash a file or folder (see `hash_path`); of a model on the hub, its commit; else empty."""
    path = expanded(place)
    return hash_path(path, cache) if path.exists() else hub_commit(str(place))


def hub_commit(name: str, kind: Literal["model", "dataset"] = "model") -> str:
    """The commit of a repository on the hub; offline, that of the local cache; empty if unknown."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return ""
    if not constants.HF_HUB_OFFLINE:
        with suppress(Exception):  # network, access, name: loading says what is wrong
            if sha := HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS).sha:
                return sha
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    try:
        return (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def code_hash(module: str) -> str:
    """Hash the sources of a module's package, or beside a module in none, and files that it names.

    Our own modules, which have versions, and missing ones have no hash.
    """
    top = module.partition(".")[0]
    if top in OURS or top in sys.stdlib_module_names:
        return ""
    try:
        spec, package = importlib.util.find_spec(module), importlib.util.find_spec(top)
    except (ImportError, AttributeError, ValueError):
        return ""
    if spec is None or package is None or not spec.has_location or not spec.origin:
        return ""
    folders = package.submodule_search_locations
    sources = {path for folder in folders or () for path in Path(folder).rglob("*.py")}
    sources |= set() if folders else {*Path(spec.origin).parent.glob("*.py")}
    return hash_files({*sources, *_named_files(Path(spec.origin))}, Path(spec.origin).parent)


def _named_files(module: Path) -> Iterator[Path]:
    with suppress(OSError, SyntaxError, ValueError):
        texts = [getattr(node, "value", None) for node in ast.walk(ast.parse(module.read_bytes()))]
        for text in texts:
            if isinstance(text, str) and 0 < len(text) < 4096 and not {"\n", "\0"} & {*text}:
                for path in (expanded(text), module.parent / text):
                    with suppress(OSError, RuntimeError):
                        if path.is_file():
                            yield path
