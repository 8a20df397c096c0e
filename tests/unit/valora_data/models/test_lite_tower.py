"""The tower of valora-photo against EfficientNet-Lite0 written out, with norms of its own."""

import torch
from torch.nn import functional as F

from valora_data.models.lite_tower import BLOCKS, LiteTowerConfig, tower_of


def package_weights():
    """Random weights under names like the package's: each convolution is followed by its norm."""
    generator, weights, count = torch.Generator().manual_seed(0), {}, 0

    def layer(outputs, inputs, kernel):
        nonlocal count
        count += 1
        size, scale = (outputs, inputs, kernel, kernel), (inputs * kernel**2) ** -0.5
        weights[f"conv{count}.weight"] = torch.randn(size, generator=generator) * scale
        norm = torch.rand((4, outputs), generator=generator) + 0.5
        for part, row in zip(("weight", "bias", "running_mean", "running_var"), norm, strict=True):
            weights[f"norm{count}.{part}"] = row

    layer(32, 3, 3)
    channels = 32
    for repeats, kernel, _, expansion, outputs in BLOCKS:
        for _ in range(repeats):
            wide = channels * expansion
            if expansion > 1:
                layer(wide, channels, 1)
            layer(wide, 1, kernel)
            layer(outputs, wide, 1)
            channels = outputs
    return weights


def features(weights, x):
    """Features of strides 16 and 32 with the padding of TensorFlow ("same")."""
    count = 0

    def layer(x, stride=1, act=True):
        nonlocal count
        count += 1
        w = weights[f"conv{count}.weight"]
        kernel = w.shape[-1]
        edge = max((-(-x.shape[-1] // stride) - 1) * stride + kernel - x.shape[-1], 0)
        x = F.pad(x, (edge // 2, edge - edge // 2) * 2)
        x = F.conv2d(x, w, stride=stride, groups=1 if w.shape[1] > 1 or kernel == 1 else len(w))
        parts = ("running_mean", "running_var", "weight", "bias")
        x = F.batch_norm(x, *(weights[f"norm{count}.{part}"] for part in parts), eps=1e-3)
        return x.clamp(0, 6) if act else x

    x, fine = layer(x, 2), None
    for repeats, _, first, expansion, outputs in BLOCKS:
        for repeat in range(repeats):
            y = layer(x) if expansion > 1 else x
            y = layer(layer(y, first if repeat == 0 else 1), act=False)
            x = x + y if y.shape == x.shape and repeat else y
        fine = x if outputs == 112 else fine
    return fine, x


def test_the_features_are_those_of_the_network():
    weights, side = package_weights(), 96
    pixels = torch.rand((2, 3, side, side), generator=torch.Generator().manual_seed(1)) * 2 - 1
    found = tower_of(weights, LiteTowerConfig())(pixels).last_hidden_state
    fine, coarse = features(weights, pixels)
    wanted = torch.cat([coarse, F.pixel_unshuffle(fine, 2)], 1).flatten(2).transpose(1, 2)
    wanted = F.layer_norm(wanted, wanted.shape[-1:])
    assert found.shape == (2, (side // 32) ** 2, LiteTowerConfig().hidden_size)
    torch.testing.assert_close(found[..., :768], wanted, atol=2e-2, rtol=1e-2)  # bfloat16's
    torch.testing.assert_close(found, found.bfloat16().float(), atol=0, rtol=0)
    places = found[..., 768:]
    assert len(places[0].unique(dim=0)) == places.shape[1]  # every cell has another place
    torch.testing.assert_close(places[0], places[1], atol=0, rtol=0)


def test_a_frozen_tower_follows_its_weights_and_reads_images_of_a_batch_alike():
    tower = tower_of(package_weights(), LiteTowerConfig())
    pixels = torch.rand((2, 3, 64, 64)) * 2 - 1
    for _ in range(2):
        wanted = tower.requires_grad_(True)(pixels).last_hidden_state
        found = tower.requires_grad_(False)(pixels).last_hidden_state
        torch.testing.assert_close(found, wanted.detach(), atol=0.1, rtol=0.05)  # bfloat16's
        alone = [tower(row[None]).last_hidden_state[0] for row in pixels]
        torch.testing.assert_close(torch.stack(alone), found, atol=0, rtol=0)
        with torch.no_grad():
            tower.stem.weight.mul_(-1)
