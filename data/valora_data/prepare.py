"""Writes the splits of a domain to disk, sample by sample."""

from __future__ import annotations

import logging
import shutil
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from valora_data.duplicates import Duplicates, Likeness, groups_of
from valora_data.errors import DataError
from valora_data.schema import Answer, Split
from valora_data.shards import ShardWriter, open_shard
from valora_data.splits import split_of
from valora_data.wording import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from valora_data.duplicates import Key, Pair
    from valora_data.shards import Shard
    from valora_data.sources.base import Splits

log = logging.getLogger(__name__)

TRUTH = "unlabelled_truth"
"""Folder beside the splits: the answers of the unlabelled split, where they are known."""
READ = "read"
"""Folder of what was read, one shard a part of the source, until its samples have a split."""
WHOLE = "all"
"""Name of the part that has no split yet."""
SHOWN_PAIRS = 10
"""Pairs of leaking samples that a message names."""

UNANSWERED: Mapping[str, Any] = {
    "label": None, "soft": [], "answers": [], "captions": [], "count": None,
    "objects": {"bbox": [], "category": [], "score": []},
}  # fmt: skip
"""Columns of a sample without an answer."""

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
        _read(splits, labels, folder / READ, duplicates, on_sample)
        pairs = duplicates.pairs()
        if leaks == "refuse":
            check_leaks([pair for pair in pairs if pair.leaks])
        parts = {part: open_shard(folder / READ / part) for part in (WHOLE, *Split)
                 if (folder / READ / part).is_dir()}  # fmt: skip
        given = {str(split) for split in splits if split is not None}
        plan = _divide(parts, given, shares, seed, groups_of(pairs), leaks)
        answers = {name: shard.answers() for name, shard in parts.items()}
        answered = {
            split: sum(answers[part][index] != Answer() for part, index in rows)
            for split, rows in plan.items()
        }
        _check(plan, answered)
        for split, rows in plan.items():
            _write(split, rows, parts, labels, folder, truth=answered[Split.UNLABELLED] > 0)
    finally:
        shutil.rmtree(folder / READ, ignore_errors=True)
    return {split: len(rows) for split, rows in plan.items()}


def _read(
    splits: Splits,
    labels: Sequence[str],
    folder: Path,
    duplicates: Duplicates,
    on_sample: Callable[[int], None] | None,
) -> None:
    """Read all samples once, into one shard for each part of the source."""
    done = 0
    for split, stream in splits.items():
        name = WHOLE if split is None else str(split)
        with ExitStack() as stack:
            writer = None
            for sample in stream():
                writer = writer or stack.enter_context(ShardWriter(labels, folder / name))
                duplicates.add(name, sample)
                writer.add(sample)
                done += 1
                if on_sample is not None:
                    on_sample(done)


def _divide(
    parts: Mapping[str, Shard],
    given: set[str],
    shares: Mapping[Split, float],
    seed: int,
    leaders: Mapping[Key, Key],
    leaks: Leaks,
) -> dict[Split, list[tuple[str, int]]]:
    """The samples of every split: which part holds each, and where."""
    kept = {} if leaks == "refuse" else _kept(leaders, leaks)
    plan: dict[Split, list[tuple[str, int]]] = {split: [] for split in Split}
    dropped = 0
    for part, shard in parts.items():
        for index, name in enumerate(shard.ids()):
            key = (part, name.split("#", 1)[0])
            leader = leaders.get(key, key)
            if kept.get(leader, part) != part:
                dropped += 1
                continue
            split = Split(part) if part in given else split_of(leader[1], shares, seed)
            plan[split].append((part, index))
    if dropped:
        log.warning(
            "%d samples left out, whose image is in another split, too (source.leaks=%s)",
            dropped, leaks,
        )  # fmt: skip
    return plan


def _kept(leaders: Mapping[Key, Key], leaks: Leaks) -> dict[Key, str]:
    """The part of the source in which each group of copies stays."""
    order = [str(Split.TRAIN), WHOLE, str(Split.UNLABELLED), str(Split.VAL), str(Split.TEST)]
    better = max if leaks == "keep_test" else min
    kept: dict[Key, str] = {}
    for (part, _), leader in leaders.items():
        kept[leader] = better(kept.get(leader, part), part, key=order.index)
    return kept


def _check(plan: Mapping[Split, Sequence[Any]], answered: Mapping[Split, int]) -> None:
    """Check that no split is empty, and none without answers that is measured on."""
    for split, rows in plan.items():
        if not rows:
            raise _empty(split)
    for split in (Split.VAL, Split.TEST):
        if any(answered.values()) and not answered[split]:
            raise DataError(
                f"none of the {plural(len(plan[split]), f'{split} sample')} has an object or "
                "another answer, so that nothing could be measured: label some, or leave the "
                f"{split} split out of the data set, so that a part of train is taken for it"
            )


def _write(
    split: Split,
    rows: Sequence[tuple[str, int]],
    parts: Mapping[str, Shard],
    labels: Sequence[str],
    folder: Path,
    truth: bool,
) -> None:
    """Write a split; a part that becomes one as it is, is moved."""
    part = rows[0][0]
    if split is not Split.UNLABELLED and rows == [(part, i) for i in range(len(parts[part]))]:
        (folder / READ / part).rename(folder / split)
        return
    with ExitStack() as stack:
        writer = stack.enter_context(ShardWriter(labels, folder / split))
        answers = None
        if split is Split.UNLABELLED and truth:
            answers = stack.enter_context(ShardWriter(labels, folder / TRUTH, str(split)))
        for part, index in rows:
            row, document = parts[part].row(index), parts[part].document
            if answers is not None:
                answers.add_row(row, document)
            bare = UNANSWERED if split is Split.UNLABELLED else {}
            writer.add_row({**row, **bare}, document)


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
