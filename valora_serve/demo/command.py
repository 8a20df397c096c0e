"""Command ``valora demo``: from an installed wheel to boxes in a browser, without a download."""

import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from valora_serve import cli

BUNDLES = Path(__file__).parent / "bundles"
"""Bundles that ship with the package, each as `make fuse` exported it."""
_ABOUT = """\
usage: valora demo [--no-browser] [options of valora-serve]

Serve the bundle that ships with the package (base model valora-tiny, on a CPU) and open the web
console. Nothing is downloaded. All options of valora-serve can be given, e.g. --port 8001."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with its arguments; those of the process if None."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(_ABOUT)
        return 0

    def show(address: str) -> None:
        print(f"The console is at {address} (Ctrl+C ends the server)", file=sys.stderr, flush=True)
        if "--no-browser" not in given:  # a thread, as some return only when they are closed
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()

    # A measurement of this machine would take half the start.
    options = ["--no-profile", *(word for word in given if word != "--no-browser")]
    return cli.main([str(BUNDLES), *options], on_started=show)
