"""The command `valora-train`: reads the command line, and ends with one sentence on a mistake."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
import threading
import traceback
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from yaml import YAMLError

from valora_data.errors import ValoraError
from valora_data.sources.shelf import read_shelf
from valora_train.checks import check, check_contracts_asked, check_with_libraries
from valora_train.errors import without_passwords
from valora_train.removed import refuse_removed, removed
from valora_train.reporting.progress import Display
from valora_train.settings import Settings, from_config
from valora_train.sweeps import register

STOPPING = (signal.SIGTERM, signal.SIGHUP)  # signals that end a run as Ctrl-C does
MACHINE = (OSError, MemoryError, UnicodeEncodeError, SafetensorError, sqlite3.Error, BrokenExecutor)
"""Errors of the machine (disk, permissions, memory) or of its files, and not of the code."""
QUIET = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "YOLO_OFFLINE": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Keeps libraries from writing to the terminal and from using the network."""


def run(settings: Settings, display: Display, wait: bool = False) -> dict[str, Any]:
    """Run the stages up to `settings.command`; gives figures of a fusion (`figures_of`)."""
    check(settings)
    if settings.command == "push":
        from valora_train.stages.push import push

        with display(), display.work("push", f"uploading to {settings.push.repo}"):
            address = push(settings)
        display.done("push", address)
        return {}
    if settings.shelf is not None:
        for note in read_shelf(Path(settings.shelf)).notes:
            display.note("shelf", note)
    check_with_libraries(settings)  # torch takes seconds to import
    from valora_train.pipeline import run_stages

    return run_stages(settings, display, wait)


def main() -> None:
    """Entry point; errors that the user can correct are one sentence and a non-zero status."""
    if "--version" in sys.argv:
        print(f"valora-train {version('valora')}")
        return
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises errors instead of printing them
    for key, value in QUIET.items():
        os.environ.setdefault(key, value)
    # Threads that spin for long while one waits for a busy core keep it busy: 0.8 s for 0.1.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    _end_on_signals()
    given = sys.argv
    try:
        refuse_removed(*given[1:])
        register(given[1:])
        sys.argv = [given[0], *map(_as_hydra_reads, given[1:])]
        hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(
            _job
        )()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (raised unless there is a sentence)
        _end(error)
    finally:
        sys.argv = given
    if "WORLD_SIZE" in os.environ:
        from valora_train.model.distributed import end_process

        end_process()


def config_folder() -> Path:
    """The folder `conf/` of the checkout, or its copy in the installed package."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def _as_hydra_reads(argument: str) -> str:
    """An argument in Hydra's grammar; keys that no file sets are added: `from_config` judges."""
    argument.encode()  # raises for what is no UTF-8
    key, given, value = argument.partition("=")
    if not given or not key[:1].isalpha() or re.search(r"[/@]|^hydra\.", key):
        return argument
    is_group = key == "local" or (config_folder() / key).is_dir()
    try:
        read = OverridesParser.create().parse_override(argument).value()
        quoted = is_group and isinstance(read, int | float | None)
    except HydraException:
        quoted = value[0] not in "[{"
    if quoted:
        value = "'" + value.replace("'", "\\'") + "'"
    return f"{'' if is_group else '++'}{key}={value}"


def _job(config: DictConfig) -> dict[str, Any]:
    """A run, or a job of a sweep."""
    _end_on_signals()  # a launcher may have started this process
    hydra_config = HydraConfig.get()
    number = hydra_config.job.num if hydra_config.mode is RunMode.MULTIRUN else None
    overrides = list(hydra_config.overrides.task)
    try:
        settings = from_config(config)
        check_contracts_asked(settings, overrides)
        if number is None:
            return run(settings, Display())
        # A launcher may run jobs in parallel; a job waits for stages that another runs.
        figures = run(settings, Display(job=f"{settings.task.name} {number}"), wait=True)
        from valora_train.reporting.sweep import record_job

        record_job(settings, number, overrides, figures)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (raised unless there is a sentence)
        if number is None or isinstance(error, KeyboardInterrupt):
            _end(error)  # Hydra would print a traceback of its own first
        # The sweep goes on with the other jobs. The job may run on another machine, whose errors
        # not every process can unpickle.
        if (said := sentence(error)) is None:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        said = without_passwords(f"job {number} failed: {said}")
        print(said, file=sys.stderr, flush=True)
        raise ValoraError(f"{said}; run the same command again to continue") from None
    return figures


def sentence(error: BaseException) -> str | None:
    """What the user can do something about, in one sentence; None for a fault of the code."""
    text = " ".join(str(error).split()).rstrip(".")
    if isinstance(error, ValoraError):
        return str(error)
    if isinstance(error, YAMLError):
        return f"a file of settings is no YAML ({text}): correct it"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _of_hydra(error, text)
    submitit = type(error).__module__.partition(".")[0] == "submitit"
    memory = isinstance(error, RuntimeError) and re.search("(out of|allocate) memory", text)
    if isinstance(error, MACHINE) or submitit or memory:
        return f"{type(error).__name__}: {text}: mend this and run the same command again"
    return sentence(error.__cause__) if error.__cause__ else None


def _of_hydra(error: BaseException, text: str) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        path = str(error.missing_cfg_file)  # of a command line, or of `defaults` in a file
        if successor := removed(path):
            return successor
        if error.options:
            group, _, name = path.rpartition("/")
            return f"unknown {group or 'config'} {name!r}: choose from {', '.join(error.options)}"
    if "recognition error" in text or "Lexer" in text:
        return f"{text}: put text in quotes, as in 'task.only=[\"Übung\"]'"
    return f"{text}: `valora-train --help` lists the settings"


def _end(error: BaseException) -> NoReturn:
    """End the process with one sentence on an error; a fault of the code is raised again."""
    status, message = 1, sentence(error)
    if isinstance(error, KeyboardInterrupt):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.terminate()
        status = 128 + (error.args[0] if error.args else signal.SIGINT)
        message = "interrupted: run the same command again to continue"
    elif message is None:
        raise error
    else:
        message = f"error: {message}"
    if os.environ.get("RANK", "0") == "0":  # only the main process prints
        print(without_passwords(message), file=sys.stderr)
    sys.exit(status)


def _end_on_signals() -> None:
    """Let the signals of `STOPPING` end the run as Ctrl-C does; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise KeyboardInterrupt(number)

    for number in STOPPING:  # where one is ignored, as nohup does, it stays so
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)


if __name__ == "__main__":
    main()
