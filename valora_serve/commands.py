"""Command ``valora``: gathers the commands of all packages under one name."""

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

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
    "ask": "let a model write questions about a text, with answers",
    "data": "look at a data set before it is used (valora-data)",
    "sim": "compare policies and routers on a simulated workload (valora-sim)",
}
"""What the commands of this repository do, in the order of use."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: the exit status of the command that is named first; 2 if there is none."""
    encode_all_output()
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["help"]
    if name in ("-h", "--help", "help"):
        about = ABOUT | dict.fromkeys(sorted(set(COMMANDS) - {*ABOUT}), "(of another package)")
        lines = [f"  {command:<9} {what}" for command, what in about.items()]
        print("usage: valora COMMAND [arguments]\n", *lines, sep="\n")
        print("\nvalora COMMAND --help explains a command.")
        return 0
    if name == "--version":
        print(f"valora {version('valora')}")
        return 0
    if name == "doctor":  # of earlier releases: `valora-serve` says what to use instead
        name, rest = "serve", [name]
    try:
        command = COMMANDS[name]
        sys.argv = [f"valora {name}", *rest]
        return command() or 0
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UnknownNameError) else 1
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("valora_"):
            raise
        extra = "train" if name in ("ask", "fuse", "label") else "serve"
        print(f"error: {error.name} is missing: pip install 'valora[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while libraries are imported, too
        print("interrupted: run the same command again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
