"""Finds and loads the bundles that the command line names."""

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from rich.table import Table

from valora_data.contract.base_model import SHIPPED, SMOL
from valora_data.contract.bundle import MANIFEST, read_manifest
from valora_data.contract.files import expanded
from valora_data.cpu import cpu_multiplies_bfloat16
from valora_serve.errors import SettingsError
from valora_serve.server.app import create_app
from valora_serve.server.loading import golden
from valora_serve.server.loading.served_set import ServedSet, bundle_names
from valora_serve.server.loading.state_file import StateFile
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs
from valora_serve.types import ServedModel

_REGISTRY = ("models:/", "runs:/", "mlflow-artifacts:/")
SHORT = "bfloat16"
_SECONDS = 1800  # most that a download takes


@dataclass(frozen=True)
class Served:
    """Result of loading."""

    models: list[ServedModel]
    examples: int
    left_out: list[str]


def find_bundles(names: Sequence[str], downloads: Path) -> list[Path]:
    """Find the folders of bundles."""
    found: list[Path] = []
    for name in names:
        if name.startswith(_REGISTRY):
            found.append(_download(name, downloads))
            continue
        folder = expanded(name)
        inside = [folder] if (folder / MANIFEST).is_file() else []
        if not inside and folder.is_dir():
            # In a folder of bundles, older versions (`name@1`) lie beside those to serve.
            several = sorted(item.parent for item in folder.glob(f"*/{MANIFEST}"))
            inside = [item for item in several if "@" not in item.name and item.name[0] != "."]
        if not inside:
            raise SettingsError(
                f"{name} is no bundle: name a folder that holds {MANIFEST} (`make fuse` makes one)"
            )
        found += inside
    kept, named = {folder.resolve(): folder for folder in found}, dict[str, Path]()
    for folder in kept.values():
        name = str(read_manifest(folder)["name"])
        if (other := named.setdefault(name, folder)) != folder:
            raise SettingsError(f"{other} and {folder} are both bundle {name}: serve one")
    return list(kept.values())


def follow_bundles(settings: Any, folders: Sequence[Path]) -> Any:
    """The engine's settings with what bundles say of their base model; its name, if it is ours."""
    bases = [read_manifest(folder)["base"] for folder in folders]
    stated = bases[0] if bases else {}
    base, quantize, wanted = settings.base, settings.quantize, stated.get("id")
    if base in SHIPPED and wanted in (*SHIPPED, SMOL):
        base = str(wanted)
    if quantize == "auto":
        quantize = str(stated.get("quantize") or "none")
    dtype = settings.dtype
    if dtype == "auto" and bases and all(SHORT in one.get("dtypes", ()) for one in bases):
        # Their accuracy was measured so. A GPU serves so anyhow; not every CPU is faster.
        dtype = SHORT if cpu_multiplies_bfloat16() else dtype
    return replace(settings, base=base, quantize=quantize, dtype=dtype)


def _download(uri: str, downloads: Path) -> Path:
    """Download a bundle from MLflow with its command; the server does not import MLflow."""
    if importlib.util.find_spec("mlflow") is None:
        raise SettingsError(f"{uri} needs MLflow: pip install mlflow, or name a bundle's folder")
    downloads.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(dir=downloads)
    command = [sys.executable, "-m", "mlflow", "artifacts", "download", "-u", uri, "-d", folder]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or str(error)  # of MLflow, or that it took too long
        reason = str(said).strip().splitlines()[-1]
        raise SettingsError(f"{uri} cannot be fetched from MLflow: {reason}") from error
    bundles = sorted(item.parent for item in Path(folder).rglob(MANIFEST))
    if not bundles:
        raise SettingsError(f"{uri} holds no {MANIFEST}: name a bundle's model version")
    return bundles[0]


async def load_all(engine: Any, bundles: Sequence[Path], served: ServedSet) -> Served:
    """Load the bundles of the command line, and those that an earlier run loaded at run time."""
    unloaded = served.read()
    loaded, left_out = [], []
    for folder in bundles:
        names = await asyncio.to_thread(bundle_names, folder)
        name = names[0]
        if name in unloaded:
            served.reserve(names)
            if name not in served.state.bundles:  # `restore` loads the one that replaced it
                left_out.append(f"bundle {name} was unloaded at run time: load it to serve it")
            continue
        made = await engine.load("bundle", folder)
        logs.LOG.info("loaded %s", made[0].bundle, extra={"facts": {"folder": str(folder)}})
        loaded.append(folder)
    await engine.warm_up()
    examples = sum([await served.replay(folder) for folder in loaded]) if served.replay else 0
    left_out += await served.restore()
    return Served(engine.models(), examples, left_out)


def tell_of_unknown(setting: str, names: Iterable[str], what: str, known: Iterable[str]) -> None:
    """Log names of a setting that nothing has, but something may have later."""
    for name in sorted({*names} - {*known}):
        logs.LOG.warning("%s: there is no %s %s, so this has no effect", setting, what, name)


async def make_app(
    engine: Any,  # an `EngineClient` that can be warmed up
    settings: ServerSettings,
    folders: Sequence[Path],
    engine_settings: Any,
    state: StateFile | None = None,
) -> tuple[FastAPI, Served]:
    """Load bundles into an engine; return the application in front of it, and what it serves."""
    replay = partial(golden.replay, engine) if settings.golden else None
    state = state or StateFile(settings.state_file)
    served = ServedSet(engine, settings.adapter_folder, state, replay)
    found = await load_all(engine, folders, served)
    by, shares = engine_settings.share_by, engine_settings.shares
    models = engine.models()
    if by == "adapter":
        tell_of_unknown("shares", shares, by, [model.adapter or "base" for model in models])
    for setting in ("deadlines", "sample_shares"):
        tell_of_unknown(setting, getattr(settings, setting), "model", [one.name for one in models])
    return create_app(engine, settings, served, share_by=by, shares=shares), found


def table(served: Served) -> Table:
    """Table of the served models, for the terminal."""
    shown = Table(title="Served", title_justify="left", header_style="bold")
    for column in ("name", "kind", "adapter", "rank", "answers by", "promised"):
        shown.add_column(column, justify="right" if column == "rank" else "left")
    for model in served.models:
        promised = "" if model.accuracy is None else f"{model.metric} {model.accuracy:.3f}"
        if model.accuracy is not None and model.required is not None:
            promised += f" (required {model.required:.2f})"
        adapter = (model.adapter or "none") if model.kind == "domain" else ""
        answers = f"{model.head} head" if model.head else "LM"
        shown.add_row(model.name, model.kind, adapter, str(model.rank or ""), answers, promised)
    return shown
