"""EfficientNet-Lite0 (Tan and Le 2019) as a vision tower, which this registers in transformers."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from valora_data.cpu import cpu_multiplies_bfloat16, usable_cores

BLOCKS = (
    (1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192), (1, 3, 1, 6, 320),
)  # fmt: skip
"""Repeats, kernel, stride of the first, expansion and channels of each group of blocks."""
FINE, FINEST = 4, 2
"""Last groups at strides of 16 and of 8 pixels. Features of the first are kept, since objects are
small (on photographs, stride 32 alone reached half the F1), of the second if they are wanted."""
FINEST_CHANNELS = 16 * BLOCKS[FINEST][-1]
PLACE = 16  # Channels that say where a cell is: sines and cosines of both coordinates


class LiteTowerConfig(PreTrainedConfig):  # type: ignore[misc]
    """Shape of a tower; `hidden_size` says whether features of stride 8 are among a token's."""

    model_type = "efficientnet_lite0"
    image_size: int = 448
    patch_size: int = 32
    num_channels: int = 3
    hidden_size: int = BLOCKS[-1][-1] + 4 * BLOCKS[FINE][-1] + PLACE


class Conv(nn.Conv2d):
    """A convolution with TensorFlow's padding: what an even size leaves over is on the right."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1):
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride, padding, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride[0] > 1:
            kernel, stride = self.kernel_size[0], self.stride[0]
            edges = [max(kernel - (side % stride or stride), 0) for side in x.shape[:1:-1]]
            x = F.pad(x, [part for edge in edges for part in (edge // 2, edge - edge // 2)])
        out: Tensor = super().forward(x)
        return out


class Block(nn.Module):
    """An inverted residual: widen, filter each channel, narrow (Sandler et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = Conv(inputs, wide, 1) if expansion > 1 else None
        self.depthwise = Conv(wide, wide, kernel, stride, groups=wide)
        self.project = Conv(wide, outputs, 1)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x), inplace=True)
        y = self.project(F.relu6(self.depthwise(y), inplace=True))
        out: Tensor = x + y if self.residual else y
        return out


class LiteTower(PreTrainedModel):  # type: ignore[misc]
    """One token for each 32 × 32 pixels: features of strides 32 and 16, place, and the finest."""

    config_class = LiteTowerConfig
    base_model_prefix = "tower"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _no_split_modules = ("Block",)

    def __init__(self, config: LiteTowerConfig) -> None:
        super().__init__(config)
        self.stem = Conv(3, 32, 3, 2)
        groups, channels = [], 32
        for repeats, kernel, stride, expansion, outputs in BLOCKS:
            blocks = []
            for i in range(repeats):
                blocks.append(Block(channels, outputs, kernel, stride if i == 0 else 1, expansion))
                channels = outputs
            groups.append(nn.Sequential(*blocks))
        self.groups = nn.ModuleList(groups)
        self._copy: tuple[Any, tuple[LiteTower]] | None = None  # for CPUs
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """Encode (n, 3, height, width) to (n, cells, hidden_size), rounded to bfloat16."""
        on_cpu = pixel_values.device.type == "cpu"
        frozen = not any(weight.requires_grad for weight in self.parameters())
        encode = self._on_cpu if on_cpu and frozen else self._encode
        found = encode(pixel_values).bfloat16().to(pixel_values.dtype)
        return BaseModelOutputWithPooling(last_hidden_state=found, hidden_states=(found,))

    def _on_cpu(self, pixels: Tensor) -> Tensor:
        """One image on each core, which takes a tenth of the time of a batch on all of them."""
        low = torch.bfloat16 if cpu_multiplies_bfloat16() else pixels.dtype
        state = self.stem.weight.data_ptr(), self.stem.weight._version, low
        if self._copy is None or self._copy[0] != state:
            self._copy = None
            found = copy.deepcopy(self).to(low).to(memory_format=torch.channels_last)
            self._copy = state, (found,)  # a tuple is no part of the module
        (tower,) = self._copy[1]

        @torch.no_grad()
        def encode(row: Tensor) -> Tensor:
            found: Tensor = tower._encode(row.to(low, memory_format=torch.channels_last))
            return found

        with ThreadPoolExecutor(usable_cores(), initializer=partial(torch.set_num_threads, 1)) as t:
            return torch.cat(list(t.map(encode, pixels.split(1))))

    def _encode(self, pixels: Tensor) -> Tensor:
        x, kept = F.relu6(self.stem(pixels)), {}
        for i, group in enumerate(self.groups):
            x = group(x)
            if i in {FINE, FINEST}:  # others are let go: they are large
                kept[i] = x
        coarse = torch.cat([x, F.pixel_unshuffle(kept[FINE], 2)], 1)
        parts = [scaled(coarse), places(x)]
        if self.config.hidden_size == LiteTowerConfig.hidden_size + FINEST_CHANNELS:
            parts.append(scaled(F.pixel_unshuffle(kept[FINEST], 4)))
        return torch.cat(parts, 1).flatten(2).transpose(1, 2)


def scaled(x: Tensor) -> Tensor:
    """Features of each cell, (n, channels, height, width), with mean 0 and variance 1."""
    x = x.permute(0, 2, 3, 1).float()
    return F.layer_norm(x, x.shape[-1:]).permute(0, 3, 1, 2)


def places(x: Tensor) -> Tensor:
    """Sines and cosines of both coordinates of cells, (n, PLACE, height, width), like `x`."""
    sides = []
    for length in x.shape[2:]:
        at = (torch.arange(length, device=x.device) + 0.5) / length * torch.pi
        waves = at[:, None] * 2.0 ** torch.arange(PLACE // 4, device=x.device)
        sides.append(torch.cat([waves.sin(), waves.cos()], 1))
    rows, columns = sides
    down = rows.T[:, :, None].expand(-1, -1, len(columns))
    along = columns.T[:, None].expand(-1, len(rows), -1)
    return torch.cat([down, along])[None].expand(len(x), -1, -1, -1).to(x)


def tower_of(weights: dict[str, Tensor], config: LiteTowerConfig) -> LiteTower:
    """The tower with the state of the package: convolutions, each with its norm folded in."""
    tower = LiteTower(config)
    names = [name.removesuffix(".weight") for name, w in weights.items() if w.ndim == 4]
    norms = [name.removesuffix(".running_mean") for name in weights if "running_mean" in name]
    convs = [module for module in tower.modules() if isinstance(module, Conv)]
    for conv, name, norm in zip(convs, names, norms, strict=False):  # the last is the classifier's
        mean, var, scale, shift = (
            weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        gain = scale / (var + 1e-3).sqrt()
        with torch.no_grad():
            conv.weight.copy_(weights[f"{name}.weight"] * gain[:, None, None, None])
            conv.bias.copy_(shift - mean * gain)  # type: ignore[union-attr]
    return tower


AutoConfig.register(LiteTowerConfig.model_type, LiteTowerConfig, exist_ok=True)
AutoModel.register(LiteTowerConfig, LiteTower, exist_ok=True)
