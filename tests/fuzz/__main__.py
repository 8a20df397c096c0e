"""Runs one fuzzing command: ``python -m tests.fuzz PART [--cases N] [--seed N]``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def parts() -> list[str]:
    """Names of the parts: the modules of this folder, each with a `main`."""
    found = (module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))
    return sorted(name for name in found if not name.startswith("_"))


def main(arguments: list[str]) -> int:
    """Run a part with its own arguments; without one, every part with its defaults."""
    if not arguments:
        failed = [name for name in parts() if name != "soak" and _run(name, [])]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        return int(bool(failed))
    name, *rest = arguments
    if name not in parts():
        print(f"{name} is no part: name one of {', '.join(parts())}", file=sys.stderr)
        return 2
    return _run(name, rest)


def _run(name: str, arguments: list[str]) -> int:
    part = importlib.import_module(f"tests.fuzz.{name}")
    return int(part.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
