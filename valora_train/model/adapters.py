"""LoRA adapters on the base model, through PEFT."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from valora_data.contract.base_model import BaseModel
from valora_data.models.base import Architecture
from valora_data.models.registry import architecture_of
from valora_train.errors import SettingsError
from valora_train.settings import LoraSettings

# Of PEFT, which say nothing to a user.
for message in (".*is_gradient_checkpointing", ".*was active which is now deleted"):
    warnings.filterwarnings("ignore", message=message)
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on CPUs it misses a package of kernels


class Adapters:
    """The adapters of a base model, by name; one of them, or none, is active."""

    def __init__(self, model: BaseModel, lora: LoraSettings) -> None:
        self.peft: Any = None  # the `PeftModel`, which wraps linear layers in place
        self._model, self._lora = model, lora
        self._decode_only: set[str] = set()
        self._active: str | None = None
        self._acts: torch.Tensor | None = None  # (n, length, 1) bool; None: on every token

    def add(self, name: str, seed: int, decode_only: bool | None = None) -> None:
        """Add and activate an adapter that changes nothing yet, scaled as the settings say."""
        import peft  # which takes seconds

        lora, targets = self._lora, target_pattern(self._lora, self._model.architecture)
        config = peft.LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=targets
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.peft is None:
                check_targets(lora, self._model.base, self._model.model)
                self.peft = peft.get_peft_model(self._model.model, config, adapter_name=name)
            else:
                self.peft.add_adapter(name, config)
        self.adopt(name, lora.decode_only if decode_only is None else decode_only)
        self.activate(name)

    def load(self, name: str, folder: Path, decode_only: bool = False) -> None:
        """Load an adapter from a PEFT folder."""
        import peft

        if self.peft is None:
            self.peft = peft.PeftModel.from_pretrained(self._model.model, folder, name)
        else:
            self.peft.load_adapter(folder, name)
        self.adopt(name, decode_only)

    def adopt(self, name: str, decode_only: bool) -> None:
        """Prepare an adapter that PEFT has added; `act_from` holds if it acts at decoding only."""
        (self._decode_only.add if decode_only else self._decode_only.discard)(name)
        for module in self._model.model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                # Autocast is to cast LoRA's few weights; PEFT would cast activations.
                module.cast_input_dtype_enabled = False
            if decode_only and name in getattr(module, "lora_B", {}):
                module.lora_B[name].register_forward_hook(
                    lambda _, __, out: out if self._acts is None else out * self._acts.to(out.dtype)
                )

    def act_from(self, starts: Sequence[int], length: int) -> None:
        """From which token of each row on a decode-only adapter acts, until it is changed."""
        self._acts = None
        if self._active in self._decode_only:
            places = torch.arange(length) >= torch.tensor(starts)[:, None]
            self._acts = places[..., None].to(self._model.device)

    def act_everywhere(self) -> None:
        """Let the active adapter act on every token of the next batches."""
        self._acts = None

    def activate(self, name: str | None) -> None:
        """Make an adapter the active one, or none."""
        self._active, self._acts = name, None
        if self.peft is None:
            return
        if name is None:
            self.peft.base_model.disable_adapter_layers()
            return
        self.peft.base_model.enable_adapter_layers()
        self.peft.set_adapter(name)

    @contextmanager
    def none_active(self) -> Iterator[None]:
        """Compute as the base model inside."""
        active = self._active
        self.activate(None)
        try:
            yield
        finally:
            self.activate(active)

    def save(self, name: str, folder: Path, base: str) -> None:
        """Write an adapter in PEFT's format; plain PEFT loads it onto the base model."""
        from peft.utils import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        weights = get_peft_model_state_dict(self.peft, adapter_name=name)
        save_file(
            {key: value.detach().cpu().contiguous() for key, value in weights.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        config = copy.copy(self.peft.peft_config[name])
        config.base_model_name_or_path = base
        config.inference_mode = True
        config.save_pretrained(folder)

    def remove(self, name: str) -> None:
        """Delete an adapter, which may be the active one."""
        self.peft.delete_adapter(name)

    def parameters(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return an adapter's weights by module path, e.g. ``…0.self_attn.q_proj.lora_A``."""
        suffix = f".{name}.weight"
        return {
            key.removesuffix(suffix): value
            for key, value in self._model.model.named_parameters()
            if key.endswith(suffix) and ".lora_" in key
        }


def target_pattern(lora: LoraSettings, architecture: Architecture) -> str:
    """Return the regular expression, over full module paths, of the layers that PEFT adapts."""
    parts = [rf".*{architecture.decoder}.*\.({'|'.join(map(re.escape, lora.targets))})"]
    if lora.vision_tower:
        parts += architecture.tower_targets
    if lora.projector:
        parts += architecture.projector_targets
    return "|".join(f"({part})" for part in parts)


def check_targets(lora: LoraSettings, base: str, model: Any) -> None:
    """Refuse LoRA on what has no linear layers in a model, where it would change nothing."""
    linears = [path for path, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    family = architecture_of(model, base)
    wanted: list[tuple[str, tuple[str, ...]]] = [
        (f"linear layers {name} for LoRA in its language model: correct train.lora.targets",
         (rf".*{family.decoder}.*\.{re.escape(name)}",))
        for name in lora.targets
    ]  # fmt: skip
    for part, asked, targets in (
        ("vision_tower", lora.vision_tower, family.tower_targets),
        ("projector", lora.projector, family.projector_targets),
    ):
        text = (
            f"linear layers for LoRA in its {part.replace('_', ' ')}: set train.lora.{part}=false"
        )
        wanted += [(f"{text}, or choose another train=NAME", targets)] if asked else []
    for text, targets in wanted:
        if not any(re.fullmatch(target, path) for target in targets for path in linears):
            raise SettingsError(f"base model {base} has no {text}")
