"""Puts a bundle into the package, for ``valora demo``: what serving needs, without pictures.

    python -m valora_serve.demo.pack bundles/detection

Adapters, heads, golden examples and promises stay as `make fuse` exported them, byte for byte.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from valora_data.contract.bundle import MANIFEST, read_bundle, write_manifest
from valora_serve.demo.command import BUNDLES

LEFT_OUT = ("pictures",)
"""Folders of a bundle that only its README shows."""

_ALL = re.MULTILINE | re.DOTALL


def pack(folder: Path, place: Path) -> Path:
    """Copy a bundle without its pictures.

    Args:
        folder: The bundle; its files are verified.
        place: Folder of bundles; one of the same name is replaced.

    Returns:
        The copy.
    """
    bundle = read_bundle(folder)
    target = place / bundle.name
    shutil.rmtree(target, ignore_errors=True)
    for name in bundle.manifest["files"]:
        if name.partition("/")[0] not in LEFT_OUT:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target / name)  # without its permissions
    card = target / "README.md"
    text = re.sub(r"^## Pictures\n.*?(?=^## |\Z)", "", card.read_text(encoding="utf-8"), flags=_ALL)
    card.write_text(re.sub(r"^!\[.*\n", "", text, flags=re.MULTILINE), encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["lineage"]["config"].pop("paths", None)  # folders of the machine that made it
    write_manifest(target, manifest)
    return target


if __name__ == "__main__":
    print(pack(Path(sys.argv[1]), BUNDLES))
