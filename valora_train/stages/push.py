"""Command `push`: uploads a bundle to a repository of a Hugging Face hub, with a model card.

The token is the one that `hf auth login` or HF_TOKEN gives; HF_ENDPOINT names another hub. ONNX is
not written: LoRA adapters act on a base model that the repository does not hold.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, cast

from valora_data.contract.bundle import read_bundle, write_manifest
from valora_data.contract.files import expanded
from valora_train.errors import PushError
from valora_train.reporting.cards import with_metadata

if TYPE_CHECKING:
    from valora_data.contract.bundle import Bundle
    from valora_train.settings import Settings

CARD = "README.md"


def push(settings: Settings) -> str:
    """Upload the bundle of a task, or the one that `push.bundle` names.

    The repository is made if there is none. What has not changed is not sent again, so an upload
    that was interrupted is repeated by the same command.

    Args:
        settings: All settings.

    Returns:
        Address of the uploaded commit.

    Raises:
        BundleError: The bundle does not exist, or was changed since it was exported.
        PushError: The hub refuses it or cannot be reached; the message says why.
    """
    asked = settings.push
    if not asked.repo:
        raise PushError("command=push needs a repository: set push.repo=owner/name")
    folder = expanded(asked.bundle or Path(settings.paths.bundles) / settings.task.name)
    bundle = read_bundle(folder)
    with TemporaryDirectory(prefix="valora-push-") as place:
        staged = stage_bundle(bundle, Path(place) / bundle.name)
        return _upload(staged, bundle, asked.repo, private=asked.private, revision=asked.revision)


def stage_bundle(bundle: Bundle, target: Path) -> Path:
    """Copy a bundle with a card that has evaluation results, and sign its files again.

    Args:
        bundle: The bundle, which stays as it is.
        target: Folder to make.

    Returns:
        The copy.
    """
    shutil.copytree(bundle.folder, target)
    card = target / CARD
    text = card.read_text(encoding="utf-8") if card.is_file() else f"# {bundle.name}\n"
    card.write_text(with_metadata(text, bundle.manifest), encoding="utf-8")
    write_manifest(target, {k: v for k, v in bundle.manifest.items() if k != "files"})
    return target


def _upload(folder: Path, bundle: Bundle, repo: str, *, private: bool, revision: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    # What the HTTP library of this version of huggingface_hub raises: httpx, or httpx2.
    unreachable = cast("type[Exception]", HfHubHTTPError.__mro__[1])
    api = HfApi(library_name="valora")
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, revision=revision,
            commit_message=f"{bundle.name}, version {bundle.version}",
        )  # fmt: skip
    except HFValidationError as error:
        raise PushError(f"push.repo={repo} is no name of a repository: write owner/name") from error
    except LocalTokenNotFoundError as error:
        raise PushError("the hub asks for a token: run `hf auth login`, or set HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise PushError("HF_HUB_OFFLINE is set: unset it to push") from error
    except HfHubHTTPError as error:
        raise PushError(_refusal(repo, error)) from error
    except unreachable as error:
        raise PushError(
            f"the hub cannot be reached ({type(error).__name__}): check the network and HF_ENDPOINT"
        ) from error
    return str(done.commit_url)


def _refusal(repo: str, error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    said = str(getattr(error, "server_message", None) or error).strip().splitlines()
    reason = said[0] if said else "no reason given"
    if status in (401, 403):
        return (
            f"the hub does not let you write to {repo} ({reason}): run `hf auth login` with a "
            "token that may write, or set HF_TOKEN"
        )
    return f"the hub refuses {repo} ({reason}): check push.repo, and try again"
