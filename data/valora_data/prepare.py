"""Writes the splits of a domain to disk, sample by sample."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from valora_data.errors import DataError
from valora_data.schema import Answer, Sample, Split
from valora_data.shards import ShardWriter
from valora_data.splits import LeakCheck, split_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from valora_data.sources.base import Splits

TRUTH = "unlabelled_truth"
"""Folder beside the splits: the answers of the unlabelled split, where they are known."""


def prepare(
    splits: Splits,
    labels: Sequence[str],
    fractions: Mapping[Split, float],
    folder: Path,
    seed: int = 0,
    on_sample: Callable[[int], None] | None = None,
) -> dict[Split, int]:
    """Write every split of a domain as a shard; only a few samples are in memory at a time.

    Splits that the source does not have are taken from its part without a split (key None), in
    proportion to their fractions. Answers of the unlabelled split are removed and kept in `TRUTH`:
    nothing is trained on them; they measure how well a teacher labels.

    Args:
        splits: From `valora_data.sources.registry.open_source`.
        labels: The domain's labels; empty where answers are language.
        fractions: Share of each split that the source may not name; 0.25 where none is given.
        folder: Where the shards go, named after the splits.
        seed: Seed of the division.
        on_sample: Called with the number of samples so far.

    Returns:
        Number of samples of each split.

    Raises:
        DataError: If a split would be empty or shares an image with another, a label is stray, or
            the source cannot be read.
    """
    missing = [split for split in Split if split not in splits]
    counts = dict.fromkeys(Split, 0)
    if missing and None not in splits:
        raise _empty(missing[0])
    shares = {split: fractions.get(split, 0.25) for split in missing}
    total = sum(shares.values())
    if missing and total <= 0:
        raise DataError(f"the fractions of {', '.join(missing)} are zero: raise one of them")
    leaks = LeakCheck()
    answered = False
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}

        def write(name: str, sample: Sample) -> None:
            if name not in writers:
                writers[name] = stack.enter_context(ShardWriter(labels, folder / name))
            writers[name].add(sample)

        for split, sample in _samples(splits, {key: s / total for key, s in shares.items()}, seed):
            leaks.add(split, sample)
            if split is Split.UNLABELLED:
                write(TRUTH, sample)
                answered = answered or sample.answer != Answer()
                sample = replace(sample, answer=Answer())  # noqa: PLW2901
            write(split, sample)
            counts[split] += 1
            if on_sample is not None:
                on_sample(sum(counts.values()))
        leaks.finish()
        for split, count in counts.items():
            if not count:
                raise _empty(split)
    if not answered:
        shutil.rmtree(folder / TRUTH)
    return counts


def _samples(
    splits: Splits, shares: Mapping[Split, float], seed: int
) -> Iterator[tuple[Split, Sample]]:
    for split, stream in splits.items():
        for sample in stream():
            yield split_of(sample.id, shares, seed) if split is None else split, sample


def _empty(split: Split) -> DataError:
    return DataError(f"there are no {split} samples: add some, or raise the share of the split")
