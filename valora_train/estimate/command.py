"""The command `estimate`: what a run will take, as a table; nothing is trained for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from valora_data.contract.bundle import read_bundle
from valora_data.contract.files import expanded
from valora_train.estimate.calibration import calibrate
from valora_train.estimate.courses import SHARED_SUCCESS, possible_courses
from valora_train.estimate.prediction import predict
from valora_train.fusion.parent import Parent

if TYPE_CHECKING:
    from rich.console import Console

    from valora_train.estimate.prediction import Prediction
    from valora_train.reporting.progress import Display
    from valora_train.settings import Settings


def estimate(settings: Settings, display: Display) -> Prediction:
    """Predict what a run of all stages with these settings takes.

    Args:
        settings: All settings.
        display: The terminal.

    Raises:
        ValoraError: The run could not begin: its data, teacher or model cannot be used.
    """
    names = [domain.name for domain in settings.chosen()]
    parent = _parent(settings, names)
    courses = possible_courses(settings.fusion, names, settings.train.seed, parent)
    return predict(settings, calibrate(settings, display), courses)


def _parent(settings: Settings, names: list[str]) -> Parent | None:
    """The fusion to extend as its bundle shows it: domains of the same name are unchanged."""
    if settings.fusion.parent is None:
        return None
    bundle = read_bundle(expanded(settings.fusion.parent))
    held = {
        adapter: tuple(name for name in facts["domains"] if name in names)
        for adapter, facts in bundle.adapters.items()
    }
    without = tuple(
        name for name, facts in bundle.domains.items() if facts["adapter"] is None and name in names
    )
    result = {"used": len(held)}
    kept = {adapter: domains for adapter, domains in held.items() if domains}
    return Parent(bundle.folder, bundle.version, kept, without, {}, result)


def print_prediction(found: Prediction, console: Console) -> None:
    """Print a prediction as tables.

    Args:
        found: The prediction.
        console: The console to print to.
    """
    on_gpu = found.gpu > 0
    table = Table(title="What this run will take", title_style="bold")
    table.add_column("stage")
    for column in ("time", "memory", *(["GPU"] if on_gpu else []), "disk"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in found.rows:
        gpu = [_size(row.gpu)] if on_gpu else []
        table.add_row(
            row.stage, _time(row.seconds), _size(row.memory), *gpu, _size(row.disk), row.note
        )
    table.add_section()
    gpu = [_size(found.gpu)] if on_gpu else []
    table.add_row("all", _time(found.seconds), _size(found.memory), *gpu, _size(found.disk))
    console.print(table)
    if not found.attempt[0]:
        console.print(f"The fusion is up to date. Measured in {found.measured:.0f} s.")
        return
    for case in found.cases:
        console.print(
            f"{case.name:>9}: {_time(case.seconds)}, {case.attempts:.1f} attempts, "
            f"{case.adapters:.1f} adapters",
            highlight=False,
        )
    console.print(
        f"Expected: {SHARED_SUCCESS:.0%} of the domains can join an adapter that they try, and all "
        f"need LoRA; an attempt takes {_time(found.attempt[0])} on a new adapter, "
        f"{_time(found.attempt[1])} on average. Measured in {found.measured:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )


def _time(seconds: float) -> str:
    """A duration for people: ``0.4 s``, ``38 s``, ``12 min 05 s``, ``3 h 20 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _size(count: float) -> str:
    """Bytes for people: ``0``, ``12 MB``, ``1.4 GB``."""
    if count < 5e5:
        return "0" if count < 1 else "< 1 MB"
    return f"{count / 1e6:.0f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
