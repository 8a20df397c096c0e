"""Processes that train one adapter together: each a share of the same batches."""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import broadcast_object_list


def start(device: str) -> Accelerator:
    """Meet the other processes, if there are any, which train on ``cuda`` or ``cpu``."""
    # The main process may train small models for hours while the others wait.
    waiting = InitProcessGroupKwargs(timeout=timedelta(days=7))
    return Accelerator(cpu=device == "cpu", kwargs_handlers=[waiting])


def agree(value: Any) -> Any:
    """Return the main process's value on every process, so that all decide alike."""
    return broadcast_object_list([value])[0]


def end_process() -> None:
    """End a process that trained with others; one that worked alone goes on."""
    # Threads of a destroyed group may ask for the lock of an interpreter that is taken down, which
    # aborts the process: so what was registered for the exit runs, and the interpreter stays.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
