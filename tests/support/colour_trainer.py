"""A trainer of two tiny detection domains, squares of a colour, and what tests ask of it."""

import torch

from tests.support.helpers import coloured_squares
from valora_data.schema import Domain, Split, Task
from valora_train.fusion.samples import DomainData
from valora_train.fusion.trainer import Trainer
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings, TrainSettings
from valora_train.tasks.registry import make_task

COLOURS = {"apple": "red", "sky": "blue"}


def make(
    base,
    steps=6,
    count=16,
    vision=False,
    batch_size=6,
    rehearsal_share=0.5,
    clip=1.0,
    precision="float32",
    device="cpu",
    threads=1,
    **more,
):
    """A trainer on a base model in a folder, and the model."""
    lora = LoraSettings(rank=4, alpha=8, vision_tower=vision, projector=vision)
    train = TrainSettings(
        steps=steps, steps_per_held=3, batch_size=batch_size, rehearsal_share=rehearsal_share,
        probe_steps=5, clip=clip, lora=lora, threads=threads, **more,
    )  # fmt: skip
    lmm = Lmm(ModelSettings(id=str(base), precision=precision, device=device), lora)
    data = {}
    for name, colour in COLOURS.items():
        domain = Domain(name, Task.DETECTION, (name,), f"detect {name}", 0.8)
        data[name] = DomainData(
            make_task(domain, HeadSettings(), lmm),
            coloured_squares(count, 1, name, colour),
            {split: coloured_squares(8, 2 + i, name, colour) for i, split in enumerate(
                (Split.VAL, Split.TEST))},
            lmm,
            mirror=True,
        )  # fmt: skip
    return Trainer(lmm, data, train), lmm


def train(trainer, domain, held=(), rehearse=False, seed=5):
    """Train adapter-1 on a domain; returns the losses."""
    losses = []
    trainer.train(
        "adapter-1", [domain], held=held, rehearse=rehearse, seed=seed,
        on_step=lambda step, steps, loss, figures: losses.append(loss),
    )  # fmt: skip
    return losses


def same(one, other):
    """Whether two snapshots are equal, to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
