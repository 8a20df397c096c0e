"""Command ``valora demo``: from an installed wheel to boxes in a browser, without a download."""

from __future__ import annotations

import sys
import threading
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from valora_data.contract.bundle import MANIFEST
from valora_data.errors import ValoraError
from valora_serve import cli
from valora_serve.errors import SettingsError

BUNDLES = Path(__file__).parent / "bundles"
"""Bundles that ship with the package, each as `make fuse` exported it."""
QUICK = ("--no-profile",)
"""Options that come before the user's: a measurement of this machine would take half the start."""
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
    shows = "--no-browser" not in given
    return cli.main(
        [str(find_bundle()), *QUICK, *(word for word in given if word != "--no-browser")],
        on_started=partial(_open, shows=shows),
    )


def find_bundle() -> Path:
    """The folder of the bundles that ship with the package; SettingsError if there are none."""
    if not any(BUNDLES.glob(f"*/{MANIFEST}")):
        raise SettingsError(f"{BUNDLES} holds no bundle: install the wheel again")
    return BUNDLES


def _open(address: str, *, shows: bool) -> None:
    """Say where the console is, and open it in the user's browser if there is one."""
    print(f"The console is at {address} (Ctrl+C ends the server)", file=sys.stderr, flush=True)
    if shows:  # a thread, as some browsers return only when they are closed
        threading.Thread(target=_browse, args=(address,), daemon=True).start()


def _browse(address: str) -> None:
    try:
        webbrowser.open(address)
    except (webbrowser.Error, OSError) as error:
        print(f"no browser could be opened ({error})", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValoraError as error:
        sys.exit(f"error: {error}")
