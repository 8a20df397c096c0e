"""Which modules an adapter changes, and with which rank and alpha: PEFT's rules, within limits.

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
MAX_PATTERNS = 2048  # most expressions of an option

OPTIONS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
_PLAIN = re.compile(r"[\w.-]{0,512}", re.ASCII)  # no special characters but dots
_compiled = lru_cache(maxsize=2 * MAX_PATTERNS)(re.compile)  # `re` itself keeps few

Places = list[tuple[int, float] | None]


def place(config: Mapping[str, Any], modules: Sequence[tuple[str, str]]) -> Places:
    """Rank and alpha of modules by the options of an adapter's checked configuration.

    A module has two paths, in the model and in the file, which may be the same. None stands for one
    that the configuration does not name. Raises a ValueError if an expression is none, or if
    matching exceeds a limit.
    """
    wild = [one for one in OPTIONS if not all(map(_PLAIN.fullmatch, _written(config, one)))]
    if not wild:
        return _place(config, modules)
    rules = {name: config[name] for name in (*OPTIONS, "r", "lora_alpha", "layers_to_transform")}
    return _place_apart(json.dumps([rules, modules]), ", ".join(wild))


def _written(config: Mapping[str, Any], option: str) -> Sequence[str]:
    """The regular expressions of an option; names in a list are none."""
    value = config[option]
    if isinstance(value, str):
        return [value]
    return list(value) if option.endswith("pattern") else []


@lru_cache(maxsize=16)  # adapters of one training run have the same rules
def _place_apart(work: str, options: str) -> Places:
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
            f"no process could be started to match {options} ({error.strerror}): try again"
        ) from error
    if done is None or done.returncode:
        raise ValueError(
            f"matching {options} takes more than {SECONDS} s or {MEMORY >> 20} MB: simplify the "
            "regular expression, or name modules in a list"
        )
    found: Any = json.loads(done.stdout)
    if "error" in found:
        raise ValueError(
            f"a part of {options} is no regular expression ({found['error'][:100]}): correct it, "
            "or name modules in a list"
        )
    places: Places = found["places"]
    return places


def _place(config: Mapping[str, Any], modules: Sequence[tuple[str, str]]) -> Places:
    return [
        (_number(config, "rank_pattern", "r", paths),
         _number(config, "alpha_pattern", "lora_alpha", paths))
        if any(_targeted(config, path) for path in paths) else None
        for paths in modules
    ]  # fmt: skip


def _number(config: Mapping[str, Any], option: str, general: str, paths: tuple[str, str]) -> Any:
    """That of the first pattern that matches a path or its end after a dot, or the general one."""
    for path in dict.fromkeys(paths):
        for pattern, value in config[option].items():
            if _compiled(rf"(.*\.)?({pattern})$").match(path):
                return value
    return config[general]


def _targeted(config: Mapping[str, Any], path: str) -> bool:
    targets, layers = config["target_modules"], config["layers_to_transform"]
    if _named(config["exclude_modules"], path):
        return False
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return True
    if not _named(targets, path):
        return False
    if not layers or isinstance(targets, str):
        return True
    written = [rf"(?:^|.*?\.){pattern}\.(?P<idx>\d+)\." for pattern in config["layers_pattern"]]
    matches = (_compiled(one).match(path) for one in written or [r".*?\.[^.]*\.(?P<idx>\d+)\."])
    found = next(filter(None, matches), None)
    return found is not None and int(found["idx"]) in layers


def _named(names: str | list[str], path: str) -> bool:
    if isinstance(names, str):
        return _compiled(names).fullmatch(path) is not None
    return path in names or path.endswith(tuple(f".{name}" for name in names))


def _main(seconds: int, memory: int) -> None:
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    warnings.simplefilter("ignore")
    try:
        found: dict[str, Any] = {"places": _place(*json.load(sys.stdin))}
    except (re.error, OverflowError, RecursionError, MemoryError, ValueError) as error:
        found = {"error": str(error) or type(error).__name__}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
