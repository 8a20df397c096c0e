"""Fill the tiling table of a GPU: VaLoRA §4.3.2 and Algorithm 2, pruned by expert knowledge.

`valora-tile --model meta-llama/…/config.json` measures every shape that the model's projections can
ask for with every candidate that could win, and writes `tables/<gpu>.json`. The paper's search
takes 30 minutes for a model; this one takes less than ten, because

- sizes grow geometrically and look-up takes the nearest (the paper: steps of 32 rows);
- tiles are powers of two of at least 16, or single rows, that fit the shared memory;
- candidates that leave most processors idle, or start far more programs than fit, are dropped;
- only the winner's neighbourhood of the smaller shape before it is tried in full, see `candidates`;
- kernels are compiled beforehand on all cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from valora_kernels.atmm import launch
from valora_kernels.profile import Workload, replay_times, spread
from valora_kernels.tiling import Kind, Shape, Table, Tiling, table_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROWS = (1, 4, 16, 64, 256, 512, 1024, 2048, 4096, 8192)
ADAPTERS = (1, 4, 16, 64)
RANKS = (16, 64, 128)
SHARED_MEMORY = 220 << 10
PROCESSORS = 132
