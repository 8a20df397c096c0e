"""Trainings of a study, in several processes: each is a line of `.valora/trials.jsonl`, and kept.

A line is named by a hash of all that its result depends on, so that a study that was killed goes on
where it was, and one with more seeds trains only what is new.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from rich.console import Console

from valora_data.schema import Split
from valora_train.checks import check, check_with_libraries
from valora_train.cli import config_folder
from valora_train.fusion.packing import DedicatedAdapter, Packing, make_plan
from valora_train.fusion.requirement import Requirement
from valora_train.fusion.state import SNAPSHOTS, FusionState, read_snapshot, write_snapshot
from valora_train.fusion.trainer import DivergedError
from valora_train.pipeline import Pipeline
from valora_train.processes import worker_processes
from valora_train.reporting.progress import Display
from valora_train.settings import Settings, from_config
from valora_train.stages.dedicated import ADAPTER, Worker, dedicated_stage
from valora_train.stages.fuse import DomainInputs

COMBINATIONS = ("linear", "ties", "dare_linear", "dare_ties", "svd")  # as PEFT names them
DENSITY = 0.5  # share of the weights that TIES and DARE keep
FISHER_BATCHES = 32
FOLDER, RESULTS = "trials", "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """One training (or several, of one method) with its measurements."""

    method: str
    domains: tuple[str, ...]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)


def prepared(overrides: Sequence[str]) -> tuple[Settings, list[DomainInputs]]:
    """The settings of `valora-train`, and its domains with data, small models and labels."""
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        settings = from_config(compose("config", overrides=["command=fuse", *overrides]))
    check(settings)
    check_with_libraries(settings)
    display = Display(Console(width=160))
    with display():
        pipeline = Pipeline(settings, display, Accelerator())
        return settings, [pipeline.prepare_domain(domain) for domain in settings.chosen()]


def run_trials(
    settings: Settings, domains: Sequence[DomainInputs], trials: Iterable[Trial], processes: int
) -> list[dict[str, Any]]:
    """Train what has no result yet, and return all results in the order of the trials."""
    file = Path(settings.paths.work) / RESULTS
    known = {}
    if file.is_file():
        lines = [line for line in file.read_text().splitlines() if line.endswith("}")]
        known = {row["trial"]: row for row in map(json.loads, lines)}
    keys = {_key(settings, domains, trial): trial for trial in trials}
    left = {key: trial for key, trial in keys.items() if key not in known}
    order = sorted(left, key=lambda key: -len(left[key].domains))  # the longest first
    count, began = min(processes, len(left)), time.monotonic()
    if left:
        with (
            worker_processes(count, "--processes", _begin, settings, domains) as executor,
            file.open("a") as out,
        ):
            jobs = {executor.submit(_run, key, left[key]): key for key in order}
            for done, job in enumerate(as_completed(jobs), start=1):
                known[jobs[job]] = row = {"trial": jobs[job]} | job.result()
                out.write(f"\n{json.dumps(row)}")
                out.flush()
                os.fsync(out.fileno())
                name = f"{row['method']} {' + '.join(row['domains'])}, seed {row['seed']}"
                seconds = time.monotonic() - began
                print(f"{done}/{len(left)} after {seconds:.0f} s: {name}", flush=True)
    return [known[key] for key in keys]


def _key(settings: Settings, domains: Sequence[DomainInputs], trial: Trial) -> str:
    stages = {one.settings.name: dedicated_stage(settings, one).key for one in domains}
    facts = vars(trial) | {"stages": [stages[name] for name in trial.domains]}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Bench(Worker):
    """The base model and a trainer in a process, with the domains."""

    def trained(self, trial: Trial, adapter: str, names: Sequence[str]) -> None:
        """Train some domains jointly in a fresh adapter."""
        self.trainer.open(adapter, trial.seed)
        self.trainer.train(
            adapter, names, held=(), rehearse=False, seed=trial.seed,
        )  # fmt: skip

    def measure(self, adapter: str | None, domain: str, head: Any = None) -> dict[str, Any]:
        """Accuracy on validation, by which the head is calibrated, then on test."""
        return {
            str(split): self.trainer.evaluate(adapter, domain, split, head).accuracy
            for split in (Split.VAL, Split.TEST)
        }

    def compute(self, key: str, trial: Trial) -> dict[str, Any]:
        """The result of a trial; a training that diverged reaches nothing."""
        began = time.monotonic()
        for name in self.trainer.adapters:
            self.trainer.close(name)
        torch.manual_seed(trial.seed)
        try:
            found = METHODS[trial.method](self, trial)
        except DivergedError:
            nothing = {name: {"val": math.nan, "test": math.nan} for name in trial.domains}
            found = {"accuracy": nothing, "adapters": 1, "attempts": 1}
        if trial.method == "joint" and len(trial.domains) == 1 and self.trainer.adapters:
            self.kept.mkdir(parents=True, exist_ok=True)
            write_snapshot(self.kept.parent, f"{key}.safetensors", self.trainer.snapshot(ADAPTER))
        seconds, device = round(time.monotonic() - began, 2), self.settings.model.device
        return vars(trial) | found | {"seconds": seconds, "device": device}

    @property
    def kept(self) -> Path:
        """Folder of the dedicated adapters that were trained."""
        return Path(self.settings.paths.work) / FOLDER / SNAPSHOTS


def joint(bench: Bench, trial: Trial) -> dict[str, Any]:
    """All domains jointly in a fresh adapter: of one domain, its dedicated adapter."""
    bench.trained(trial, ADAPTER, trial.domains)
    accuracy = {name: bench.measure(ADAPTER, name) for name in trial.domains}
    return {"accuracy": accuracy, "adapters": 1, "attempts": 1}


def head_only(bench: Bench, trial: Trial) -> dict[str, Any]:
    """A head on the frozen base model; the model itself answers where there is none."""
    heads = {name: bench.trainer.train_head_only(name, trial.seed) for name in trial.domains}
    accuracy = {name: bench.measure(None, name, head) for name, head in heads.items()}
    return {"accuracy": accuracy, "adapters": 0, "attempts": 0}


def merge(bench: Bench, trial: Trial) -> dict[str, Any]:
    """Dedicated adapters, merged by PEFT without training; heads stay, but for calibration.

    All have one weight: of 1 / n, 1 / √n and 1 that with which the worst domain keeps most of its
    dedicated adapter on validation. `variants` holds what each way of merging reaches.
    """
    count, began = len(trial.domains), time.monotonic()
    for name in trial.domains:
        bench.trained(trial, name, [name])
    alone = {name: bench.measure(name, name) for name in trial.domains}
    heads = {name: bench.trainer.heads(name).get(name) for name in trial.domains}
    took = time.monotonic() - began

    def merged(combination: str, weight: float) -> dict[str, dict[str, Any]]:
        adapters = bench.lmm.adapters
        with torch.random.fork_rng():
            torch.manual_seed(trial.seed)  # of the weights that DARE drops
            adapters.peft.base_model.add_weighted_adapter(
                trial.domains, [weight] * count, "merged", combination, density=DENSITY
            )
        adapters.adopt("merged", bench.settings.train.lora.decode_only)
        found = {name: bench.measure("merged", name, heads[name]) for name in trial.domains}
        adapters.remove("merged")
        return found

    def worst(found: Mapping[str, Mapping[str, float]]) -> float:
        return min(found[name]["val"] / max(alone[name]["val"], 1e-9) for name in found)

    variants = {}
    for combination in COMBINATIONS:
        began = time.monotonic()
        best = max((merged(combination, one) for one in {1 / count, count**-0.5, 1.0}), key=worst)
        variants[combination] = {"accuracy": best, "seconds": took + time.monotonic() - began}
    return {"accuracy": alone, "adapters": count, "attempts": count, "variants": variants}


def ewc(bench: Bench, trial: Trial) -> dict[str, Any]:
    """Elastic weight consolidation: one adapter learns all domains in turn, kept from forgetting.

    Kirkpatrick et al. (PNAS 2017): the penalty ½ · strength · Σ F (θ − θ*)² pulls weights back that
    earlier domains need, by the Fisher information F of their losses, divided by its mean here.
    """
    trainer, strength, fisher, held = bench.trainer, trial.options["strength"], {}, list[str]()
    trainer.open(ADAPTER, trial.seed)
    opened, weights = trainer._open[ADAPTER], bench.lmm.adapters.parameters(ADAPTER)
    for name in trial.domains:
        before = {key: weight.detach().clone() for key, weight in weights.items()}
        mean = sum(map(torch.sum, fisher.values())) / sum(w.numel() for w in weights.values())

        def pull(before: Any = before, mean: Any = mean, fisher: Any = fisher) -> None:
            with torch.no_grad():
                for key, value in fisher.items():
                    if weights[key].grad is not None and mean > 0:
                        moved = weights[key] - before[key]
                        weights[key].grad += strength * value / mean * moved

        hook = opened.optimizer.register_step_pre_hook(lambda *_, pull=pull: pull())
        trainer.train(
            ADAPTER, (name,), held=held, rehearse=False, seed=trial.seed,
        )  # fmt: skip
        hook.remove()
        bench.measure(ADAPTER, name)  # a head that is not trained later keeps its calibration
        for _ in range(FISHER_BATCHES):
            opened.optimizer.zero_grad()
            batch = trainer._draw(opened.generator, (name,), ())
            trainer._learn(opened.heads, batch, list(weights.values()))
            for key, weight in weights.items():
                if weight.grad is not None:
                    fisher[key] = fisher.get(key, 0.0) + weight.grad**2 / FISHER_BATCHES
        held.append(name)
    accuracy = {name: bench.measure(ADAPTER, name) for name in held}
    return {"accuracy": accuracy, "adapters": 1, "attempts": len(held)}


def fusion(bench: Bench, trial: Trial) -> dict[str, Any]:
    """Pack the domains as stage `fuse` does; who shares with no other takes its own adapter.

    The options hold settings of the fusion, and the required accuracy of each domain with its
    largest value.
    """
    settings = replace(bench.settings.fusion, **trial.options["fusion"], unreachable="keep")
    asked = {n: Requirement(*trial.options["required"][n]) for n in trial.domains}
    accuracy = {}
    for name in trial.domains:
        head = bench.trainer.train_head_only(name, trial.seed)
        accuracy[name] = bench.measure(None, name, head)
    dedicated, inputs = {}, list(bench.inputs.values())
    for name in trial.domains:
        key = _key(bench.settings, inputs, Trial("joint", (name,), trial.seed))
        read = partial(read_snapshot, bench.kept.parent, f"{key}.safetensors")
        dedicated[name] = DedicatedAdapter(key, read)
    with tempfile.TemporaryDirectory() as folder:
        state = FusionState(Path(folder), accuracy)
        plan = make_plan(settings, asked, accuracy, trial.seed, None)
        packing = Packing(plan, bench.trainer, state, trial.seed, None, dedicated)
        while (attempt := plan.next()) is not None:
            packing.record(packing.run(attempt))
        for adapter, names in plan.packing.items():
            packing.load(adapter)
            accuracy |= {name: bench.measure(adapter, name) for name in names}
    return {
        "accuracy": accuracy, "adapters": len(plan.packing), "attempts": len(plan.decisions)
    }  # fmt: skip


METHODS = {"joint": joint, "head_only": head_only, "merge": merge, "ewc": ewc, "fusion": fusion}
_bench: Bench | None = None
"""The bench of this process."""


def _begin(settings: Settings, domains: Sequence[DomainInputs]) -> None:
    global _bench  # noqa: PLW0603 (a process of a pool has no other place)
    _bench = Bench(settings, domains)


def _run(key: str, trial: Trial) -> dict[str, Any]:
    assert _bench is not None
    return _bench.compute(key, trial)
