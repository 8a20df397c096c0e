"""Command ``valora``: gathers the commands of all packages under one name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from valora_data.errors import UnknownNameError, ValoraError
from valora_data.registry import Registry
from valora_data.wording import encode_all_output

Command = Callable[[], int | None]
"""Reads ``sys.argv`` as a console script does, and returns the exit status."""

COMMANDS: Registry[Command] = Registry(
    "valora.commands",
    "command",
    {
        "demo": "valora_serve.demo.command:main",
        "serve": "valora_serve.cli:main",
        "predict": "valora_serve.predict.command:main",
        "data": "valora_data.cli:main",
        "sim": "valora_serve.workloads.cli:main",
    },
)
"""Commands by name. The factory, which nothing that serves may import, registers `fuse` in the
entry-point group, as any other package does."""

ABOUT = {
    "demo": "serve the bundle that ships with the package, and open the console",
    "fuse": "small models to a checked bundle (valora-train)",
    "serve": "serve bundles over HTTP (valora-serve)",
    "predict": "answer a folder of images or videos with a bundle, without a server",
    "label": "answer a folder of images with a small model",
    "data": "look at a data set before it is used (valora-data)",
    "sim": "compare policies and routers on a simulated workload (valora-sim)",
}
"""What the commands of this repository do, in the order of use."""
_HELP = {"-h", "--help", "help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: the exit status of the command that is named first; 2 if there is none."""
    encode_all_output()
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["help"]
    if name in _HELP:
        print(_overview())
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"valora {version('valora')}")
        return 0
    if name == "doctor":  # of earlier releases: `valora-serve` says what to use instead
        name, rest = "serve", [name]
    try:
        command = COMMANDS[name]
    except UnknownNameError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        return _missing(name, error)
    sys.argv = [f"valora {name}", *rest]
    try:
        return command() or 0
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _missing(name: str, error: ModuleNotFoundError) -> int:
    if (error.name or "").startswith("valora_"):
        raise error
    extra = "train" if name in ("fuse", "label") else "serve"
    print(f"error: {error.name} is missing: pip install 'valora[{extra}]'", file=sys.stderr)
    return 1


def _overview() -> str:
    others = sorted(set(COMMANDS) - {*ABOUT})
    lines = [f"  {name:<9} {ABOUT.get(name, '(of another package)')}" for name in [*ABOUT, *others]]
    return "\n".join([
        "usage: valora COMMAND [arguments]", "", *lines, "",
        "valora COMMAND --help explains a command.",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
