"""Checks of Python, cores, memory, disks, limits, packages, and what ships with the package."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.contract.base_model import SHIPPED
from valora_data.cpu import CGROUP, usable_cores
from valora_data.errors import ValoraError
from valora_serve.doctor.base import Finding, Level, server_settings
from valora_serve.doctor.gpu import installed
from valora_serve.engine.settings import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from valora_serve.doctor.base import Patient

PYTHONS = tuple((3, minor) for minor in range(11, 15))
"""Versions of Python that the package supports."""
LEAST_DISK = 2 << 30
"""Bytes below which a disk counts as full: a fusion of the tiny model writes about one GiB."""
EXTRAS = {
    "serve": ("fastapi", "uvicorn", "pydantic_settings", "httpx", "llguidance", "av"),
    "train": ("hydra", "peft", "mlflow", "datasets", "pycocotools", "supervision"),
    "yolo": ("ultralytics",),
}
"""Modules that tell whether an extra is installed, by its name."""
FILES = 4096 + 256
"""Open files that a server with its default of `max_connections` needs."""


def check_python(_: Patient) -> Iterator[Finding]:
    """The version of Python."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] in PYTHONS:
        yield Finding(Level.FINE, "Python", found)
    else:
        wanted = " or ".join(".".join(map(str, version)) for version in PYTHONS)
        yield Finding(Level.WRONG, "Python", found, f"install Python {wanted}")


def check_machine(_: Patient) -> Iterator[Finding]:
    """Cores, memory and limits."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # of a container
        with suppress(OSError, ValueError):
            memory = min(memory, int((CGROUP / limit).read_text()))
    cores = usable_cores()
    yield Finding(Level.FINE, "machine", f"{cores} CPU cores, {memory / 2**30:.1f} GiB memory")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < FILES:
        text = f"{hard} at most, which is {max(0, hard - 256)} connections at a time"
        remedy = f"`ulimit -Hn {FILES}`, or serve with a lower --max-connections"
        yield Finding(Level.NOTE, "open files", text, remedy)
    else:
        yield Finding(Level.FINE, "open files", "enough may be open")


def check_disks(_: Patient) -> Iterator[Finding]:
    """Room and permission in this folder and in the folders of caches."""
    environment = os.environ
    try:
        home = Path.home()
    except RuntimeError:  # of a user whom the system does not know, as in some containers
        home = Path.cwd()
        text = "this user has none, so that caches are kept in this folder"
        yield Finding(Level.NOTE, "home folder", text, "set HOME to a folder that stays")
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folders = {
        "disk": (Path.cwd(), ""),
        "costs": (
            Path(server_settings().cost_folder or cache_folder()).absolute(),
            "VALORA_COST_FOLDER",
        ),
        "kernels": (
            Path(environment.get("TRITON_CACHE_DIR") or home / ".triton"), "TRITON_CACHE_DIR",
        ),
        "models": (Path(environment.get("HF_HOME") or cache / "huggingface"), "HF_HOME"),
    }  # fmt: skip
    for what, (folder, variable) in folders.items():
        try:
            there = next(one for one in (folder, *folder.parents) if one.exists())
            free = shutil.disk_usage(there).free
            may = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        except OSError:  # also of a folder above it, which may not be looked into
            free, may = 0, False
        text = f"{free / 2**30:.0f} GiB free in {folder}"
        if not may:
            text = f"{folder} cannot be written"
            other = f"name another folder with {variable}" if variable else "go to another folder"
            yield Finding(Level.WRONG, what, text, f"give permission, or {other}")
        elif free < LEAST_DISK:
            yield Finding(Level.WRONG, what, text, "make room, or use another folder")
        else:
            yield Finding(Level.FINE, what, text)


def check_extras(_: Patient) -> Iterator[Finding]:
    """Which parts of the package are installed."""
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            text = f"not installed ({', '.join(missing)})"
            yield Finding(Level.NOTE, f"valora[{extra}]", text, f"pip install 'valora[{extra}]'")
        else:
            yield Finding(Level.FINE, f"valora[{extra}]", "installed")
    ray = installed("ray")
    if ray is None:
        text = "not installed: one engine only, no replicas"
        yield Finding(Level.NOTE, "Ray", text, "pip install 'valora[scale]'")
    else:
        yield Finding(Level.FINE, "Ray", ray)


def check_files(patient: Patient) -> Iterator[Finding]:
    """The base model, and the bundles beside it."""
    from valora_data.contract.base_model import base_hash
    from valora_serve.doctor.sizes import is_offline, local_folder

    base = patient.base
    try:
        folder = local_folder(base)
        found = folder and f"{folder} (sha256 {base_hash(str(folder))[:12]})"
    except (ValoraError, OSError) as error:
        remedy = "install the package again" if base in SHIPPED else "name a folder that holds one"
        found = str(error)
        if isinstance(error, ValoraError):  # it says what to do
            found = found.partition(": ")[0]
        yield Finding(Level.WRONG, "base model", found, remedy)
    else:
        if found:
            yield Finding(Level.FINE, "base model", found)
        elif is_offline():
            text = f"{base} is not on this machine, and HF_HUB_OFFLINE keeps it from the hub"
            yield Finding(Level.WRONG, "base model", text, "unset that, or name a folder")
        else:
            text = f"{base} is not on this machine: whether it fits was not looked at"
            yield Finding(Level.NOTE, "base model", text, "the first start downloads it")
    bundles = Path("bundles")
    names = sorted(file.parent.name for file in bundles.glob("*/bundle.json"))
    if names:
        yield Finding(Level.FINE, "bundles", f"{', '.join(names)} in {bundles}/")
    else:
        remedy = "`valora fuse` makes one; `valora demo` serves the one in the package"
        yield Finding(Level.NOTE, "bundles", "none in this folder", remedy)
