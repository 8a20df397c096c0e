"""Writes the splits of a domain to disk, sample by sample."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from valora_data.duplicates import Duplicates, Key, Pair, groups_of
from valora_data.errors import DataError
from valora_data.schema import Answer, Split
from valora_data.shards import ShardWriter, open_shard
from valora_data.sources.base import Splits
from valora_data.wording import examples, plural

log = logging.getLogger(__name__)

TRUTH = "unlabelled_truth"
"""Folder beside the splits: the answers of the unlabelled split, where they are known."""
READ = "read"  # folder of what was read, until its samples have a split
WHOLE = "all"  # name of the part that has no split yet
SHOWN_PAIRS = 10  # pairs of leaking samples that a message names
UNANSWERED: Mapping[str, Any] = {
    "label": None, "soft": [], "answers": [], "captions": [], "count": None,
    "objects": {"bbox": [], "category": [], "score": []},
}  # fmt: skip
Leaks = Literal["refuse", "keep_test", "keep_train"]


def prepare(
    splits: Splits, labels: Sequence[str], fractions: Mapping[Split, float], folder: Path,
    seed: int = 0, on_sample: Callable[[int], None] = lambda _: None, *,
    leaks: Leaks = "refuse", near: bool = True,
) -> dict[Split, int]:  # fmt: skip
    """Write every split of a domain as a shard, and return the number of samples of each.

    Missing splits are taken from the part without a split (key None) by `fractions` (0.25 where
    none is given); copies of a picture, also changed ones if `near`, stay together. Answers of the
    unlabelled split go to `TRUTH`: they measure teachers. `leaks` refuses an image that given
    splits share, or keeps its copy in the last or first split.

    Raises:
        DataError: A split is empty or leaks, a label is stray, or the source cannot be read.
    """
    missing = [split for split in Split if split not in splits]
    if missing and None not in splits:
        raise _empty(missing[0])
    shares = {split: fractions.get(split, 0.25) for split in missing}
    total = sum(shares.values())
    if missing and total <= 0:
        raise DataError(f"the fractions of {', '.join(missing)} are zero: raise one of them")
    shares = {split: share / total for split, share in shares.items()}
    duplicates, keys = Duplicates(near), list[Key]()
    try:
        with ShardWriter(labels, folder / READ) as writer:
            for split, stream in splits.items():
                part = str(split or WHOLE)
                for sample in stream():
                    duplicates.add(part, sample)
                    writer.add(sample)
                    keys.append((part, sample.id.split("#", 1)[0]))
                    on_sample(len(keys))
        pairs = duplicates.pairs()
        if disputed := [str(pair) for pair in pairs if pair.disputed]:
            told = plural(len(disputed), "image|images has|have")
            log.warning(
                "%s two labels (%s): keep one of them", told, examples(disputed, SHOWN_PAIRS)
            )
        if leaks == "refuse":
            check_leaks([pair for pair in pairs if pair.leaks])
        plan = _divide(keys, shares, seed, groups_of(pairs), leaks)
        read = open_shard(folder / READ)
        known = [answer != Answer() for answer in read.answers()]
        _check(plan, known)
        for split, rows in plan.items():
            bare = UNANSWERED if split is Split.UNLABELLED else {}
            with ShardWriter(labels, folder / split) as writer:
                for row in rows:
                    writer.add_row({**read.row(row), **bare}, read.document)
        if any(known[row] for row in plan[Split.UNLABELLED]):
            with ShardWriter(labels, folder / TRUTH, images_of=str(Split.UNLABELLED)) as writer:
                for row in plan[Split.UNLABELLED]:
                    writer.add_row(read.row(row), read.document)
    finally:
        shutil.rmtree(folder / READ, ignore_errors=True)
    return {split: len(rows) for split, rows in plan.items()}


def _divide(
    keys: Sequence[Key], shares: Mapping[Split, float], seed: int, leaders: Mapping[Key, Key],
    leaks: Leaks,
) -> dict[Split, list[int]]:  # fmt: skip
    kept: dict[Key, str] = {}  # the part in which each group of copies stays
    if leaks != "refuse":
        order = [Split.TRAIN, WHOLE, Split.UNLABELLED, Split.VAL, Split.TEST]
        better = max if leaks == "keep_test" else min
        for (part, _), leader in leaders.items():
            kept[leader] = better(kept.get(leader, part), part, key=order.index)
    plan: dict[Split, list[int]] = {split: [] for split in Split}
    dropped = 0
    for row, key in enumerate(keys):
        part, leader = key[0], leaders.get(key, key)
        if kept.get(leader, part) != part:
            dropped += 1
        else:
            split = split_of(leader[1], shares, seed) if part == WHOLE else Split(part)
            plan[split].append(row)
    if dropped:
        text = "%d samples left out, whose image is in another split, too (source.leaks=%s)"
        log.warning(text, dropped, leaks)
    return plan


def _check(plan: Mapping[Split, Sequence[int]], known: Sequence[bool]) -> None:
    for split, rows in plan.items():
        if not rows:
            raise _empty(split)
        if split in (Split.VAL, Split.TEST) and any(known) and not any(known[row] for row in rows):
            raise DataError(
                f"none of the {plural(len(rows), f'{split} sample')} has an object or "
                "another answer, so that nothing could be measured: label some, or leave the "
                f"{split} split out of the data set, so that a part of train is taken for it"
            )


def split_of(sample_id: str, shares: Mapping[Split, float], seed: int = 0) -> Split:
    """The split of a sample by a hash of its image's id, the same when the set grows."""
    digest = sha256(f"{seed}/{sample_id.split('#', 1)[0]}".encode()).digest()
    fraction = int.from_bytes(digest[:8], "big") / 2**64
    used = [split for split in shares if shares[split] > 0]
    for split in used[:-1]:
        if fraction < shares[split]:
            return split
        fraction -= shares[split]
    return used[-1]


def check_leaks(pairs: Sequence[Pair]) -> None:
    """Warn of pairs in two splits that are alike; raise a `DataError` that names equal ones."""
    remedy = (
        "keep each in one split, or set domains.NAME.source.leaks=keep_test (or keep_train) to "
        "leave the other copy out; `valora-data check` lists all pairs"
    )
    if equal := [str(pair) for pair in pairs if pair.equal]:
        leak = plural(len(equal), "sample|samples leaks|leak between splits")
        raise DataError(f"{leak} ({examples(equal, SHOWN_PAIRS)}): {remedy}")
    if pairs:
        looks = plural(len(pairs), "sample|samples looks|look like one of another split")
        shown = examples([*map(str, pairs)], SHOWN_PAIRS)
        log.warning("%s (%s): if they are the same, %s", looks, shown, remedy)


def _empty(split: Split) -> DataError:
    return DataError(f"there are no {split} samples: add some, or raise the share of the split")
