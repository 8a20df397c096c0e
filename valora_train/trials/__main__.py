"""`python -m valora_train.trials FOLDER`: trains the groups of an oracle on any machine.

With `--compare` it trains what `command=compare` does.

It needs torch, transformers, peft, pydantic, filelock, scikit-learn, scikit-image, torchmetrics and
pycocotools, and the folder that `valora-train command=oracle oracle.pack=FOLDER` (or `compare`)
made. It continues where it was when it is run again. `oracle.results=FOLDER/trials.jsonl` takes
over what it found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.cpu import usable_cores
from valora_data.errors import ValoraError
from valora_train.trials.comparison import run_comparison
from valora_train.trials.inputs import INPUTS, complete_inputs, read_inputs
from valora_train.trials.oracle import check_groups, oracle_trials
from valora_train.trials.pool import Progress, run_trials
from valora_train.trials.store import TrialStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from valora_train.trials.store import Trial


def main(arguments: list[str] | None = None) -> int:
    """Entry point.

    Args:
        arguments: The command line; None for that of this process.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m valora_train.trials", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path, help="folder of the packed inputs")
    parser.add_argument("--out", type=Path, help="folder of the results (default: the same)")
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of all groups (0 1 2)")
    parser.add_argument("--compare", action="store_true", help="a comparison, with its settings")
    parser.add_argument("--largest", type=int, default=0, help="largest subsets; 0 for all")
    parser.add_argument("--only", nargs="+", metavar="DOMAIN", help="domains (default: all)")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--device", help="device in torch's terms, e.g. cuda")
    given = parser.parse_args(arguments)
    for option in ("seeds", "largest", "only"):
        if given.compare and getattr(given, option):
            parser.error(f"--compare trains what the packed settings say: leave out --{option}")
    for option, least in (("largest", 0), ("processes", 1)):
        if getattr(given, option) < least:
            parser.error(f"--{option} must be at least {least}")
    warnings.filterwarnings("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the worker processes
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable products on a GPU
    try:
        return _run(given)
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run the same command again to continue", file=sys.stderr)
        return 130


def _run(given: argparse.Namespace) -> int:
    file = given.folder / INPUTS
    inputs = read_inputs(file)
    if given.device:
        model = replace(inputs.settings.model, device=given.device)
        inputs = replace(inputs, settings=replace(inputs.settings, model=model))
        file = inputs.write(given.folder / f"inputs-{given.device.replace(':', '-')}.json")
    unknown = set(given.only or ()) - set(inputs.domains)
    if unknown:
        raise ValoraError(
            f"unknown domain {', '.join(sorted(unknown))}: choose from {', '.join(inputs.domains)}"
        )
    domains = list(dict.fromkeys(given.only or inputs.domains))
    seeds = list(dict.fromkeys(given.seeds or (0, 1, 2)))
    if not given.compare:
        check_groups(len(domains), given.largest, "--only", "--largest 2")
    if complete_inputs(inputs, given.processes):
        print("drew the images of built-in domains", flush=True)
    store = TrialStore(given.out or given.folder)
    start = time.monotonic()

    def on_done(trial: Trial, result: Mapping[str, Any], progress: Progress) -> None:
        reached = " ".join(
            f"{name}={found['val'] if found['val'] is None else format(found['val'], '.3f')}"
            for name, found in result["accuracy"].items()
        )
        left = progress.seconds_left or 0.0
        print(
            f"{progress.done}/{progress.count} after {time.monotonic() - start:.0f} s, "
            f"{left:.0f} s left: {trial.method} seed {trial.seed} in {result['seconds']:.1f} s: "
            f"{reached}",
            flush=True,
        )

    def run(trials: Sequence[Trial]) -> list[dict[str, Any]]:
        return run_trials(file, trials, store, given.processes, on_done)

    if given.compare:
        done = run_comparison(inputs, run)
    else:
        done = run(oracle_trials(domains, seeds, given.largest))
    print(f"{len(done)} trials are done: {store.folder}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
