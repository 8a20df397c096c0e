"""Content hashes: of files, of which only those that changed are read, of code and of models."""

import ast
import hashlib
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.sources.formats.files import files_below
from valora_data.wording import first_line

# Nanoseconds after which a file's times tell that it changed: a file that is written again sooner
# may keep them, as clocks of file systems are coarse.
SETTLED = 2_000_000_000
MISSING = "missing"  # hash of a file that does not exist
OURS = {"valora_data", "valora_teachers", "valora_train", "valora_serve", "valora_kernels"}
"""Packages whose changes show in the versions of the stages that use them."""
HUB_SECONDS = 5.0  # longest wait for the hub's answer


def hash_files(paths: Iterable[Path], root: Path, cache: Path | None = None) -> str:
    """Hash the names, relative to a root, and the contents of files: 64 hexadecimal digits.

    Missing files count, too. `cache` remembers hashes of files: those whose size, times or inode
    changed are read again. An OSError says that a file cannot be read.
    """
    known, now = _load(cache), time.time_ns()
    files = {os.path.abspath(path): path for path in paths}  # noqa: PTH100
    facts = {name: file_facts(files[name]) for name in sorted(files)}
    unread = [n for n, fact in facts.items() if fact and known.get(n, (None,))[0] != fact]
    with ThreadPoolExecutor() as pool:
        read = dict(zip(unread, pool.map(file_hash, map(files.__getitem__, unread)), strict=True))
    hashes = {
        name: MISSING if fact is None else read.get(name) or known[name][1]
        for name, fact in facts.items()
    }
    settled = {
        name: (fact, hashes[name]) for name, fact in facts.items()
        if fact is not None and (name not in read or max(fact[1:3]) < now - SETTLED)
    }  # fmt: skip
    if cache is not None and settled != known:
        temporary = cache.with_name(f"{cache.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # without a cache everything works, only slower
            cache.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(settled), encoding="utf-8")
            temporary.replace(cache)
    base = os.path.abspath(root)  # noqa: PTH100
    listing = [(os.path.relpath(name, base), found) for name, found in hashes.items()]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def hash_path(path: Path, cache: Path | None = None) -> str:
    """Hash a file's content, or the names and contents of a folder's files but hidden ones."""
    return hash_files(files_below(path) if path.is_dir() else [path], path, cache)


def file_facts(path: Path) -> list[int] | None:
    """Size, times and number of a file; None if it is missing."""
    try:
        found = path.stat()
    except PermissionError:
        raise
    except (OSError, ValueError):  # nothing is there, or no file can have the name
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def file_hash(path: Path) -> str:
    """The sha256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _load(cache: Path | None) -> dict[str, tuple[list[int], str]]:
    try:
        content = json.loads(cache.read_text(encoding="utf-8")) if cache is not None else {}
        return {str(name): (list(facts), str(found)) for name, (facts, found) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def place_hash(location: str | Path, cache: Path | None = None) -> str:
    """Hash a file or folder (see `hash_path`); of a model on the hub, its commit; else empty."""
    path = expanded(location)
    return hash_path(path, cache) if path.exists() else hub_commit(str(location))


def hub_name(text: str) -> tuple[str, str | None]:
    """The name and the revision of ``owner/name@revision``; None where it names none."""
    name, _, revision = text.partition("@")
    return name, revision or None


def hub_file(text: str) -> Path:
    """A local file, or the local copy of one on the hub: ``owner/name/file@revision``."""
    path, (name, revision) = expanded(text), hub_name(text)
    if path.exists() or revision is None or name.count("/") != 2:
        return path
    from huggingface_hub import hf_hub_download

    repository, _, file = name.rpartition("/")
    try:
        return Path(hf_hub_download(repository, file, revision=revision))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{text} is no file here, and cannot be loaded from the hub ({first_line(error)}): "
            "check the name, the network, and that HF_HUB_OFFLINE is not set"
        ) from error


def hub_commit(text: str, kind: Literal["model", "dataset"] = "model") -> str:
    """The commit of a repository on the hub; offline, that of the local cache; empty if unknown."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    name, revision = hub_name(text)
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        return ""
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    if not constants.HF_HUB_OFFLINE:
        with suppress(Exception):  # network, access, name: loading says what is wrong
            found = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=HUB_SECONDS)
            if found.sha:
                return found.sha
    with suppress(OSError, ValueError):  # not there, or no name that the hub allows
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
        return (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
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
