"""Stage `data`: reads a domain's samples and splits them.

Output: one Hugging Face data set per split (see `valora_data.shards`), and `unlabelled_truth` with
the true answers of the unlabelled split. Nothing is trained on those; they measure how well a
teacher labels.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.hashing import hash_files
from valora_data.identity import code_hash, hub_commit
from valora_data.prepare import TRUTH, prepare
from valora_data.schema import Split
from valora_data.shards import open_shard
from valora_data.sources.formats.labelled import ImageReader
from valora_data.sources.registry import files_of, open_source
from valora_train.settings import as_dict
from valora_train.stage import Stage, write_json

if TYPE_CHECKING:
    from valora_train.reporting.progress import Step
    from valora_train.settings import DomainSettings

__all__ = ["TRUTH", "build_data", "data_stage"]


HASHES = "hashes"
"""Folder in the work folder that remembers the hashes of single files."""
FAULTS = "faults.json"
"""File in the stage's folder: what was skipped."""


def data_stage(domain: DomainSettings, work: Path | None = None) -> Stage:
    """The stage that reads and splits a domain's data.

    Args:
        domain: The domain.
        work: Folder of all stages, where hashes of files are remembered; None to read all files.

    Raises:
        DataError: If the data does not exist or cannot be read.
    """
    source = domain.source
    for path in (source.path, source.images, source.annotations, source.unlabelled):
        if path is not None and not Path(path).exists() and not source.format.remote:
            raise DataError(f"data of domain {domain.name} not found: {path} does not exist")
    try:
        inputs = _inputs(domain, work)
    except OSError as error:
        raise DataError(
            f"data of domain {domain.name}: {error.filename} cannot be read "
            f"({error.strerror}): check its permissions"
        ) from error
    except DataError as error:
        raise DataError(f"data of domain {domain.name}: {error}") from error
    described = as_dict(source)
    # Stages of sources without documents keep their hashes.
    if source.document is None:
        del described["document"]
    if source.kind != "records":
        del described["entries"]
    if "source" in inputs:  # content counts, not where it lies
        for key in ("images", "annotations", "unlabelled"):
            place = described[key]
            described[key] = None if place is None else os.path.relpath(place, source.path)
        described["path"] = "."
    settings = {"labels": domain.labels, "task": str(domain.task), "source": described}
    if source.format.drawn:
        settings["name"] = domain.name
    return Stage(f"data-{domain.name}", 5, settings, inputs, shared=True)


def _inputs(domain: DomainSettings, work: Path | None) -> dict[str, str]:
    """Content hashes of what the source reads."""
    source = domain.source
    inputs = {}
    if code := code_hash(type(source.format).__module__):
        inputs["code"] = code  # a format of another package
    if source.path is None:
        return inputs
    root = expanded(source.path)
    cache = None if work is None else work / HASHES / f"{domain.name}.json"
    if source.format.remote and not root.exists():
        inputs["commit"] = hub_commit(source.path.partition(":")[0], "dataset")
    else:
        inputs["source"] = hash_files(files_of(domain.data()), root, cache)
    return inputs


def build_data(domain: DomainSettings, folder: Path, on_step: Step = lambda *_: None) -> None:
    """Write the splits into the stage's folder.

    Args:
        domain: The domain.
        folder: Folder to write to.
        on_step: Called with samples written, samples expected, and 0.

    Raises:
        DataError: If a split would be empty or shares an image with another split, too many images
            have faults, or all training samples have the same answer or none.
    """
    source = domain.source
    total = sum(source.counts.values())
    fractions = {Split(split): share for split, share in source.fractions.items()}
    reader = ImageReader(source.path or domain.name, tolerance=source.max_faulty)
    try:
        prepare(
            open_source(replace(domain.data(), reader=reader)),
            domain.labels, fractions, folder, source.seed,
            lambda done: on_step(done, max(done, total), 0.0),
            leaks=source.leaks, near=not source.format.drawn,
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"data of domain {domain.name}: {error}") from error
    reader.finish()
    if reader.faults.found:
        found = [(fault.kind.name.lower(), fault.text) for fault in reader.faults.found]
        write_json(folder / FAULTS, found)
    _check_choices(domain, folder)
    _check_objects(domain, folder)


def _check_objects(domain: DomainSettings, folder: Path) -> None:
    """Check that some training sample of a detection domain has objects."""
    assert domain.task is not None, "`Settings.chosen` fills it in"
    if not domain.task.spec.detects or domain.source.kind == "images":
        return
    if not any(answer.boxes for answer in open_shard(folder / Split.TRAIN).answers()):
        raise DataError(
            f"no training image of domain {domain.name} has an object of {', '.join(domain.labels)}"
            f": check where the labels of {domain.source.path or domain.source.kind} are"
        )


def _check_choices(domain: DomainSettings, folder: Path) -> None:
    """Check that answers are among the labels, and that training samples have several."""
    assert domain.task is not None, "`Settings.chosen` fills it in"
    if not domain.task.spec.choice or not domain.labels:
        return
    chosen = {answer.choice for answer in open_shard(folder / Split.TRAIN).answers()}
    unknown = sorted(str(choice) for choice in chosen if choice not in domain.labels)
    if unknown:
        raise DataError(
            f"domain {domain.name} has samples that are answered by {unknown[0]!r}, which is none "
            f"of its labels ({', '.join(domain.labels)}): add it, or leave those samples out"
        )
    if len(chosen) == 1:
        raise DataError(
            f"all training samples of domain {domain.name} are {chosen.pop()!r}, so that there is "
            "nothing to tell apart: add samples of other labels"
        )
