"""Stages `alone-DOMAIN`: adapters of single domains, which fusions may take (`of_dedicated`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from valora_data.checkpoint import Checkpoint
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.cpu import usable_cores
from valora_data.schema import Split
from valora_train.errors import SettingsError
from valora_train.fusion.packing import DedicatedAdapter
from valora_train.fusion.samples import PSEUDO_LABELLED, LazyDomains, make_deterministic
from valora_train.fusion.state import (
    CHECKPOINT,
    SNAPSHOTS,
    read_snapshot,
    snapshot_file,
    write_snapshot,
)
from valora_train.fusion.trainer import DivergedError, Trainer
from valora_train.model.lmm import Lmm
from valora_train.processes import worker_processes
from valora_train.reporting.progress import Display, stopwatch
from valora_train.settings import Settings
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.fuse import DomainInputs, domain_facts, training_facts

ADAPTER = "adapter-1"
REACHED = "reached.json"
FILE = snapshot_file(ADAPTER, 1)
THREADS = 1  # CPU threads of a training: it depends on them, and must not depend on how many run
# Settings of the model that say how it is computed, not what: results of a GPU hold here, too.
ELSEWHERE = (
    "device", "precision", "shard", "batch_size", "keep_features", "gradient_checkpointing"
)  # fmt: skip


def measure_dedicated(
    settings: Settings, domains: Sequence[DomainInputs], display: Display
) -> list[DomainInputs]:
    """Train every domain in an adapter of its own, which its requirement follows."""
    share, work = settings.fusion.of_dedicated, Path(settings.paths.work)
    if share is None:
        return list(domains)
    _train_missing(settings, domains, display)
    found, without = [], []
    for item in domains:
        stage = dedicated_stage(settings, item)
        folder = stage.folder(work)
        reached = read_json(intact(folder / REACHED))
        if reached["val"] and reached["test"]:
            kept = (reached["val"], reached["test"], share)
            adapter = DedicatedAdapter(_key(stage), partial(read_snapshot, folder, FILE))
            found.append(replace(item, dedicated=kept, adapter=adapter))
        else:
            without.append(item.settings.name)
            found.append(item)
    if without:
        message = (
            f"in adapters of their own nothing is reached by {', '.join(without)}, so that a share "
            "of it asks for nothing"
        )
        if settings.fusion.unreachable == "fail":
            raise SettingsError(
                f"{message}: raise train.steps or lower train.lr, set fusion.of_dedicated=null, or "
                "let contracts count there with fusion.unreachable=keep"
            )
        display.note("alone", f"{message}: contracts count instead")
    return found


def dedicated_stage(settings: Settings, item: DomainInputs) -> Stage:
    """The stage that trains a domain alone."""
    training, base = training_facts(settings), settings.model.id
    for key in ELSEWHERE:
        training["model"].pop(key, None)
    training["train"]["threads"] = THREADS
    if not settings.train.augment.views:  # augmented views depend on it
        del training["train"]["seed"]
    training |= {"base": base_hash(base), "processor": processor_hash(base)}
    parts = {PSEUDO_LABELLED: item.distilled, str(Split.VAL): item.data, str(Split.TEST): item.data}
    samples = {part: digest(folder / part) for part, folder in parts.items()}
    domain = domain_facts(item.settings) | samples
    values = {"training": training, "seed": settings.train.seed, "domain": domain}
    return Stage(f"alone-{item.settings.name}", 1, values, {}, resumable=True)


def _key(stage: Stage) -> str:
    """Names the training in the attempts of a fusion, as in earlier versions."""
    of = stage.settings
    facts = [2, of["training"], [of["domain"]], "joint", {}, of["seed"]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _train_missing(settings: Settings, domains: Sequence[DomainInputs], display: Display) -> None:
    work = Path(settings.paths.work)
    left = [item for item in domains if not dedicated_stage(settings, item).is_done(work)]
    names = [item.settings.name for item in left]
    if not left:
        return
    count = min(settings.fusion.processes or usable_cores(), len(left))
    with display.work("alone", f"{len(left)} trainings") as on_step, stopwatch() as seconds:
        if count == 1:
            worker = Worker(settings, left)
            for done, name in enumerate(names, start=1):
                worker.run(name)
                on_step(done, len(names), math.nan)
        else:
            with worker_processes(count, "fusion.processes", _begin, settings, left) as executor:
                jobs = [executor.submit(_run, name) for name in names]
                for done, job in enumerate(as_completed(jobs), start=1):
                    job.result()
                    on_step(done, len(names), math.nan)
    display.done("alone", ", ".join(names), seconds())


class Worker:
    """Trains domains one after the other, on a base model that is loaded once."""

    def __init__(self, settings: Settings, domains: Sequence[DomainInputs]) -> None:
        make_deterministic(THREADS)
        self.settings = settings
        self.inputs = {item.settings.name: item for item in domains}
        self.lmm = Lmm(settings.model, settings.train.lora)
        train = replace(settings.train, threads=THREADS)
        data = LazyDomains(lambda name: self.inputs[name].load(settings, self.lmm))
        self.trainer = Trainer(self.lmm, data, train)

    def run(self, name: str) -> None:
        """Run the stage of a domain, or wait for another process that runs it."""
        stage = dedicated_stage(self.settings, self.inputs[name])
        stage.run(Path(self.settings.paths.work), partial(self._build, name), wait=True)

    def _build(self, name: str, folder: Path) -> None:
        trainer, train = self.trainer, self.settings.train
        for adapter in trainer.adapters:
            trainer.close(adapter)
        torch.manual_seed(train.seed)
        trainer.open(ADAPTER, train.seed)
        checkpoint = Checkpoint(folder / CHECKPOINT, train.checkpoint_seconds)
        reached: dict[str, float | None] = {"val": None, "test": None}
        with suppress(DivergedError):
            trainer.train(
                ADAPTER, (name,), held=(), rehearse=False, seed=train.seed, checkpoint=checkpoint
            )
            for split in (Split.VAL, Split.TEST):  # on validation, the head is calibrated
                accuracy = trainer.evaluate(ADAPTER, name, split).accuracy
                reached[str(split)] = None if math.isnan(accuracy) else accuracy
            (folder / SNAPSHOTS).mkdir(exist_ok=True)
            write_snapshot(folder, FILE, trainer.snapshot(ADAPTER))
        checkpoint.discard()
        write_json(folder / REACHED, reached)


_workers: list[Worker] = []  # the worker of a process that trains


def _begin(settings: Settings, domains: Sequence[DomainInputs]) -> None:
    _workers.append(Worker(settings, domains))


def _run(name: str) -> None:
    _workers[0].run(name)
