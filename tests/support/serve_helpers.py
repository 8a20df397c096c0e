"""Adapters, heads and bundles with random weights, made as the factory makes them."""

import json
import shutil
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.support.engine_reference import auto_class
from tests.support.lmm_checkpoints import save_llava
from valora_data.contract.base_model import base_folder, base_hash
from valora_data.contract.bundle import write_manifest
from valora_data.contract.heads import write_head
from valora_data.contract.label_head import pooled_width
from valora_data.models.registry import architecture_of
from valora_serve.catalogue.adapters import CONFIG, WEIGHTS, ModelTargets
from valora_train.settings import HeadSettings
from valora_train.tasks.detection import BoxHeadModule

LANGUAGE = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
MLP = r".*language_model.*\.(gate_proj|up_proj|down_proj)"
VISION = r".*vision_tower.*\.(q_proj|k_proj|v_proj|out_proj)"
PROJECTOR = r".*multi_modal_projector\.linear_[12]"
EVERYTHING = f"{LANGUAGE}|{MLP}|{VISION}|{PROJECTOR}"


@lru_cache(maxsize=4)
def load_base(base, dtype=None):
    """The transformers model, shared: whoever changes it puts it back."""
    source = base_folder(base)
    model = auto_class(source).from_pretrained(source, dtype=dtype or "auto")
    return model.eval().requires_grad_(False)


def targets_of(model):
    """Targets of a transformers model, which may lie on the meta device."""
    return ModelTargets.of(model, architecture_of(model))


def make_adapter(
    folder, base, *, seed, rank=8, alpha=16, targets=LANGUAGE, strength=0.05, **options
):
    """Save a PEFT adapter whose A and B (of deviation `strength`) are random: one that acts."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, **options)
    peft = get_peft_model(load_base(base), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if ".lora_A." in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5, generator=generator)
            elif ".lora_B." in name:
                parameter.normal_(std=strength, generator=generator)
    peft.create_or_update_model_card = lambda _: None
    peft.save_pretrained(folder)
    peft.unload()
    return folder


def rewrite(folder, change=lambda name, tensor: tensor, rename=lambda name: name):
    """Change the tensors of an adapter, and their names."""
    file = folder / WEIGHTS
    tensors = {rename(k): change(k, v).contiguous() for k, v in load_file(file).items()}
    save_file(tensors, file)
    return folder


def configure(folder, **options):
    """Change the configuration of an adapter."""
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return folder


def make_adapters(folder, base, strength, **kinds):
    """Adapters by name: the seed, rank, alpha and targets of each, and pairs of more options."""
    return {
        name: make_adapter(
            folder / name, base, seed=seed, rank=rank, alpha=alpha, targets=targets,
            strength=strength, **dict(options),
        )
        for name, (seed, rank, alpha, targets, *options) in kinds.items()
    }  # fmt: skip


def hidden_width(base):
    """Width of a base model's last hidden states."""
    return int(AutoConfig.from_pretrained(base_folder(base)).get_text_config().hidden_size)


def grid_of(base):
    """Rows and columns of visual tokens of an image."""
    vision = AutoConfig.from_pretrained(base_folder(base)).vision_config
    side = vision.image_size // vision.patch_size
    return side, side


def make_box_head(file, width, labels, grid, *, seed):
    """Save a random box head that finds some boxes, as `valora_train` saves it."""
    head = BoxHeadModule(width, labels, grid)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.linear.weight.normal_(std=0.05, generator=generator)
        head.linear.bias.normal_(std=0.5, generator=generator)
        head.calibration.copy_(torch.tensor([1.3, -0.2]))
        head.threshold.fill_(0.2)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_head(file, head.stored(HeadSettings()))
    return file


def make_label_head(
    file, width, labels, *, seed, kind="classification", pooling="last", temperature=None
):
    """Save a random label head in the format of docs/reference/bundle.md."""
    generator = torch.Generator().manual_seed(seed)
    inputs = pooled_width(pooling, width)
    tensors = {
        "weight": torch.randn(len(labels), inputs, generator=generator) * 0.3,
        "bias": torch.randn(len(labels), generator=generator),
    }
    if pooling == "attention":
        tensors["query"] = torch.randn(width, generator=generator)
    if temperature is not None:
        tensors["temperature"] = torch.tensor([temperature])
    facts = {"kind": kind, "labels": json.dumps(labels), "pooling": pooling}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, facts)
    return file


