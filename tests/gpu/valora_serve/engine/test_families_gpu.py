"""Published shapes with random weights: the engine in bf16 against transformers and PEFT.

SmolVLM2-500M, InternVL3-2B, Qwen2.5-VL-3B, Qwen3-VL-2B and Gemma-3-4B in all but the vocabulary.
"""

import gc
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.parity.valora_serve.engine.test_engine import Forced
from tests.parity.valora_serve.model.test_lmm import TARGETS
from tests.support.engine_reference import (
    Reference,
    ask,
    assert_empty,
    auto_class,
    make_engine,
    noise,
    run,
)
from tests.support.lmm_checkpoints import CHECKPOINTS, randomize
from tests.support.serve_helpers import load_base, make_adapter
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = pytest.mark.gpu

LIMITS = (1.5, 2.0)
"""Root mean square and largest error of log probabilities against fp32, as multiples of those of
transformers and PEFT in bf16, which do not merge."""


def decoder(width, inner, layers, heads, kv_heads, theta, head_dim, **rope):
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "max_position_embeddings": 8192, "rope_parameters": {"rope_theta": theta, **rope},
    }  # fmt: skip


def tower(width, inner, layers, image_size, patch_size):
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": width // 64, "image_size": image_size, "patch_size": patch_size,
    }  # fmt: skip


def qwen(text, vision, size):
    """Qwen's towers have 16 heads, and end in the decoder's width."""
    vision |= {"num_heads": 16, "out_hidden_size": text["hidden_size"]}
    image = {"patch_size": vision["patch_size"], "size": size}
    sizes = {"image_processor": image, "video_processor": image}
    return {"text_config": text, "vision_config": vision}, sizes


