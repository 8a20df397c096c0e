"""Which alpha a module has: PEFT's rules, within limits.

Regular expressions of adapters cannot be trusted: ``(a+)+$`` hangs Python's `re` for ever, and no
signal interrupts it. Where some are more than plain names, this file runs as a program of its own,
which the system ends at its limits; so it imports the standard library alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

SECONDS = 2  # most seconds of processor time for all expressions of an adapter together
WAIT = 20.0  # most seconds until the process has ended, however busy the machine is
MEMORY = 1 << 30  # most bytes of address space of the process
MAX_PATTERNS = 2048  # most expressions of an adapter

_PLAIN = re.compile(r"[\w.-]{0,512}", re.ASCII)  # no special characters but dots
_compiled = lru_cache(maxsize=2 * MAX_PATTERNS)(re.compile)  # `re` itself keeps few

Alphas = list[float | None]


def alphas(patterns: Mapping[str, float], modules: Sequence[tuple[str, str]]) -> Alphas:
    """Alphas of modules by an adapter's `alpha_pattern`; None for those that match no expression.

    A module has two paths, in the model and in the file, which may be the same. Raises a ValueError
    if an expression is none, or if matching exceeds a limit.
    """
    if all(map(_PLAIN.fullmatch, patterns)):
        return _matched(patterns, modules)
    return _matched_apart(json.dumps([patterns, modules]))


@lru_cache(maxsize=16)  # adapters of one training run have the same rules
def _matched_apart(work: str) -> Alphas:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(SECONDS), str(MEMORY)],
            input=work.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    except OSError as error:
        raise ValueError(
            f"no process could be started to match alpha_pattern ({error.strerror}): try again"
        ) from error
    if done is None or done.returncode:
        raise ValueError(
            f"matching alpha_pattern takes more than {SECONDS} s or {MEMORY >> 20} MB: name "
            "modules there"
        )
    found: Any = json.loads(done.stdout)
    if "error" in found:
        raise ValueError(
            f"a part of alpha_pattern is no regular expression ({found['error'][:100]}): correct "
            "it, or name modules there"
        )
    made: Alphas = found["alphas"]
    return made


def _matched(patterns: Mapping[str, float], modules: Sequence[tuple[str, str]]) -> Alphas:
    """That of the first expression that matches a path or its end after a dot."""
    return [
        next((alpha for path in dict.fromkeys(paths) for pattern, alpha in patterns.items()
              if _compiled(rf"(.*\.)?({pattern})$").match(path)), None)
        for paths in modules
    ]  # fmt: skip


def _main(seconds: int, memory: int) -> None:
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    try:
        found: dict[str, Any] = {"alphas": _matched(*json.load(sys.stdin))}
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError) as error:
        found = {"error": str(error) or type(error).__name__}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
