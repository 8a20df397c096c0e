"""Links in the folders of adapters: which may be followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def leads_inside(folder: Path, target: Path, root: Path) -> bool:
    """Return whether a file of an adapter may be read.

    Args:
        folder: The adapter's folder, below `root`.
        target: Where the file is, with all links resolved.
        root: Folder that adapters may lie in, with all links resolved. In a Hugging Face cache,
            whose files are ``models--…/snapshots/<revision>/<file>`` and link to
            ``models--…/blobs``, these blobs belong to it.
    """
    places = [root]
    at = folder.resolve()
    if at.is_relative_to(root):
        places += [
            one.parent / "blobs" for one in (at, *at.parents)
            if one.name == "snapshots" and one.parent.name.startswith("models--")
        ]  # fmt: skip
    return any(target.is_relative_to(place) for place in places)
