"""Measures the tilings of a GPU for which no table is shipped, while the engine has no requests.

Steps choose from them once all are measured and graphs are captured again. `valora-tile` tries more
candidates, on a GPU that nothing else uses.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from valora_kernels.gpus import H200, Gpu, gpu_of
from valora_kernels.launching import ALIGNMENT, kernels, padded_ranks
from valora_kernels.lookup import TilingTable, is_measured, table_of, use_table, using
from valora_kernels.operators import ATMM
from valora_kernels.tiling import Case, ProjectionGroup
from valora_kernels.tune import Compiler, Piece, Tuner, cases
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.runner import ModelRunner
from valora_serve.model.work import Preparation

log = logging.getLogger(__name__)


class Tuning:
    """Tilings of the GPU of one engine."""

    def __init__(
        self, tuner: Tuner, file: Path, runner: ModelRunner, settings: EngineSettings,
        terms: Sequence[int],
    ) -> None:  # fmt: skip
        self.adopted = 0  # how often steps have begun to choose from new measurements
        self.progress = (0, 0)  # shapes that are measured, and those that are or will be
        self.tuner, self._file, self._runner = tuner, file, runner
        self._terms = [count for count in terms if count]
        self._cases = cases(settings.max_tokens, settings.max_adapters, tuner.table.gpu)
        self._used = tuner.table  # by steps
        self._renewed: set[Preparation] = set()
        self._writable = True

    def go_on(self) -> bool:
        """Do a piece of about a second without requests; False if there is none now."""
        tuner = self.tuner
        known, wanted = tuner.table, self._wanted()
        with torch.inference_mode():
            piece = tuner.go_on(wanted)
        measured = sum(group.shape(*case) in tuner.table.entries for group, case in wanted)
        self.progress = measured, measured + len(tuner.left(wanted))
        if tuner.table is not known:
            self._keep()
        if piece is not Piece.NONE_LEFT:
            return piece is Piece.MEASURED
        tuner.close()  # it goes on all the same if there is more later
        return tuner.table is not self._used and self._renew()

    def restart(self) -> None:
        """Take note that graphs were captured anew, with the tilings in use."""
        self._renewed.clear()

    def _wanted(self) -> list[tuple[ProjectionGroup, Case]]:
        orders: dict[ProjectionGroup, bool] = {}  # whether LoRA may come before the base product
        for group in self._runner.lmm.linears.groups.values():
            widths = group.spec.in_features, *group.spec.out_features
            aligned = all(width % ALIGNMENT == 0 for width in widths)
            if group.lora is not None and group.spec.part == "text" and aligned:
                size = ProjectionGroup(widths[0], widths[1:], padded_ranks(group.lora))
                orders[size] = orders.get(size, False) or not group.quantized
        cases = [(size, case) for size in orders for case in self._cases]
        return [(size, case) for size, case in cases if orders[size] or not case.first]

    def _keep(self) -> None:
        """Write what is measured to the file, beside what other engines have measured."""
        table = self.tuner.table
        entries = {**read_table(self._file, table.gpu).entries, **table.entries}
        try:
            TilingTable(table.gpu, entries.items()).save(self._file, torch=torch.__version__)
        except OSError as error:
            if self._writable:
                log.warning("the tilings of this GPU are not kept: %s: %s", self._file, error)
            self._writable = False

    def _renew(self) -> bool:
        left = [one for one in self._runner.tiled(self._terms) if one not in self._renewed]
        new = self.tuner.table
        if left:
            with using(new):
                self._runner.renew(left[0])
            self._renewed.add(left[0])
            return True
        use_table(new)
        self._used = new
        self._renewed.clear()
        self.adopted += 1
        log.info("tilings of the LoRA kernels are measured: %s", self._file)
        return True


def read_table(file: Path, gpu: Gpu) -> TilingTable:
    """Return the tilings of a file; none if there is no such file, or it is of no use."""
    try:
        return TilingTable.load(file, gpu)
    except FileNotFoundError:
        pass
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        log.warning("tilings are measured again, as they cannot be read: %s: %s", file, error)
    return TilingTable(gpu, [])


def make_tuning(
    settings: EngineSettings, runner: ModelRunner, terms: Sequence[int]
) -> Tuning | None:
    """Use the measured tilings of the GPU, and measure others unless they are shipped (None)."""
    device = runner.device
    if device.type != "cuda" or kernels() is None or is_measured(gpu := gpu_of(device)):
        return None
    name = gpu.name.lower().replace(" ", "_").replace("/", "_")
    file = settings.folder("tiling") / f"{name}.json"
    table = read_table(file, gpu)
    if table.entries:
        use_table(table)
    if not (settings.profile and settings.operator == ATMM):
        return None
    tuner = Tuner(table, table_of(H200), Compiler(device), device)
    return Tuning(tuner, file, runner, settings, terms)
