"""Command ``valora doctor``: checks this machine, and says what is missing and how to mend it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from valora_serve.doctor.base import Level, Patient
from valora_serve.doctor.gpu import check_kernels, check_torch, check_tuning
from valora_serve.doctor.machine import (
    check_disks,
    check_extras,
    check_files,
    check_machine,
    check_python,
)
from valora_serve.doctor.probe import read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_serve.doctor.base import Check, Facts

CHECKS: dict[str, Check] = {
    "python": check_python,
    "machine": check_machine,
    "disks": check_disks,
    "extras": check_extras,
    "torch": check_torch,
    "kernels": check_kernels,
    "tuning": check_tuning,
    "files": check_files,
}
"""Checks by name, in their order; each yields what it finds."""


def main(arguments: Sequence[str] | None = None, facts: Callable[[], Facts] = read_facts) -> int:
    """Entry point.

    Args:
        arguments: Arguments of the command; those of the process if None.
        facts: Reads what is known of the GPUs.

    Returns:
        0; 1 if something is wrong, or nobody reads on.
    """
    try:
        return _main(arguments, facts)
    except BrokenPipeError:  # `valora doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 1


def _main(arguments: Sequence[str] | None, facts: Callable[[], Facts]) -> int:
    parser = argparse.ArgumentParser("valora doctor", description=__doc__)
    parser.add_argument(
        "checks", nargs="*", metavar="CHECK", default=[],
        help=f"one or more of {', '.join(CHECKS)}; all by default",
    )  # fmt: skip
    parser.add_argument("--base", default="tiny", help="base model that is to be served")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share it")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.checks if name not in CHECKS]:
        parser.error(f"{unknown[0]} is no check: name some of {', '.join(CHECKS)}")
    if given.tensor_parallel < 1:
        parser.error(f"--tensor-parallel {given.tensor_parallel}: name at least 1")
    patient = Patient(given.base, given.tensor_parallel, facts)
    listed = []
    for name in given.checks or list(CHECKS):
        for finding in CHECKS[name](patient):
            listed.append({"check": name} | asdict(finding) | {"level": finding.level.name.lower()})
            if not given.json:
                remedy = f": {finding.remedy}" if finding.remedy else ""
                print(
                    f"{finding.level.value} {finding.what:<13} {finding.found}{remedy}", flush=True
                )
    wrong = sum(one["level"] == Level.WRONG.name.lower() for one in listed)
    if given.json:
        print(json.dumps({"ok": not wrong, "findings": listed}, indent=1, ensure_ascii=False))
    else:
        print("nothing is wrong" if not wrong else f"{wrong} of these must be mended")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
