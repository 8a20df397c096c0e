"""Stage `data`: reads a domain's samples and splits them.

Output: one Hugging Face data set per split (see `valora_data.shards`), and `unlabelled_truth` with
the true answers of the unlabelled split. Nothing is trained on those; they measure how well a
teacher labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.prepare import TRUTH, prepare
from valora_data.schema import Split
from valora_data.shards import open_shard
from valora_data.sources.base import Source
from valora_data.sources.registry import open_source
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest

if TYPE_CHECKING:
    from valora_train.reporting.progress import Step
    from valora_train.settings import DomainSettings

__all__ = ["TRUTH", "build_data", "data_stage"]


def data_stage(domain: DomainSettings) -> Stage:
    """The stage that reads and splits a domain's data."""
    source = domain.source
    inputs = {}
    for path in (source.path, source.images, source.annotations):
        if path is None:
            continue
        if Path(path).exists():
            inputs[path] = digest(Path(path))
        elif not source.format.remote:
            raise DataError(f"data of domain {domain.name} not found: {path} does not exist")
    settings = {
        "labels": domain.labels,
        "name": domain.name,
        "task": str(domain.task),
        "source": as_dict(source),
    }
    return Stage(f"data-{domain.name}", 3, settings, inputs)


def build_data(domain: DomainSettings, folder: Path, on_step: Step = lambda *_: None) -> None:
    """Write the splits into the stage's folder.

    Args:
        domain: The domain.
        folder: Folder to write to.
        on_step: Called with samples written, samples expected, and 0.

    Raises:
        DataError: If a split would be empty or shares an image with another split, or if all
            training samples have the same answer.
    """
    source = domain.source
    assert domain.task is not None, "`Settings.chosen` fills it in"
    total = sum(source.counts.values())
    fractions = {Split(split): share for split, share in source.fractions.items()}
    try:
        opened = open_source(
            Source(
                kind=source.kind,
                task=domain.task,
                labels=tuple(domain.labels),
                name=domain.name,
                path=source.path,
                images=source.images,
                annotations=source.annotations,
                columns=source.columns,
                frames=source.frames,
                counts=source.counts,
                seed=source.seed,
            )
        )
        prepare(
            opened, domain.labels, fractions, folder, source.seed,
            lambda done: on_step(done, max(done, total), 0.0),
        )  # fmt: skip
    except DataError as error:
        raise DataError(f"data of domain {domain.name}: {error}") from error
    _check_choices(domain, folder)


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
