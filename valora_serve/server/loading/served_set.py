"""Loads and unloads adapters and bundles at run time, and restores them after a restart."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from valora_data.contract.bundle import MANIFEST
from valora_data.errors import ValoraError
from valora_serve.errors import AdapterError, BusyError, SettingsError, UnknownModelError
from valora_serve.server.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from valora_serve.types import EngineClient, ServedModel

PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz"}
ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class _SavedState(BaseModel):
    """Content of the state file.

    Attributes:
        adapters: Folders of adapters loaded at run time, by name.
        bundles: Folders of bundles loaded at run time, by name.
        unloaded: Bundles of the command line that were unloaded at run time.
    """

    model_config = ConfigDict(extra="forbid")

    adapters: dict[str, str] = {}
    bundles: dict[str, str] = {}
    unloaded: list[str] = []


class ServedSet:
    """Loads and unloads at run time, one request at a time, and records it in the state file.

    Args:
        engine: Engine that serves the adapters and bundles.
        folder: Folder that they can be loaded from; None if nothing can be loaded.
        state_file: The state file.
        replay: Replays a bundle's golden examples; raises if they are not reproduced.
    """

    def __init__(
        self,
        engine: EngineClient,
        folder: Path | None,
        state_file: Path,
        replay: Callable[[Path], Awaitable[int]] | None = None,
    ) -> None:
        if folder is not None and not folder.is_dir():
            raise SettingsError(f"adapter_folder {folder} is no folder: make it, or name another")
        self._engine = engine
        self._folder = folder.resolve() if folder is not None else None
        self._file = state_file
        self._replay = replay
        self._state = _SavedState()
        self._lock = asyncio.Lock()

    def read(self) -> list[str]:
        """Read the state file of an earlier run.

        Returns:
            Names of bundles of the command line that were unloaded.

        Raises:
            SettingsError: The file is damaged.
        """
        if self._folder is None or not self._file.is_file():
            return []
        try:
            self._state = _SavedState.model_validate_json(self._file.read_bytes())
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"state file {self._file} is damaged: delete it to start without run-time loads"
            ) from error
        return list(self._state.unloaded)

    async def restore(self) -> list[str]:
        """Load what earlier runs loaded at run time.

        What cannot be loaded is logged, left out, and tried again at the next start.

        Returns:
            A sentence for each adapter or bundle that could not be loaded.
        """
        problems = []
        for name, path in self._state.bundles.items():
            try:
                await self._load_bundle(self._checked(path))
            except ValoraError as error:
                problems.append(f"bundle {name} is not served again: {error}")
        for name, path in self._state.adapters.items():
            try:
                folder = self._checked(path)
                _check_adapter(folder)
                await self._engine.load_adapter(name, folder)
            except ValoraError as error:
                problems.append(f"adapter {name} is not served again: {error}")
        for problem in problems:
            logs.LOG.error("%s", problem)
        return problems

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> ServedModel:
        """Load a PEFT adapter.

        Args:
            name: Name that requests will use.
            path: Folder of the adapter, absolute or relative to the adapter folder.
            replace: Whether an adapter of this name that was loaded at run time is replaced.

        Raises:
            AdapterError: The path is outside the adapter folder, or the adapter is invalid.
            BusyError: The name is taken.
        """
        async with self._lock:
            taken = {model.name: model for model in self._engine.models()}
            if name in taken and not (replace and name in self._state.adapters):
                raise BusyError(
                    f"The name {name} is taken by a served {taken[name].kind}: unload it first, or "
                    "set load_inplace to replace an adapter that was loaded at run time"
                )
            folder = self._checked(path)
            _check_adapter(folder)
            made = await self._engine.load_adapter(name, folder)
            self._state.adapters[name] = str(folder)
            self._write()
            return made

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises:
            UnknownModelError: There is no adapter of this name.
            BusyError: Domains of a bundle use the adapter.
        """
        async with self._lock:
            await self._engine.unload_adapter(name)
            if self._state.adapters.pop(name, None) is not None:
                self._write()

    async def load_bundle(self, path: str) -> list[ServedModel]:
        """Load a bundle and replay its golden examples.

        Raises:
            AdapterError: The path is outside the adapter folder, or the bundle is invalid.
        """
        async with self._lock:
            folder = self._checked(path)
            if not (folder / MANIFEST).is_file():
                raise AdapterError(f"{folder.name} is no bundle: it holds no {MANIFEST}")
            made = await self._load_bundle(folder)
            name = _bundle_name(made, folder)
            self._state.bundles[name] = str(folder)
            if name in self._state.unloaded:
                self._state.unloaded.remove(name)
            self._write()
            return made

    async def unload_bundle(self, name: str) -> None:
        """Unload a bundle with its domains.

        Raises:
            UnknownModelError: There is no bundle of this name.
        """
        async with self._lock:
            known = {model.bundle for model in self._engine.models() if model.bundle}
            names = {item.partition("@")[0] for item in known} | known
            if name not in names:
                listed = ", ".join(sorted(known)) or "none"
                raise UnknownModelError(f"There is no bundle {name[:100]!a}: served are {listed}")
            short = name.partition("@")[0]
            await self._engine.unload_bundle(short)
            if self._state.bundles.pop(short, None) is None:
                self._state.unloaded.append(short)
            self._write()

    async def _load_bundle(self, folder: Path) -> list[ServedModel]:
        before = {
            _bundle_name([model], folder): Path(model.root)
            for model in self._engine.models()
            if model.bundle and model.kind == "domain"
        }
        made = await self._engine.load_bundle(folder)
        if self._replay is not None:
            try:
                await self._replay(folder)
            except ValoraError:
                name = _bundle_name(made, folder)
                await self._engine.unload_bundle(name)
                if name in before:  # it replaced another version, which is restored
                    await self._engine.load_bundle(before[name])
                raise
        return made

    def _checked(self, path: str) -> Path:
        """The folder of a path, links resolved; all of it must be in the adapter folder."""
        if self._folder is None:
            raise AdapterError("Nothing can be loaded at run time: start with --adapter-folder")
        outside = AdapterError(
            "The path names no folder below adapter_folder: put the adapter there, and name it "
            "relative to that folder"
        )
        try:
            folder = (self._folder / path).resolve(strict=True)
            inside = folder.is_relative_to(self._folder)
            if not inside:
                raise outside
            if folder.is_file() and folder.suffix.lower() in ARCHIVES:
                raise AdapterError(f"{folder.name} is an archive: unpack it, and name the folder")
            if not folder.is_dir() or folder == self._folder:
                raise outside
            for item in folder.rglob("*"):
                if not item.resolve().is_relative_to(folder):
                    raise AdapterError(
                        f"{item.name} in {folder.name} is a link that leads outside: copy the file"
                    )
        except (OSError, ValueError, RuntimeError) as error:
            raise outside from error
        return folder

    def _write(self) -> None:
        """Write the state file atomically: after a crash it has its old or its new content."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_name(self._file.name + ".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.write(self._state.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._file)
        descriptor = os.open(self._file.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_adapter(folder: Path) -> None:
    """Check that a folder is a PEFT adapter in safetensors and holds no pickle files."""
    pickles = sorted(item.name for item in folder.iterdir() if item.suffix.lower() in PICKLES)
    if pickles:
        raise AdapterError(
            f"{folder.name} holds {pickles[0]}, which can run code when it is read: save the "
            "adapter as safetensors, and remove that file"
        )
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise AdapterError(f"{folder.name} is no PEFT adapter: it holds no {name}")


def _bundle_name(made: list[ServedModel], folder: Path) -> str:
    named = next((model.bundle for model in made if model.bundle), None)
    return (named or folder.name).partition("@")[0]
