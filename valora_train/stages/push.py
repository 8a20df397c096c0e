"""Command `push`: uploads a bundle to a Hugging Face hub, with a model card."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from valora_data.contract.bundle import read_bundle, write_manifest
from valora_data.errors import ValoraError
from valora_train.reporting.cards import with_metadata
from valora_train.settings import Settings

CARD = "README.md"


def push(settings: Settings) -> str:
    """Upload a bundle, to a repository made if needed; unchanged files are not sent again."""
    asked = settings.push
    if not asked.repo:
        raise ValoraError("command=push needs a repository: set push.repo=owner/name")
    bundle = read_bundle(Path(asked.bundle or f"{settings.paths.bundles}/{settings.task.name}"))
    # What the HTTP library of this version of huggingface_hub raises: httpx, or httpx2.
    unreachable = cast("type[Exception]", HfHubHTTPError.__mro__[1])
    with TemporaryDirectory(prefix="valora-push-") as place:
        folder = shutil.copytree(bundle.folder, Path(place) / bundle.name)
        card = folder / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else f"# {bundle.name}\n"
        card.write_text(with_metadata(text, bundle.manifest), encoding="utf-8")
        # The files are signed again, with a card that has evaluation results.
        write_manifest(folder, {k: v for k, v in bundle.manifest.items() if k != "files"})
        api = HfApi(library_name="valora")
        try:
            api.create_repo(asked.repo, private=asked.private, exist_ok=True)
            if asked.revision is not None:
                api.create_branch(asked.repo, branch=asked.revision, exist_ok=True)
            done = api.upload_folder(
                repo_id=asked.repo, folder_path=folder, revision=asked.revision,
                commit_message=f"{bundle.name}, version {bundle.version}",
            )  # fmt: skip
        except (OSError, ValueError, unreachable) as error:
            said = str(getattr(error, "server_message", None) or error).strip().splitlines()
            raise ValoraError(
                f"the hub does not take {asked.repo} ({type(error).__name__}: "
                f"{said[0] if said else 'no reason given'}): check push.repo=owner/name, the "
                "network and HF_ENDPOINT, and log in with `hf auth login`, or set HF_TOKEN, to a "
                "token that may write"
            ) from error
    return str(done.commit_url)
