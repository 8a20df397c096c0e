"""Random tests of the scheduler, the memory, admission and the fusion plan, with many examples.

The same tests run with few examples, always the same, in `make test`. Here each tries ``--cases``
times as many, new ones, in rounds with a seed each. A failing example is printed as a call that
repeats it, and belongs into the test as an ``@example``.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/property/valora_serve/orchestrator",
    "tests/property/valora_serve/memory",
    "tests/property/valora_serve/server/access",
    "tests/property/valora_train/fusion",
)
ROUND = 10  # times as many examples as by default, in one process


def main(arguments: list[str]) -> int:
    """Run the random tests with many examples; see ``--help``."""
    parser = argparse.ArgumentParser("python -m tests.fuzz schedule", description=__doc__)
    parser.add_argument("--cases", type=int, default=20, help="how many times as many examples")
    parser.add_argument("--seed", type=int, default=None, help="seed of the first round")
    parser.add_argument("--minutes", type=float, default=None, help="start no round after these")
    parser.add_argument("-k", dest="chosen", default=None, help="run the tests whose name matches")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    start, done, tests, status = time.monotonic(), 0, 0, 0
    print(f"seed {seed}", flush=True)
    while done < options.cases:
        minutes = (time.monotonic() - start) / 60
        if options.minutes is not None and minutes >= options.minutes:
            break
        count = min(ROUND, options.cases - done)
        command = [sys.executable, "-m", "pytest", "-q", f"--hypothesis-seed={seed}", *TESTS]
        command += ["-k", options.chosen] if options.chosen else []
        ran = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"VALORA_EXAMPLES": str(count)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode:
            print(ran.stdout, ran.stderr, sep="\n")
            print(
                f"repeat it with: python -m tests.fuzz schedule --cases {count} --seed {seed}",
                flush=True,
            )
            status = 1
            break
        passed = re.search(r"(\d+) passed", ran.stdout)
        tests = int(passed[1]) if passed else 0
        done, seed = done + count, seed + 1
        print(f"{done} of {options.cases} times the examples", flush=True)
    print("| tests | times the examples | failed | minutes |\n|---|---|---|---|")
    print(f"| {tests} | {done} | {status} | {(time.monotonic() - start) / 60:.1f} |")
    return status
