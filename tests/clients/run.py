"""Ask one server with the ten most used clients, unmodified: run.py .venv/bin/valora-serve."""

import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from adaptors import CLIENTS, Client, Find

BUNDLES = Path(__file__).parents[2] / "valora_serve" / "demo" / "bundles"
CELLS = {  # columns of the table: whether a client gets what it asks for
    "chat": lambda client: client.text().strip(),
    "stream": lambda client: len([piece for piece in client.stream() if piece]) > 1,
    "image": lambda client: client.text(image=True).strip(),
    "tools auto": lambda client: isinstance(a := client.call("auto"), str) or Find(**a["find"]),
    "tools required": lambda client: Find(**client.call("required")["find"]),
    "schema": lambda client: Find.model_validate(client.schema()),
    "embeddings": lambda client: math.isclose(math.hypot(*client.embeddings()), 1, rel_tol=1e-3),
}


def outcome(client: Client, cell: str) -> str:
    """What a cell holds: ok, – if the client does not have it, or what went wrong."""
    if cell == "embeddings" and not hasattr(client, cell):
        return "–"
    try:
        return "ok" if CELLS[cell](client) else "there is no answer"
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what it lacks
        return f"{type(error).__name__}: {str(error)[:1000]}"


def started(command: str, folder: str, key: str) -> tuple[subprocess.Popen, str]:
    """Start a server on a free port of this machine: its process and address."""
    log = Path(folder, "log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [Path(command).absolute(), BUNDLES, "--port", "0", "--no-profile", "--no-golden"],
            cwd=folder, stdout=file, stderr=file, env={**os.environ, "VALORA_API_KEY": key},
        )  # fmt: skip
    until = time.monotonic() + 120
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            sys.exit(f"the server does not start:\n{log.read_text()}")
        time.sleep(0.2)
    return process, f"{found[0]}/v1"


def main() -> int:
    key, lacks = secrets.token_hex(), []
    with tempfile.TemporaryDirectory() as folder:
        process, url = started(sys.argv[1], folder, key)
        try:
            print("".join(word.ljust(16) for word in ("client", *CELLS)))
            for kind in CLIENTS:
                row = {cell: outcome(kind(url, key, "tiny"), cell) for cell in CELLS}
                lacks += [f"{kind.__name__}, {c}: {said}" for c, said in row.items() if said[2:]]
                shown = ("lacks" if said[2:] else said for said in row.values())
                print("".join(word.ljust(16) for word in (kind.__name__, *shown)), flush=True)
        finally:
            process.terminate()
            process.wait(60)
    print(*lacks, sep="\n")
    return bool(lacks)


if __name__ == "__main__":
    sys.exit(main())
