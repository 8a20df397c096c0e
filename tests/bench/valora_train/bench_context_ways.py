"""Stage `baselines`: ways to answer about documents, trained and measured side by side.

Output: `baselines.json` (each answer with whether it is right, by way and size) and
`baselines.md` (the table). What is measured is kept, so an interrupted stage continues with the
next way.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from valora_data import shards
from valora_data.contract.base_model import base_hash, processor_hash
from valora_data.schema import Split
from valora_train.fusion.facts import domain_facts, training_facts
from valora_train.fusion.loading import LazyMapping, load_domain, make_deterministic
from valora_train.model.lmm import Lmm
from valora_train.reporting.baseline_table import COLUMNS, baseline_rows
from valora_train.reporting.text import markdown_table
from valora_train.settings import as_dict
from valora_train.stage import Stage, digest, intact, read_json, write_json
from valora_train.stages.distill import TAUGHT
from valora_train.trials.contexts import METHODS, REFERENCE, Reader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from valora_data.schema import Sample
    from valora_train.fusion.samples import DomainData
    from valora_train.reporting.progress import Display
    from valora_train.settings import Settings
    from valora_train.stages.fuse import DomainInputs

RESULTS = "baselines.json"
TABLE = "baselines.md"


@dataclass(frozen=True)
class Measured:
    """A way of a size, as it was measured.

    Attributes:
        method: Name in `METHODS`.
        size: Tokens that were asked for; 0 where the way has no size.
        said: Each answer with whether it is right, by document.
        bytes: Bytes that are kept for a document.
        tokens: Tokens that stand before a question, on average.
        seconds: Seconds of learning for a document.
    """

    method: str
    size: int
    said: dict[str, list[tuple[str, bool]]]
    bytes: float
    tokens: float
    seconds: float


def asked_for(settings: Settings) -> list[tuple[str, int]]:
    """The ways and sizes to measure; the one that others are compared with comes first."""
    count = len(settings.chosen())
    names = settings.baselines.methods or [
        name for name, way in METHODS.items() if way.documents <= count
    ]
    names = [REFERENCE, *(name for name in names if name != REFERENCE)]
    return [
        (name, size)
        for name in names
        for size in (settings.baselines.tokens if METHODS[name].sized else [0])
    ]


def baseline_stage(settings: Settings, domains: Sequence[DomainInputs]) -> Stage:
    """The stage that compares ways to answer about the documents."""
    inputs = {
        "base": base_hash(settings.model.id),
        "processor": processor_hash(settings.model.id),
    }
    for item in domains:
        inputs[f"{item.settings.name}/taught"] = digest(item.distilled / TAUGHT)
        inputs[f"{item.settings.name}/test"] = digest(item.data / Split.TEST)
    values: dict[str, Any] = training_facts(settings) | {"baselines": as_dict(settings.baselines)}
    values["domains"] = [domain_facts(item.settings) for item in domains]
    return Stage(f"baselines-{settings.task.name}", 1, values, inputs, resumable=True)


def build_baselines(
    settings: Settings, domains: Sequence[DomainInputs], folder: Path, display: Display
) -> None:
    """Measure what is missing, and write the table into the stage's folder."""
    make_deterministic(settings.train.threads)
    found = read_baselines(folder) if (folder / RESULTS).is_file() else []
    done = {(one.method, one.size) for one in found}
    with display.work("baselines", "loading the base model"):
        lmm = Lmm(settings.model, settings.train.lora)
    data = _load(settings, domains, lmm, display)
    asked = asked_for(settings)
    Reader(settings, lmm, data, lambda *_: None).check(max(size for _, size in asked))
    for name, size in asked:
        if (name, size) in done:
            continue
        title = METHODS[name].title + (f", {size} tokens" if size else "")
        with display.work("baselines", title) as on_step:
            answered = METHODS[name].run(Reader(settings, lmm, data, on_step), size)
        found.append(Measured(name, size, **asdict(answered)))
        write_json(folder / RESULTS, [asdict(one) for one in found])
        (row,) = baseline_rows(found[-1:], METHODS, REFERENCE)
        display.note("baselines", f"{title}: {row[COLUMNS.index('accuracy (95 %)')]}")
    rows = baseline_rows(found, METHODS, REFERENCE)
    (folder / TABLE).write_text("\n".join(markdown_table(COLUMNS, rows)) + "\n", encoding="utf-8")


def read_baselines(folder: Path) -> list[Measured]:
    """What was measured."""
    return [Measured(**row) for row in read_json(intact(folder / RESULTS))]


def _load(
    settings: Settings, domains: Sequence[DomainInputs], lmm: Lmm, display: Display
) -> LazyMapping:
    inputs = {item.settings.name: item for item in domains}

    def load(name: str) -> DomainData:
        item = inputs[name]

        def read(part: str) -> list[Sample]:
            place = (item.distilled if part == TAUGHT else item.data) / part
            return shards.read(intact(place))

        with display.work("baselines", f"reading {name}"):
            return load_domain(settings, item.settings, 1.0, lmm, read)

    return LazyMapping(inputs, load)
