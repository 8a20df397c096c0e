"""Runs trials, in this process or in several; what is done is on disk and is not done again."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from valora_train.processes import worker_processes
from valora_train.trials.inputs import read_inputs
from valora_train.trials.methods.registry import METHODS
from valora_train.trials.store import TrialStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from valora_train.trials.bench import Bench
    from valora_train.trials.inputs import TrialInputs
    from valora_train.trials.store import Trial

    Result = dict[str, Any]
    Outcomes = Iterator[tuple[str, Result | None]]
    OnDone = Callable[[Trial, Mapping[str, Any], "Progress"], None]

POLL_SECONDS = 2.0
"""Between two looks at trials that another command computes."""
SCRATCH = "running"
"""Folder of what running trials write, such as checkpoints."""


class Progress:
    """How far trials are, by the optimiser steps that they take.

    Args:
        costs: Steps of each trial that is left, by key.
        done: Number of trials that were done before.

    Attributes:
        done: Number of trials that are done.
        count: Number of all trials.
    """

    def __init__(self, costs: Mapping[str, int], done: int) -> None:
        self._costs = dict(costs)
        self._all = sum(costs.values())
        self._began = time.monotonic()
        self.done = done
        self.count = done + len(costs)

    def finish(self, key: str) -> None:
        """Count a trial as done."""
        del self._costs[key]
        self.done += 1

    @property
    def seconds_left(self) -> float | None:
        """Seconds until all are done, by the speed so far; None before the first is done."""
        left = sum(self._costs.values())
        if left == self._all:
            return None
        return (time.monotonic() - self._began) * left / (self._all - left)


class Worker:
    """Computes trials, with a model that is loaded for the first of them.

    Args:
        inputs: Settings, domains and samples.
        store: Where results go.
    """

    def __init__(self, inputs: TrialInputs, store: TrialStore) -> None:
        self._inputs = inputs
        self._store = store
        self._bench: Bench | None = None

    def compute(self, trial: Trial) -> Result | None:
        """Compute a trial, unless its result is known.

        Args:
            trial: The trial.

        Returns:
            Its result; None if another process computes it.
        """
        from valora_train.trials.bench import Bench  # imports torch, which takes seconds

        key = self._inputs.key(trial)
        with self._store.claim(key) as mine:
            if not mine:
                return self._store.results().get(key)
            scratch = self._store.folder / SCRATCH / key
            scratch.mkdir(parents=True, exist_ok=True)
            if self._bench is None:
                self._bench = Bench(self._inputs, self._store)
            start = time.monotonic()
            self._bench.start(trial.seed, scratch)
            found = METHODS[trial.method]().run(self._bench, trial)
            result: Result = {
                "method": trial.method,
                "options": dict(trial.options),
                "domains": list(trial.domains),
                "seed": trial.seed,
                "accuracy": found.accuracy,
                "adapters": {name: list(held) for name, held in found.adapters.items()},
                "attempts": found.attempts,
                **found.facts,
                "device": self._inputs.settings.model.device,
                "seconds": round(time.monotonic() - start, 2),
            }
            if found.snapshot is not None:
                self._store.write_snapshot(key, found.snapshot)
            self._store.add(key, result)
            shutil.rmtree(scratch, ignore_errors=True)
            return {"trial": key, **result}


def run_trials(
    inputs: Path,
    trials: Sequence[Trial],
    store: TrialStore,
    processes: int = 1,
    on_done: OnDone = lambda *_: None,
) -> list[Result]:
    """Run the trials that have no result yet.

    Args:
        inputs: File of the inputs.
        trials: The trials.
        store: Results, old and new.
        processes: Number of processes; on a GPU they share it. 1 for this process alone.
        on_done: Called with each trial that is done now, its result, and the progress.

    Returns:
        The result of every trial, in the order of `trials`.

    Raises:
        ValoraError: If a trial cannot run, or a worker process was killed.
    """
    facts = read_inputs(inputs)
    keys = [facts.key(trial) for trial in trials]
    known = store.results()
    left = {key: trial for key, trial in zip(keys, trials, strict=True) if key not in known}
    train = facts.settings.train
    costs = {
        key: max(1, METHODS[trial.method]().steps(train, len(trial.domains)))
        for key, trial in left.items()
    }
    progress = Progress(costs, len(set(keys)) - len(left))
    if not left:
        return [known[key] for key in keys]
    processes = min(processes, len(left))
    with _workers(inputs, facts, store, processes) as compute:
        while left:
            # The longest first, so that no process works alone for long in the end.
            order = sorted(left, key=costs.__getitem__, reverse=True)
            for key, result in compute({key: left[key] for key in order}):
                if result is None:
                    continue
                progress.finish(key)
                on_done(left.pop(key), result, progress)
            if left:  # another command computes them
                time.sleep(POLL_SECONDS)
    found = store.results()
    return [found[key] for key in keys]


@contextmanager
def _workers(
    inputs: Path, facts: TrialInputs, store: TrialStore, processes: int
) -> Iterator[Callable[[Mapping[str, Trial]], Outcomes]]:
    """A function that computes trials, in this process or in several."""
    if processes <= 1:
        worker = Worker(facts, store)
        yield lambda trials: ((key, worker.compute(trial)) for key, trial in trials.items())
        return
    with worker_processes(processes, "oracle.processes", _start, inputs, store.folder) as executor:

        def compute(trials: Mapping[str, Trial]) -> Outcomes:
            futures = {executor.submit(_compute, trial): key for key, trial in trials.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()

        yield compute


_worker: Worker | None = None
"""The worker of this process, if it is one of several."""


def _start(inputs: Path, folder: Path) -> None:
    """Begin a worker process."""
    global _worker  # noqa: PLW0603 (a process of a pool has no other place)
    _worker = Worker(read_inputs(inputs), TrialStore(folder))


def _compute(trial: Trial) -> Result | None:
    assert _worker is not None, "`_start` makes it"
    return _worker.compute(trial)
