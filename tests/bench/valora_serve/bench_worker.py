"""Worker of `bench_tensor_parallel`, which may leave LoRA's own collectives out.

Without collectives the results are wrong and the times those
of everything else, as in S-LoRA's Figure 8.
"""

from __future__ import annotations

import os
import sys

from valora_serve.engine import workers
from valora_serve.parallel.group import Group, PeerMemory

SILENT = "VALORA_BENCH_SILENT"
"""Set to leave LoRA's own collectives out."""
NCCL = "VALORA_BENCH_NCCL"
"""Set to exchange small tensors through NCCL, too."""


def change() -> None:
    """Leave LoRA's own collectives out, or use NCCL alone, if the environment says so."""
    if os.environ.get(NCCL):
        PeerMemory.open = classmethod(lambda *_: None)
    if not os.environ.get(SILENT):
        return

    def start_all_reduce(self, values):
        return lambda: None

    Group.start_all_reduce = start_all_reduce


if __name__ == "__main__":
    change()
    code = workers.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
