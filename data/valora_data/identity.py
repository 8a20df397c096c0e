"""Content hashes of what is no data file: code, models, and repositories of the hub."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from valora_data.contract.files import expanded
from valora_data.hashing import hash_files, hash_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec

OURS = frozenset(
    {"valora_data", "valora_teachers", "valora_train", "valora_serve", "valora_kernels"}
)
"""Packages whose changes are told by the versions of the stages that use them."""
HUB_SECONDS = 5.0
"""Longest wait for the hub's answer."""


def place_hash(place: str | Path, cache: Path | None = None) -> str:
    """Hash what a file, a folder or the name of a model on the hub holds.

    Args:
        place: The file, the folder or the name.
        cache: As in `hash_files`.

    Returns:
        The hash of the content; for a name its commit; empty if there is no such thing, which
        loading it reports.

    Raises:
        OSError: A file cannot be read.
    """
    path = expanded(place)
    return hash_path(path, cache) if path.exists() else hub_commit(str(place))


def hub_commit(name: str, kind: Literal["model", "dataset"] = "model") -> str:
    """The commit of a repository on the hub; offline, that of the local cache; empty if unknown."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return ""
    if not constants.HF_HUB_OFFLINE:
        try:
            sha = HfApi().repo_info(name, repo_type=kind, timeout=HUB_SECONDS).sha
        except Exception:  # noqa: BLE001 (network, access, name: loading says what is wrong)
            sha = None
        if sha:
            return sha
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    try:
        return (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def code_hash(module: str) -> str:
    """Hash a module, the local modules that it imports, and the files that they name.

    A module is local if it belongs to the same package, or lies outside the folders of installed
    packages and of the standard library. A file is named by a string constant with its path,
    relative to the working directory or to the module. Empty for modules of this project, and for
    those that cannot be found.
    """
    top = module.partition(".")[0]
    if top in OURS:
        return ""
    files: dict[Path, set[Path]] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        file = None if name in seen else _source(name, top)
        seen.add(name)
        if file is None or file in files:
            continue
        files[file] = set()
        with suppress(OSError, SyntaxError, ValueError):
            tree = ast.parse(file.read_bytes())
            files[file] = set(_named_files(tree, file.parent))
            waiting += _imports(tree, name, file)
    named = set[Path]().union(*files.values())
    return hash_files({*files, *named}, min(files).parent) if files else ""


def _source(name: str, top: str) -> Path | None:
    """The file of a local module; None for others."""
    first = name.partition(".")[0]
    if first in OURS or first in sys.stdlib_module_names:
        return None
    try:
        if first != top and not _is_local(importlib.util.find_spec(first)):
            return None
        loaded = sys.modules.get(name)
        origin = getattr(loaded, "__file__", None)
        if origin is None:
            spec = importlib.util.find_spec(name)
            origin = spec.origin if spec is not None and spec.has_location else None
    except (ImportError, AttributeError, ValueError):
        return None
    return None if origin is None else Path(origin)


def _is_local(spec: ModuleSpec | None) -> bool:
    """Whether a package lies outside the folders of installed packages."""
    if spec is None:
        return False
    places = [*(spec.submodule_search_locations or ()), *([spec.origin] if spec.origin else [])]
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(name)) for name in names]
    found = [Path(place) for place in places if place not in ("built-in", "frozen")]
    return bool(found) and not any(
        place.is_relative_to(folder) for place in found for folder in installed
    )


def _imports(tree: ast.Module, name: str, file: Path) -> Iterator[str]:
    """Names of modules, or of their attributes, that a module imports."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            parts = parts[: len(parts) - node.level + 1] if node.level else []
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
