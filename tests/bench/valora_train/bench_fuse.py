"""The whole factory on true 7B shapes with random weights: seconds and memory.

For each shape and each precision of the base model: data, a function as a teacher, distillation,
three domains with a rolled-back attempt, export, gate, and the golden examples answered by the
serving engine. Every part runs in a process of its own, so that its memory is its own. Random
weights cost what trained ones do, and their accuracy means nothing: two domains ask for nothing,
the third for more than is possible, so that its attempt on the shared adapter is rolled back.

Needs no Hydra. `--tiny` tries everything on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from tests.bench.valora_serve.harness import table
from tests.bench.valora_train.bench_train import checkpoint as llava_checkpoint
from tests.support.lmm_checkpoints import (
    QWEN_TEMPLATE,
    QWEN_TOKENS,
    _qwen_ids,
    _tokenizer,
    save_qwen2_5_vl,
)
from valora_data.schema import Task
from valora_data.sources.scenes.builtin import builtin_domain
from valora_train.reporting.progress import Display
from valora_train.settings import (
    DomainSettings,
    FusionSettings,
    LoraSettings,
    ModelSettings,
    PathSettings,
    Settings,
    SourceSettings,
    TaskSettings,
    TeacherSettings,
    TrainSettings,
)

DOMAINS = {
    "plant_type": Task.CLASSIFICATION,
    "street_presence": Task.VQA,
    "person": Task.DETECTION,
}
IMPOSSIBLE = "person"
SHAPES = ("llava", "qwen2.5-vl")


def guess(samples: list[Any]) -> list[str]:
    """A teacher: one of the labels of `plant_type`, by the sample's id."""
    labels = builtin_domain(DOMAINS["plant_type"], "plant_type").labels
    return [labels[hashlib.sha256(one.id.encode()).digest()[0] % len(labels)] for one in samples]


def settings_of(given: argparse.Namespace, base: Path, folder: Path) -> Settings:
    """The settings of `train=large`, with fewer steps and samples."""
    counts: Any = {"train": given.samples, "unlabelled": given.samples,
                   "val": given.samples, "test": given.samples}  # fmt: skip
    domains = {
        name: DomainSettings(
            name=name,
            task=task,
            labels=list(builtin_domain(task, name).labels),
            prompt=builtin_domain(task, name).prompt,
            required=0.999 if name == IMPOSSIBLE else 0.001,
            teacher=f"{__spec__.name}:guess" if name == "plant_type" else "labels",
            source=SourceSettings(kind="scenes", counts=counts),
        )
        for name, task in DOMAINS.items()
    }
    model = ModelSettings(
        id=str(base), device="cpu" if given.tiny else "cuda",
        dtype="float32" if given.tiny else "bfloat16",
        quantize=None if given.quantize == "none" else given.quantize,
        batch_size=8, coordinate_step=1, attention="sdpa", gradient_checkpointing=True,
        keep_features=False, coordinates="pixels" if given.shape == "qwen2.5-vl" else "grid1000",
    )  # fmt: skip
    train = TrainSettings(
        steps=given.steps, steps_per_held=given.steps // 2, batch_size=16, micro_batch=4,
        group_by_length=True, lr=2e-4, head_lr=1e-3, probe_steps=50, flip=False,
        threads=1 if given.tiny else 0, lora=LoraSettings(rank=16, alpha=32),
    )  # fmt: skip
    return Settings(
        task=TaskSettings(name="large"),
        domains=domains,
        teacher=TeacherSettings(kind="function"),
        model=model,
        fusion=FusionSettings(
            strategy="rehearsal", margin=0.0, head_only=False, unreachable="keep"
        ),
        train=train,
        paths=PathSettings(str(folder / "work"), str(folder / "bundles"),
                           f"sqlite:///{folder}/mlflow.db"),
    )  # fmt: skip


# --- checkpoints ----------------------------------------------------------------------------------


def save_base(shape: str, folder: Path, tiny: bool) -> None:
    """Write a base model of a shape, with random weights made on the GPU."""
    if shape == "llava":
        llava_checkpoint(folder, tiny)
    elif tiny:
        save_qwen2_5_vl(folder)
    else:
        _save_qwen_7b(folder)


def _save_qwen_7b(folder: Path) -> None:
    """Qwen2.5-VL-7B's shape: 28 layers of width 3584, grouped-query attention, a tower of 32."""
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )
    from transformers.initialization import no_init_weights

    tokenizer = _tokenizer(QWEN_TOKENS)
    text = {
        "model_type": "qwen2_5_vl_text", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6,
                            "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "out_hidden_size": 3584, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **_qwen_ids(tokenizer)
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), no_init_weights():
            model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    sizes: dict[str, Any] = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    # An image of at least 336 × 336 pixels: 144 visual tokens.
    limits = {"shortest_edge": 336 * 336, "longest_edge": 1024 * 1024}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=dict(limits), **sizes),
        video_processor=Qwen2VLVideoProcessor(size=dict(limits), **sizes),
        tokenizer=tokenizer,
        chat_template=QWEN_TEMPLATE.replace("VIDEO", "<|vision_start|><|video_pad|><|vision_end|>"),
    ).save_pretrained(folder)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)


# --- parts, each in a process of its own ----------------------------------------------------------


def make(given: argparse.Namespace) -> dict[str, Any]:
    """Write the checkpoint."""
    save_base(given.shape, given.base, given.tiny)
    files = list(given.base.glob("model*.safetensors"))
    return {"gigabytes": sum(file.stat().st_size for file in files) / 1e9}


