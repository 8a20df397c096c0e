"""Content hashes of what is no data file: code, models, and repositories of the hub."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from valora_data.contract.files import expanded
from valora_data.hashing import hash_files, hash_path

OURS = {"valora_data", "valora_teachers", "valora_train", "valora_serve", "valora_kernels"}
"""Packages whose changes are told by the versions of the stages that use them."""
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
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
    """Hash a module, the local modules that it imports, and files they name; empty for ours."""
    top = module.partition(".")[0]
    sources, named, waiting, seen = set[Path](), set[Path](), [module], set[str]()
    while waiting:
        name = waiting.pop()
        file = None if name in seen else _source(name, top)
        seen.add(name)
        if file is None or file in sources:
            continue
        sources.add(file)
        with suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse(file.read_bytes())
            named.update(_named_files(tree, file.parent))
            waiting += _imports(tree, name, file)
    return hash_files(sources | named, min(sources).parent) if sources else ""


def _source(name: str, top: str) -> Path | None:
    """The file of a local module; None for others."""
    first = name.partition(".")[0]
    if first in OURS or first in sys.stdlib_module_names:
        return None
    try:
        if first != top and not _is_local(first):
            return None
        if origin := getattr(sys.modules.get(name), "__file__", None):
            return Path(origin)
        spec = importlib.util.find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


def _is_local(package: str) -> bool:
    """Whether a package lies outside the folders of installed packages."""
    spec = importlib.util.find_spec(package)
    places = [*(spec.submodule_search_locations or ()), spec.origin] if spec else []
    found = [Path(place) for place in places if place]
    return bool(found) and not any(
        place.is_relative_to(folder) for place in found for folder in INSTALLED
    )


def _imports(tree: ast.Module, name: str, file: Path) -> Iterator[str]:
    """Names of modules, or of their attributes, that a module imports."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            parts = parts[: len(parts) - node.level + 1]
            base = ".".join([*parts, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _named_files(tree: ast.Module, folder: Path) -> Iterator[Path]:
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    for text in texts:
        if isinstance(text, str) and 0 < len(text) < 4096 and not {"\n", "\0"} & {*text}:
            for path in (expanded(text), folder / text):
                with suppress(OSError, RuntimeError):
                    if path.is_file():
                        yield path
