"""Matches regular expressions of adapters, which cannot be trusted, within fixed limits.

``(a+)+$`` hangs Python's `re` for ever, and no signal interrupts it: another process compiles and
matches what is no plain name, as PEFT does, and the system ends it at its limits.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from valora_serve.errors import AdapterError

SECONDS = 2  # most seconds of processor time for all expressions of an adapter together
WAIT = 20.0  # most seconds until the process has ended, however busy the machine is
MEMORY = 1 << 30  # most bytes of address space of the process
MAX_PATTERNS = 2048  # most expressions of an adapter
PATTERN_LENGTH = 10_000  # most characters of an expression

_PLAIN = re.compile(r"[\w.-]*", re.ASCII)

# Runs in the other process. It limits itself before it reads anything.
_MATCH = """
import resource, sys
seconds, memory = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import json, re, warnings
warnings.simplefilter("ignore")
found = []
for how, pattern, paths in json.load(sys.stdin):
    try:
        match = getattr(re.compile(pattern), how)
        row = []
        for path in paths:
            hit = match(path)
            row.append(None if hit is None else hit.groupdict().get("idx") or "")
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError) as error:
        row = str(error) or type(error).__name__
    found.append(row)
json.dump(found, sys.stdout)
"""


class Expression(NamedTuple):
    """A regular expression of an `option`, as PEFT applies it: by `re`'s method `how`."""

    option: str
    how: str
    pattern: str


def plain(name: str) -> bool:
    """Return whether an expression has no special characters but dots."""
    return _PLAIN.fullmatch(name) is not None


@lru_cache(maxsize=16)  # adapters of one training run have the same expressions
def match_all(
    expressions: tuple[Expression, ...], paths: tuple[str, ...]
) -> Sequence[Sequence[str | None]]:
    """Match every expression against every path.

    Returns for each expression and path what its group ``idx`` matched (empty if it has none), or
    None if it does not match. Raises an AdapterError if one is invalid, or a limit is exceeded.
    """
    if not expressions:
        return []
    longest = max(expressions, key=lambda one: len(one.pattern))
    for what, size, limit in (
        ("patterns", len(expressions), MAX_PATTERNS),
        (f"characters in {longest.option}", len(longest.pattern), PATTERN_LENGTH),
    ):
        if size > limit:
            raise AdapterError(f"it has {size} {what}, more than {limit}: name modules in a list")
    work = [(one.how, one.pattern, paths) for one in expressions]
    options = ", ".join(dict.fromkeys(one.option for one in expressions))
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCH, str(SECONDS), str(MEMORY)],
            input=json.dumps(work).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=WAIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    except OSError as error:
        raise AdapterError(
            f"no process could be started to match {options} ({error.strerror}): try again"
        ) from error
    if done is None or done.returncode:
        raise AdapterError(
            f"matching {options} takes more than {SECONDS} s or {MEMORY >> 20} MB: simplify the "
            "regular expression, or name modules in a list"
        )
    rows: list[Any] = json.loads(done.stdout)
    for one, row in zip(expressions, rows, strict=True):
        if isinstance(row, str):
            raise AdapterError(
                f"{one.option} is no regular expression ({row[:100]}): correct it, or name modules "
                "in a list"
            )
    return rows
