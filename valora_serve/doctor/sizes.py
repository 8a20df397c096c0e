"""How much of a GPU's memory a base model takes, from its files alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from valora_data.contract.base_model import base_folder
from valora_data.contract.files import UnreadableError, read_json
from valora_data.errors import BundleError, ValoraError
from valora_data.models.registry import VISION_MODULES
from valora_serve.engine.settings import EngineSettings

BYTES = 2
"""Bytes of a number in 16 bits."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a GPU's memory, in 16 bits and with the engine's default settings.

    Attributes:
        weights: All weights.
        merged: Those that adapters are merged into, of which policies that merge keep a copy.
        beside: What a step, CUDA graphs and the fewest pages take.
    """

    weights: int
    merged: int
    beside: int


def local_folder(base: str) -> Path | None:
    """Return the folder of a base model; None for a hub name that is not on this machine.

    Raises:
        ValoraError: It is a folder that holds no model, a path to nothing, or no name on the hub.
    """
    found = base_folder(base)
    if Path(found).is_dir():
        return Path(found)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(found, local_files_only=True))
    except HFValidationError as error:
        raise BundleError(
            f"{base!r} is neither a folder nor a name on the hub: name one of these"
        ) from error
    except (LocalEntryNotFoundError, OSError):
        return None


def is_offline() -> bool:
    """Return whether nothing is downloaded from the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def read_sizes(base: str) -> Sizes | None:
    """Return what a base model takes; None if its weights cannot be read on this machine.

    Args:
        base: ``tiny``, a folder, or a hub name.
    """
    from safetensors import SafetensorError, safe_open

    weights = merged = 0
    try:
        folder = local_folder(base)
        if folder is None:
            return None
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    count = BYTES * math.prod(opened.get_slice(name).get_shape())
                    weights += count
                    vision = any(part in name for part in VISION_MODULES)
                    if name.endswith("proj.weight") and not vision:
                        merged += count
    except (ValoraError, OSError, SafetensorError):
        return None
    return Sizes(weights, merged, _beside(folder)) if weights else None


def _beside(folder: Path) -> int:
    """Bytes beside the weights, as far as the configuration says."""
    from valora_serve.engine.sizing import LEAST_PAGES, beside_weights  # imports torch

    try:
        config = read_json(folder / "config.json")
    except UnreadableError:
        config = None
    found = config if isinstance(config, dict) else {}
    text = found.get("text_config")
    found = found | (text if isinstance(text, dict) else {})

    def number(name: str, otherwise: int) -> int:
        value = found.get(name)
        return value if type(value) is int else otherwise

    # LLaVA-1.5's configuration leaves out what is Llama-7B's default.
    width, heads = number("hidden_size", 4096), number("num_attention_heads", 32)
    kv_heads = number("num_key_value_heads", heads)
    head = number("head_dim", width // max(1, heads))
    settings = EngineSettings()
    layers = number("num_hidden_layers", 32)
    page = 2 * layers * settings.block_size * kv_heads * head * BYTES
    vocabulary = number("vocab_size", 32064)
    return beside_weights(settings, width, vocabulary) + LEAST_PAGES * page