# What the tiny checkpoint's config.json and processor_config.json have instead.
SHAPES = {
    "smolvlm": (
        {
            "text_config": decoder(960, 2560, 32, 15, 5, 1e5, 64),
            "vision_config": tower(768, 3072, 12, 512, 16),
            "scale_factor": 4,
        },
        {
            "image_processor": {
                "size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512},
            },
            "image_seq_len": 64,
        },
    ),
    "internvl": (
        {
            "text_config": decoder(1536, 8960, 28, 12, 2, 1e6, 128) | {"layer_types": None},
            "vision_config": tower(1024, 4096, 24, [448, 448], [14, 14])
            | {"attention_bias": True},
            "image_seq_length": 256,
        },
        {
            "image_processor": {"size": {"height": 448, "width": 448}, "max_patches": 12},
            "image_seq_length": 256,
        },
    ),
    "qwen2_5_vl": qwen(
        decoder(2048, 11008, 36, 16, 2, 1e6, 128, mrope_section=[16, 24, 24])
        | {"tie_word_embeddings": True, "layer_types": None},
        {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14,
            "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
        },
        {"shortest_edge": 56**2, "longest_edge": 3584**2},
    ),
    "qwen3_vl": qwen(
        decoder(2048, 6144, 28, 16, 8, 5e6, 128, mrope_section=[24, 20, 20]),
        {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
        {"shortest_edge": 256**2, "longest_edge": 4096**2},
    ),
    "gemma3": (
        {
            "text_config": {
                "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                "query_pre_attn_scalar": 256, "sliding_window": 1024,
                "max_position_embeddings": 8192,
                "layer_types": [
                    "sliding_attention" if i % 6 < 5 else "full_attention" for i in range(34)
                ],
            },
            "vision_config": tower(1152, 4304, 27, 896, 14) | {"num_attention_heads": 16},
            "mm_tokens_per_image": 256,
        },
        {
            "image_processor": {"size": {"height": 896, "width": 896}},
            "image_seq_length": 256,
        },
    ),
}  # fmt: skip


def update(place, changes):
    """Change some values of a JSON file, also within its parts."""

    def merged(old, new):
        return {**old, **{key: merged(old.get(key, {}), value) if isinstance(value, dict) else value
                          for key, value in new.items()}}  # fmt: skip

    place.write_text(json.dumps(merged(json.loads(place.read_text()), changes)))


def save(folder, family, shapes, device):
    """Save a family's checkpoint with other shapes, in bf16, and two adapters of all layers."""
    base = Path(CHECKPOINTS[family](folder / "base"))
    config, processor = shapes
    tied = config["text_config"].get("tie_word_embeddings")
    update(base / "config.json", config | ({"tie_word_embeddings": True} if tied else {}))
    update(base / "processor_config.json", processor)
    with torch.device(device):
        model = auto_class(base).from_config(AutoConfig.from_pretrained(base), dtype=torch.bfloat16)
    randomize(model, seed=3)
    model.save_pretrained(base)
    del model
    ranks = {"wide": 16, "narrow": 5}
    adapters = {
        name: make_adapter(folder / name, str(base), seed=rank, rank=rank, alpha=2 * rank,
                           targets=TARGETS[family])
        for name, rank in ranks.items()
    }  # fmt: skip
    load_base.cache_clear()
    return str(base), adapters


def prompts(name):
    """Words, an image, one of several crops, and two, for an adapter."""
    cases = {
        "words": ("What is there to see?", []),
        "image": ("Say what it is.", [(300, 300)]),
        "crops": ("How many are there?", [(800, 400)]),
        "two": ("Which one is larger?", [(120, 260), (330, 250)]),
    }
    params = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    return [
        Request(f"{case}-{name}", model=name, messages=ask(text, images=len(sizes)),
                images=[noise(*size, seed=sum(size)) for size in sizes], sampling=params)
        for case, (text, sizes) in cases.items()
    ]  # fmt: skip


def measure(folder, family, shapes, device):
    """Errors of the engine and of transformers against fp32 by mode, and what adapters change."""
    base, adapters = save(folder, family, shapes, device)
    engine = make_engine(
        base, adapters, fresh=True, device=device, dtype="bfloat16", policy="valora", pages=1500,
        max_tokens=2048, chunk=700, prefix_cache=False, image_cache_bytes=0,
    )  # fmt: skip
    wide = next(key for key in engine.registry.ranks if key.startswith("wide"))
    for key in engine.registry.ranks:
        assert engine.adapters.load(key)
    engine.warm_up()
    own = prompts("wide")
    by_name = [prompts(None), own, prompts("narrow")]
    everyone = [one for alike in zip(*by_name, strict=True) for one in alike]
    said = []
    for mode, asked in ((Mode.UNMERGED, everyone), (Mode.MIXTURE, everyone), (Mode.MERGED, own)):
        merged = None if mode is Mode.UNMERGED else wide
        engine.policy = Forced(lambda _, told=(mode, merged): told, engine)
        found = run(engine, asked)
        assert set(engine.policy.modes) == {mode}
        for one in asked:
            got = found[one.id]
            assert got.error is None
            answer = torch.tensor([item.chosen.logprob for item in got.logprobs])
            likely = torch.cat([torch.from_numpy(got.prompt.logprobs), answer])
            said.append((mode, one, got.tokens, likely))
    assert_empty(engine)
    engine.close()
    engine.lmm.linears.release()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    reference = Reference(base, adapters, torch.bfloat16, device)
    rounded = [reference.score(one, tokens) for _, one, tokens, _ in said]
    reference.model.float()
    exact = [reference.score(one, tokens) for _, one, tokens, _ in said]
    errors = {mode: ([], []) for mode in Mode}
    for (mode, _, _, likely), near, true in zip(said, rounded, exact, strict=True):
        errors[mode][0].append(likely - true)
        errors[mode][1].append(near - true)
    # The first three are about the same words, with the base model and each adapter.
    first = [scores[:-8] for scores in exact[:3]]
    changed = min(rms(first[0] - first[1]), rms(first[0] - first[2]), rms(first[1] - first[2]))
    del reference
    gc.collect()
    torch.cuda.empty_cache()
    return {mode: [torch.cat(part) for part in both] for mode, both in errors.items()}, changed


def rms(values):
    return values.square().mean().sqrt()


@pytest.fixture(scope="module", params=list(SHAPES))
def measured(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return measure(folder, request.param, SHAPES[request.param], "cuda")


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_rounds_as_transformers_and_peft(measured, mode):
    errors, changed = measured
    found, unit = errors[mode]
    ratios = (rms(found) / rms(unit), found.abs().max() / unit.abs().max())
    print(f"{mode}: {rms(unit):.4f} and {unit.abs().max():.3f} × {ratios}, {changed:.3f} changed")
    assert all(one <= limit for one, limit in zip(ratios, LIMITS, strict=True))
    assert changed > 5 * rms(found)  # what another adapter would change
