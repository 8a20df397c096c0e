"""Writes the splits of a domain to disk, sample by sample."""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from valora_data.duplicates import Duplicates, Likeness, groups_of
from valora_data.errors import DataError
from valora_data.schema import Answer, Document, Sample, Split
from valora_data.shards import ShardWriter, open_shard
from valora_data.splits import split_of
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from valora_data.duplicates import Pair
    from valora_data.sources.base import Splits

log = logging.getLogger(__name__)

TRUTH = "unlabelled_truth"
"""Folder beside the splits: the answers of the unlabelled split, where they are known."""
READ = "read"
"""Folder of what was read, until it is known which split each sample belongs to."""
WHOLE = "all"
"""Name of the part that has no split yet."""
SHOWN_PAIRS = 10
"""Pairs of leaking samples that a message names."""

Leaks = Literal["refuse", "keep_test", "keep_train"]
"""What is done about an image that two given splits share: refuse the data, or keep the copy in
the split that comes last or first in train, unlabelled, val, test."""


def prepare(
    splits: Splits,
    labels: Sequence[str],
    fractions: Mapping[Split, float],
    folder: Path,
    seed: int = 0,
    on_sample: Callable[[int], None] | None = None,
    *,
    leaks: Leaks = "refuse",
    near: bool = True,
) -> dict[Split, int]:
    """Write every split of a domain as a shard; only a few samples are in memory at a time.

    Splits that the source does not have are taken from its part without a split (key None), in
    proportion to their fractions; copies of one picture go to the same split. Answers of the
    unlabelled split are removed and kept in `TRUTH`: nothing is trained on them; they measure how
    well a teacher labels.

    Args:
        splits: From `valora_data.sources.registry.open_source`.
        labels: The domain's labels; empty where answers are language.
        fractions: Share of each split that the source may not name; 0.25 where none is given.
        folder: Where the shards go, named after the splits.
        seed: Seed of the division.
        on_sample: Called with the number of samples so far.
        leaks: What is done about an image that two given splits share. Equal images are refused;
            copies that are only alike are named in a warning.
        near: Whether copies whose pixels differ (resized, recompressed, mirrored) count, too.

    Returns:
        Number of samples of each split.

    Raises:
        DataError: If a split would be empty or shares an image with another, a label is stray, or
            the source cannot be read.
    """
    missing = [split for split in Split if split not in splits]
    if missing and None not in splits:
        raise _empty(missing[0])
    shares = {split: fractions.get(split, 0.25) for split in missing}
    total = sum(shares.values())
    if missing and total <= 0:
        raise DataError(f"the fractions of {', '.join(missing)} are zero: raise one of them")
    shares = {split: share / total for split, share in shares.items()}
    duplicates = Duplicates(near)
    try:
        with _Writers(labels, folder, on_sample) as writers:
            if None in splits or leaks != "refuse":
                _read(splits, labels, folder / READ, duplicates, writers.progress)
                _divide(folder / READ, splits, shares, seed, duplicates.pairs(), leaks, writers)
            else:
                for name, sample in _samples(splits):
                    duplicates.add(name, sample)
                    writers.add(Split(name), sample)
                    writers.progress()
                check_leaks([pair for pair in duplicates.pairs() if pair.leaks])
            writers.check()
    finally:
        shutil.rmtree(folder / READ, ignore_errors=True)
    if not writers.answered[Split.UNLABELLED]:
        shutil.rmtree(folder / TRUTH)
    return writers.counts


class _Writers:
    """Writes the shards of all splits, and the truth of the unlabelled one.

    Attributes:
        counts: Number of samples of each split.
        answered: Number of samples of each split that have an answer.
    """

    def __init__(
        self, labels: Sequence[str], folder: Path, on_sample: Callable[[int], None] | None
    ) -> None:
        self._labels = labels
        self._folder = folder
        self._on_sample = on_sample
        self._stack = ExitStack()
        self._writers: dict[str, ShardWriter] = {}
        self._done = 0
        self.counts = dict.fromkeys(Split, 0)
        self.answered = dict.fromkeys(Split, 0)

    def __enter__(self) -> _Writers:
        self._stack.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def progress(self) -> None:
        """Say that one more sample was read."""
        self._done += 1
        if self._on_sample is not None:
            self._on_sample(self._done)

    def add(self, split: Split, sample: Sample) -> None:
        """Write a sample."""
        self.answered[split] += sample.answer != Answer()
        if split is Split.UNLABELLED:
            self._writer(TRUTH).add(sample)
            sample = replace(sample, answer=Answer())
        self._writer(split).add(sample)
        self.counts[split] += 1

    def add_row(
        self, split: Split, row: dict[str, Any], answer: Answer, document: Document | None
    ) -> None:
        """Write a row of a shard with the same labels, whose answer is known."""
        for name in (TRUTH, split) if split is Split.UNLABELLED else (split,):
            self._writer(name).ask_about(document)
        self.answered[split] += answer != Answer()
        if split is Split.UNLABELLED:
            self._writer(TRUTH).add_row(row)
            row = {**row, **UNANSWERED}
        self._writer(split).add_row(row)
        self.counts[split] += 1

    def check(self) -> None:
        """Check that no split is empty, and none without answers that is measured on."""
        for split, count in self.counts.items():
            if not count:
                raise _empty(split)
        for split in (Split.VAL, Split.TEST):
            if any(self.answered.values()) and not self.answered[split]:
                raise DataError(
                    f"none of the {plural(self.counts[split], f'{split} sample')} has an object or "
                    f"another answer, so that nothing could be measured: label some, or leave the "
                    f"{split} split out of the data set, so that a part of train is taken for it"
                )

    def _writer(self, name: str) -> ShardWriter:
        if name not in self._writers:
            images_of = str(Split.UNLABELLED) if name == TRUTH else None
            writer = ShardWriter(self._labels, self._folder / name, images_of)
            self._writers[name] = self._stack.enter_context(writer)
        return self._writers[name]


