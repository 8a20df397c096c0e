"""Puts a bundle into the package, for ``valora demo``: what serving needs, without pictures.

    python -m valora_serve.demo.pack bundles/detection

Adapters, heads, golden examples and promises stay as `make fuse` exported them, byte for byte.
"""

import json
import re
import shutil
import sys
from pathlib import Path

from valora_data.contract.bundle import MANIFEST, read_bundle, write_manifest
from valora_serve.demo.command import BUNDLES


def pack(folder: Path, out: Path) -> Path:
    """Copy a bundle, whose files are verified, into a folder of bundles, without its pictures."""
    bundle = read_bundle(folder)
    target = out / bundle.name
    shutil.rmtree(target, ignore_errors=True)
    for name in bundle.manifest["files"]:
        if not name.startswith("pictures/"):  # which only its README shows
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, target / name)  # without its permissions
    card = target / "README.md"
    text = re.sub(r"(?ms)^## Pictures\n.*?(?=^## |\Z)", "", card.read_text(encoding="utf-8"))
    card.write_text(re.sub(r"(?m)^!\[.*\n", "", text), encoding="utf-8")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["lineage"]["config"].pop("paths", None)  # folders of the machine that made it
    write_manifest(target, manifest)
    return target


if __name__ == "__main__":
    print(pack(Path(sys.argv[1]), BUNDLES))
