"""The tower of valora-photo with the weights of EfficientNet-Lite0's package."""

from __future__ import annotations

from torch import Tensor, no_grad

from valora_data.models.lite_tower import Conv, LiteTower, LiteTowerConfig


def tower_of(weights: dict[str, Tensor], config: LiteTowerConfig) -> LiteTower:
    """Return the tower with the weights of the package, norms folded in.

    Args:
        weights: State of EfficientNet-Lite0: convolutions, each followed by its norm.
        config: Shape of the tower.
    """
    tower = LiteTower(config)
    names = [name.removesuffix(".weight") for name, w in weights.items() if w.ndim == 4]
    norms = [name.removesuffix(".running_mean") for name in weights if "running_mean" in name]
    convs = [module for module in tower.modules() if isinstance(module, Conv)]
    for conv, name, norm in zip(convs, names, norms, strict=False):  # the last is the classifier's
        mean, var, scale, shift = (
            weights[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
        )
        gain = scale / (var + 1e-3).sqrt()
        with no_grad():
            conv.weight.copy_(weights[f"{name}.weight"] * gain[:, None, None, None])
            conv.bias.copy_(shift - mean * gain)  # type: ignore[union-attr]
    return tower