UNANSWERED: Mapping[str, Any] = {
    "label": None, "soft": [], "answers": [], "captions": [], "count": None,
    "objects": {"bbox": [], "category": [], "score": []},
}  # fmt: skip
"""Columns of a sample without an answer."""


def _samples(splits: Splits) -> Iterator[tuple[str, Sample]]:
    for split, stream in splits.items():
        for sample in stream():
            yield WHOLE if split is None else str(split), sample


def _read(
    splits: Splits,
    labels: Sequence[str],
    folder: Path,
    duplicates: Duplicates,
    progress: Callable[[], None],
) -> None:
    """Read all samples once, into one shard for each part of the source."""
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}
        for name, sample in _samples(splits):
            duplicates.add(name, sample)
            if name not in writers:
                writers[name] = stack.enter_context(ShardWriter(labels, folder / name))
            writers[name].add(sample)
            progress()


def _divide(
    folder: Path,
    splits: Splits,
    shares: Mapping[Split, float],
    seed: int,
    pairs: Sequence[Pair],
    leaks: Leaks,
    writers: _Writers,
) -> None:
    """Give every sample that was read to its split."""
    given = {str(split) for split in splits if split is not None}
    across = [pair for pair in pairs if pair.leaks]
    if leaks == "refuse":
        check_leaks(across)
    leaders = groups_of(pairs)
    kept = {} if leaks == "refuse" else _kept(leaders, leaks)
    dropped = 0
    for part in (WHOLE, *Split):
        if not (folder / part).is_dir():
            continue
        shard = open_shard(folder / part)
        for index, answer in enumerate(shard.answers()):
            row = shard.row(index)
            key = (str(part), row["id"].split("#", 1)[0])
            leader = leaders.get(key, key)
            if kept.get(leader, part) != part:
                dropped += 1
                continue
            split = Split(part) if part in given else split_of(leader[1], shares, seed)
            writers.add_row(split, row, answer, shard.document)
    if dropped:
        log.warning(
            "%d samples left out, whose image is in another split, too (source.leaks=%s)",
            dropped, leaks,
        )  # fmt: skip


def _kept(leaders: Mapping[Any, Any], leaks: Leaks) -> dict[Any, str]:
    """The part of the source in which each group of copies stays."""
    order = [str(Split.TRAIN), WHOLE, str(Split.UNLABELLED), str(Split.VAL), str(Split.TEST)]
    kept: dict[Any, str] = {}
    for (part, _), leader in leaders.items():
        known = kept.setdefault(leader, part)
        better = max if leaks == "keep_test" else min
        kept[leader] = better(known, part, key=order.index)
    return kept


def check_leaks(pairs: Sequence[Pair]) -> None:
    """Refuse equal images in two splits; warn of those that are alike.

    Args:
        pairs: Pairs that leak.

    Raises:
        DataError: There are equal images; the message names the pairs.
    """
    for equal in (True, False):
        found = [pair for pair in pairs if (pair.likeness is Likeness.EQUAL) == equal]
        if not found:
            continue
        shown = "; ".join(map(str, found[:SHOWN_PAIRS]))
        more = f"; and {len(found) - SHOWN_PAIRS} more" if len(found) > SHOWN_PAIRS else ""
        remedy = (
            "keep each in one split, or set domains.NAME.source.leaks=keep_test (or keep_train) to "
            "leave the other copy out; `valora-data check` draws the pairs"
        )
        if equal:
            leak = plural(len(found), "sample|samples leaks|leak between splits")
            raise DataError(f"{leak} ({shown}{more}): {remedy}")
        log.warning(
            "%s like one of another split (%s%s): if they are the same, %s",
            plural(len(found), "sample|samples looks|look"), shown, more, remedy,
        )  # fmt: skip


def _empty(split: Split) -> DataError:
    return DataError(f"there are no {split} samples: add some, or raise the share of the split")
