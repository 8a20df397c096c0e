"""Stage `data`: a shard per split, and `unlabelled_truth`, which measures teachers."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from valora_data.contract.files import expanded
from valora_data.errors import DataError
from valora_data.faults import ImageReader
from valora_data.hashing import code_hash, hash_files, hub_commit
from valora_data.prepare import TRUTH, prepare
from valora_data.schema import Split
from valora_data.shards import open_shard
from valora_data.sources.registry import files_of, open_source
from valora_data.wording import examples
from valora_train.reporting.progress import Step
from valora_train.settings import LABELS, DomainSettings, as_dict
from valora_train.stage import Stage, write_json

log = logging.getLogger(__name__)

HASHES = "hashes"  # folder in the work folder that remembers the hashes of single files
FAULTS = "faults.json"  # what was skipped, in the stage's folder


def data_stage(domain: DomainSettings, work: Path | None = None) -> Stage:
    """The stage that reads and splits a domain's data; `work` remembers hashes of files."""
    source = domain.source
    inputs = {}
    if code := code_hash(type(source.format).__module__):
        inputs["code"] = code  # a format of another package
    described = as_dict(source)
    # Stages of sources without documents, or without files of answers, keep their hashes.
    described["annotations"] = None
    if source.document is None:
        del described["document"]
    if source.kind != "records":
        del described["entries"]
    try:
        if source.path is None:
            pass
        elif source.format.remote and not expanded(source.path).exists():
            inputs["commit"] = hub_commit(source.path.partition(":")[0], "dataset")
        else:
            cache = None if work is None else work / HASHES / f"{domain.name}.json"
            files, root = files_of(domain.data()), expanded(source.path)
            inputs["source"] = hash_files(files, root, cache)
            for key in ("images", "unlabelled"):  # content counts, not its place
                place = described[key]
                described[key] = None if place is None else os.path.relpath(place, source.path)
            described["path"] = "."
    except OSError as error:
        text = f"data of domain {domain.name}: {error.filename} cannot be read ({error.strerror}):"
        raise DataError(f"{text} check its permissions") from error
    except DataError as error:
        raise DataError(f"data of domain {domain.name}: {error}") from error
    settings = {"labels": domain.labels, "task": str(domain.task), "source": described}
    if source.format.drawn:
        settings["name"] = domain.name
    return Stage(f"data-{domain.name}", 5, settings, inputs, shared=True)


def build_data(domain: DomainSettings, folder: Path, on_step: Step = lambda *_: None) -> None:
    """Write the splits into the stage's folder."""
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
        reader.warn_of_lost()  # which may be why
        raise DataError(f"data of domain {domain.name}: {error}") from error
    reader.finish()
    _warn_of_classes(domain, folder)
    if reader.found:
        found = [(fault.kind.name.lower(), fault.text) for fault in reader.found]
        write_json(folder / FAULTS, found)
    _check_answers(domain, folder)


def _check_answers(domain: DomainSettings, folder: Path) -> None:
    """Check that a head can learn from the labelled training samples."""
    spec, labels = domain.task_type.spec, domain.labels
    answers = open_shard(folder / Split.TRAIN).answers()
    if spec.detects and domain.source.kind != "images" and not any(one.boxes for one in answers):
        raise DataError(
            f"no training image of domain {domain.name} has an object of {', '.join(labels)}"
            f": check where the labels of {domain.source.path or domain.source.kind} are"
        )
    if not spec.choice or not labels:
        return
    chosen = {str(answer.choice) for answer in answers}
    if unknown := sorted(chosen.difference(labels)):
        raise DataError(
            f"domain {domain.name} has samples that are answered by {unknown[0]!r}, which is none "
            f"of its labels ({', '.join(labels)}): add it, or leave those samples out"
        )
    if len(chosen) == 1:
        text = f"all training samples of domain {domain.name} are {chosen.pop()!r}, so that there"
        raise DataError(f"{text} is nothing to tell apart: add samples of other labels")


def _warn_of_classes(domain: DomainSettings, folder: Path) -> None:
    """Warn of classes that nothing can learn, or that the accuracy on test says nothing of."""
    known: dict[str, list[str]] = {LABELS: [Split.TRAIN, TRUTH], "train": [Split.TRAIN]}
    learnt = known.get(domain.teacher, [])
    for what, parts in (("training", learnt), ("test", [Split.TEST])):
        shards = [open_shard(folder / part) for part in parts if (folder / part).is_dir()]
        answers = [answer for shard in shards for answer in shard.answers()]
        shown = {box.label for one in answers for box in one.boxes}
        shown |= {one.choice for one in answers if one.choice is not None}
        lacking = [label for label in domain.labels if label not in shown]
        if shown and lacking and not domain.source.format.drawn:
            text = "domain %s: no %s sample shows %s: label some, or leave it out of its labels"
            log.warning(text, domain.name, what, examples(lacking, 3))