def run(given: argparse.Namespace) -> dict[str, Any]:
    """The factory; seconds of its stages, and most memory."""
    from accelerate import Accelerator

    from valora_train.checks import check, check_with_libraries
    from valora_train.pipeline import Pipeline
    from valora_train.stage import read_json
    from valora_train.stages import export

    if given.limit and not given.tiny:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 1e9 / total)
    settings = settings_of(given, given.base, given.folder)
    check(settings)
    check_with_libraries(settings)
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(name: str):
        began = time.monotonic()
        yield
        seconds[name] = time.monotonic() - began

    display = Display(Console(width=110))
    pipeline = Pipeline(settings, display, Accelerator())
    with timed("before fusion"):
        domains = [pipeline.prepare_domain(domain) for domain in settings.chosen()]
    with timed("fuse"):
        fused = pipeline.fuse(settings, domains)
    with timed("export"):
        bundle, _ = export.export_bundle(settings, domains, fused)
    result = read_json(fused / "fusion.json")
    gpu = 0 if given.tiny else torch.cuda.max_memory_allocated()
    reserved = 0 if given.tiny else torch.cuda.max_memory_reserved()
    return {
        "stages": seconds,
        "attempts": [
            {"name": f"{' + '.join(one['new'])} → {one['adapter']}", "verdict": one["verdict"],
             "held": len(one["held"]), "seconds": took}
            for one, took in zip(result["attempts"], result["seconds"], strict=True)
        ],
        "gpu": gpu,
        "reserved": reserved,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bundle": str(bundle.folder),
    }  # fmt: skip


def serve(given: argparse.Namespace) -> dict[str, Any]:
    """The engine answers the golden examples."""
    from valora_serve.engine.async_engine import AsyncEngine
    from valora_serve.engine.engine import Engine
    from valora_serve.engine.settings import EngineSettings
    from valora_serve.errors import AdapterError
    from valora_serve.server.loading.golden import replay
    from valora_serve.server.loading.startup import follow_bundles

    bundle = given.folder / "bundles" / "large"
    began = time.monotonic()
    settings = EngineSettings(
        base=str(given.base), device="cpu" if given.tiny else "cuda",
        dtype="float32" if given.tiny else "bfloat16",
        pages=2048, compile=False, graphs=False, profile=False,
    )  # fmt: skip

    async def ask() -> int | str:
        engine = AsyncEngine(Engine(follow_bundles(settings, [bundle])))
        try:
            await engine.load("bundle", bundle)
            return await replay(engine, bundle)
        except AdapterError as error:  # random heads may lie at a tie
            return str(error)
        finally:
            await engine.close()

    answered = asyncio.run(ask())
    gpu = 0 if given.tiny else torch.cuda.max_memory_allocated()
    return {"golden": answered, "seconds": time.monotonic() - began, "gpu": gpu}


PARTS = {"make": make, "run": run, "serve": serve}


def start(part: str, given: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own; its figures."""
    out = given.folder / f"{part}.json"
    command = [
        sys.executable, "-m", __spec__.name, "--part", part, "--shape", given.shape,
        "--quantize", given.quantize, "--base", given.base, "--folder", given.folder,
        "--steps", given.steps, "--samples", given.samples, "--limit", given.limit,
        *(["--tiny"] if given.tiny else []),
    ]  # fmt: skip
    began = time.monotonic()
    if subprocess.run([str(word) for word in command], check=False).returncode:
        sys.exit(f"{given.shape} {given.quantize}: {part} has failed, as said above")
    found = json.loads(out.read_text()) | {"process": time.monotonic() - began}
    print(f"--- {given.shape} {given.quantize} {part}: {found['process']:.1f} s", flush=True)
    return found


def _silence_libraries() -> None:
    """Keep progress bars and warnings of libraries out of the output."""
    import warnings

    from transformers.utils import logging

    warnings.filterwarnings("ignore")
    os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_PROGRESS_BARS="1")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    """Run every part for every shape and precision, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--shape", nargs="+", default=["llava"], choices=SHAPES)
    parser.add_argument("--quantize", nargs="+", default=["none", "nf4"], choices=("none", "nf4"))
    parser.add_argument("--steps", type=int, default=6, help="steps of an attempt")
    parser.add_argument("--samples", type=int, default=64, help="samples of each split")
    parser.add_argument("--limit", type=float, default=0, help="GB of the GPU for `nf4`; 0: all")
    parser.add_argument("--skip", nargs="*", default=[], choices=tuple(PARTS))
    parser.add_argument("--base", type=Path, help="where the checkpoint is, or goes")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        _silence_libraries()
        given.shape, given.quantize = given.shape[0], given.quantize[0]
        found = PARTS[given.part](given)
        (given.folder / f"{given.part}.json").write_text(json.dumps(found))
        return
    rows = []
    for shape in given.shape:
        with tempfile.TemporaryDirectory() as place:
            base = given.base or Path(place) / "base"
            for quantize in given.quantize:
                folder = Path(place) / quantize
                folder.mkdir()
                one = argparse.Namespace(**vars(given) | {
                    "shape": shape, "quantize": quantize, "base": base, "folder": folder,
                    "limit": given.limit if quantize == "nf4" else 0,
                })  # fmt: skip
                found: dict[str, Any] = {}
                for part in PARTS:
                    if part in given.skip or (part == "make" and base.is_dir()):
                        continue
                    found[part] = start(part, one)
                print(json.dumps(found), flush=True)
                if "run" in found:
                    seconds = fmean(one["seconds"] for one in found["run"]["attempts"])
                    memory = found["run"]["gpu"] / 1e9
                    rows.append([f"{shape}, {quantize}", seconds, found["run"]["process"], memory])
    table("The factory on a 7B shape with random weights: three domains, one rolled back",
          ["weights", "mean attempt, s", "whole run, s", "GPU memory, GB"], rows)  # fmt: skip


if __name__ == "__main__":
    main()
