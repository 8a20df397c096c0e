"""What one process of a team, or a single one, learns: `python FILE BASE SHARD FOLDER DEVICE`.

`tests/e2e/valora_train/test_team.py` runs it on CPUs,
`tests/gpu/valora_train/model/test_team_gpu.py` on GPUs.
"""

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.tensor import DTensor

from tests.support.forked import Forked, finish
from tests.support.helpers import coloured_squares
from valora_data.schema import Answer, Domain, Split, Task
from valora_train.fusion.samples import DomainData
from valora_train.fusion.trainer import Trainer
from valora_train.model import distributed
from valora_train.model.lmm import Lmm
from valora_train.settings import HeadSettings, LoraSettings, ModelSettings, TrainSettings
from valora_train.tasks.registry import make_task

LABELS = ("no", "yes")


def learn(base, shard, folder, device="cpu"):
    """Train a written, a chosen and a detected domain, and save what came out."""
    torch.set_num_threads(1)
    accelerator = distributed.start(device)
    # A batch of 5: the shares are uneven, and of some pieces one process has none.
    train = TrainSettings(steps=4, steps_per_held=2, batch_size=5, micro_batch=1)
    lora = LoraSettings(rank=4, alpha=8)
    lmm = Lmm(ModelSettings(id=base, shard=shard, device=device), lora)
    assert lmm.sharded == (shard and accelerator.num_processes > 1)
    if lmm.sharded:
        parted = [p for p in lmm.model.parameters() if isinstance(p, DTensor)]
        mine = sum(p.to_local().numel() for p in parted)
        assert 0 < mine <= sum(p.numel() for p in parted) / 2 + 64
    data = {name: domain(name, lmm) for name in ("says", "sees", "chooses")}
    trainer = Trainer(lmm, data, train, accelerator)
    trainer.open("adapter-1", seed=3)
    losses = []
    held = []
    reached = {}
    for name in data:
        trainer.train(
            "adapter-1", [name], held=held, rehearse=True, seed=5,
            on_step=lambda step, steps, loss, figures: losses.append(loss),
        )  # fmt: skip
        held.append(name)
        reached[name] = trainer.evaluate("adapter-1", name, Split.VAL)
    state = trainer.snapshot("adapter-1")
    kept = {key: value.cpu() for key, value in state.items() if key.startswith(("lora", "head"))}
    kept["losses"] = torch.tensor(losses)
    kept["accuracy"] = torch.tensor([one.accuracy for one in reached.values()])
    save_file(kept, folder / f"{accelerator.process_index}.safetensors")
    said = [one.text for one in reached["says"].predictions]
    assert len(said) == 7 and distributed.agree(said) == said


def domain(name, lmm):
    task = {"sees": Task.DETECTION, "chooses": Task.VQA, "says": Task.CAPTION}[name]
    labels = {"sees": ("apple",), "chooses": LABELS, "says": ()}[name]
    made = Domain(name, task, labels, f"{name} what", 0.8)

    def samples(count, seed):
        found = coloured_squares(count, seed, "apple", "red")
        for number, sample in enumerate(found):
            if task is Task.VQA:
                answer = Answer(answers=(LABELS[number % 2],))
            elif task is Task.CAPTION:
                answer = Answer(captions=(("a b", "b b a")[number % 2],))
            else:
                continue
            object.__setattr__(sample, "answer", answer)
        return found

    return DomainData(
        make_task(made, HeadSettings(max_tokens=4), lmm),
        samples(12, 1),
        {Split.VAL: samples(7, 2)},
        lmm,
        mirror=False,
    )


def forked_team(module, arguments, folder):
    """Two processes that run a module on the CPU, as `torchrun` would start them."""
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    ranks = [os.environ | shared | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(2)]
    logs = [folder / f"said-{rank}.txt" for rank in range(2)]
    return [Forked(module, arguments, folder, *one) for one in zip(logs, ranks, strict=True)]


def assert_two_learn_what_one_does(base, shard, alone, folder, device="cpu"):
    arguments = [str(base), str(int(shard)), str(folder), device]
    if device == "cpu":
        team = forked_team("tests.support.team_learning", arguments, folder)
    else:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "2", __file__, *arguments]  # fmt: skip
        team = [subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2],
        )]  # fmt: skip
    for process in team:
        finish(process, 600)
    first, second = (load_file(folder / f"{rank}.safetensors") for rank in range(2))
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=2e-3, atol=2e-4, msg=key)


if __name__ == "__main__":
    learn(sys.argv[1], sys.argv[2] == "1", Path(sys.argv[3]), sys.argv[4])
    distributed.end_process()