@dataclass(frozen=True)
class DomainSpec:
    """A domain of a test bundle; `kind` None is one that generates, `adapter` None the base."""

    adapter: str | None
    kind: str | None = "detection"
    labels: list[str] = field(default_factory=lambda: ["thing"])
    pooling: str = "last"
    prompt: str = "Find things."
    temperature: float | None = None


DOMAINS = {
    "plates": DomainSpec("adapter-1", labels=["plate"], prompt="Find plates."),
    "traffic": DomainSpec("adapter-1", labels=["car", "bus", "bike"], prompt="Find traffic."),
    "scene": DomainSpec("adapter-2", "classification", ["forest", "street", "beach"],
                        prompt="Which scene?"),
    "crowd": DomainSpec("adapter-2", "counting", [str(n) for n in range(11)], "visual_mean",
                        "How many people?", 1.7),
    "caption": DomainSpec("adapter-2", None, [], prompt="Describe the image."),
}  # fmt: skip
ADAPTERS = {
    "adapter-1": {"rank": 8, "alpha": 16},
    "adapter-2": {"rank": 4, "alpha": 12, "targets": f"{LANGUAGE}|{MLP}", "use_rslora": True},
}
TASKS = {"yes_no": "vqa", "action": "video", None: "caption"}  # others: the kind of head itself


TENANTS = {
    "red": {"rank": 8, "targets": EVERYTHING},
    "green": {"rank": 4, "targets": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 7}},
    "blue": {"rank": 6, "targets": MLP, "use_rslora": True, "rank_pattern": {".*gate_proj": 3}},
    "ash": {"rank": 1, "targets": LANGUAGE, "alpha": 4},
    "elm": {"rank": 9, "targets": EVERYTHING, "alpha": 8},
}


def make_tenants(folder):
    """A small LLaVA, folders of adapters of it by name, each its own way, and a bundle."""
    base = str(save_llava(folder / "base", seed=5, side=16))
    adapters = {
        name: make_adapter(folder / "store" / name, base, seed=number, strength=0.3, **options)
        for number, (name, options) in enumerate(TENANTS.items())
    }
    return base, adapters, make_bundle(folder / "pack", base, name="pack", seed=3)


def make_bundle(folder, base, *, name="sample", version=1, domains=None, adapters=None, seed=0):
    """Write a bundle with random adapters and heads; what is in the folder is replaced.

    `adapters` are arguments of `make_adapter` by name.
    """
    domains = DOMAINS if domains is None else domains
    adapters = ADAPTERS if adapters is None else adapters
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    width, grid = hidden_width(base), grid_of(base)
    for number, (adapter, options) in enumerate(adapters.items()):
        make_adapter(folder / "adapters" / adapter, base, seed=100 * seed + number, **options)
    facts = {}
    for number, (domain, spec) in enumerate(domains.items()):
        file = folder / f"heads/{domain}.safetensors"
        chosen = 100 * seed + 50 + number
        if spec.kind == "detection":
            make_box_head(file, width, spec.labels, grid, seed=chosen)
        elif spec.kind is not None:
            options = {name: getattr(spec, name) for name in ("kind", "pooling", "temperature")}
            make_label_head(file, width, spec.labels, seed=chosen, **options)
        facts[domain] = {
            "task": TASKS.get(spec.kind, spec.kind),
            "metric": "f1@0.5" if spec.kind == "detection" else "top1",
            "required": 0.5,
            "accuracy": {"val": 0.7, "test": 0.6 + 0.01 * number, "test_ci95": [0.5, 0.7]},
            "head": None if spec.kind is None else f"heads/{domain}.safetensors",
            "threshold": 0.2 if spec.kind == "detection" else None,
            "status": "met", "adapter": spec.adapter, "labels": spec.labels, "prompt": spec.prompt,
        }  # fmt: skip
    manifest = {
        "name": name, "version": version, "strategy": "paper", "domains": facts,
        "attempts": len(domains), "lineage": {"mlflow_run_id": "none"},
        "base": {"id": base, "sha256": base_hash(base), "dtype": "float32"},
        "nms": {"nms_iou": HeadSettings.nms_iou, "most": HeadSettings.most},
        "adapters": {
            adapter: {
                "path": f"adapters/{adapter}",
                "rank": options.get("rank", 8),
                "domains": [d for d, spec in domains.items() if spec.adapter == adapter],
            }
            for adapter, options in adapters.items()
        },
    }  # fmt: skip
    write_manifest(folder, manifest)
    return folder
