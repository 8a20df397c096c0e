"""The command `valora-train`: runs the stages of the pipeline in order."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from valora_data.contract.files import expanded
from valora_data.errors import ValoraError
from valora_train.errors import SweepError, describe_fault, without_passwords
from valora_train.processes import preparing_processes
from valora_train.reporting.progress import Display, stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

    from accelerate import Accelerator
    from omegaconf import DictConfig

    from valora_train.reporting.progress import Step
    from valora_train.settings import DomainSettings, Settings, TeacherSettings
    from valora_train.stage import Stage
    from valora_train.stages.fuse import DomainInputs

STOPPING = ("SIGTERM", "SIGHUP")
"""Signals that end a run as Ctrl-C does."""


class Stopped(KeyboardInterrupt):
    """A signal asks the run to end.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(settings: Settings, display: Display, wait: bool = False) -> dict[str, Any]:
    """Run the stages up to `settings.command`.

    Args:
        settings: All settings.
        display: The terminal.
        wait: Whether to wait for a stage that another process is running, instead of raising.

    Returns:
        Figures of the fusion (see `figures_of`), for sweeps; none if there was none.
    """
    from valora_train.checks import check, check_with_libraries

    check(settings)
    if settings.command == "push":
        from valora_train.stages.push import push

        with display(), display.work("push", f"uploading to {settings.push.repo}"):
            address = push(settings)
        display.done("push", address)
        return {}
    if settings.shelf is not None:
        from valora_data.sources.shelf import read_shelf

        for note in read_shelf(expanded(settings.shelf)).notes:
            display.note("shelf", note)
    # What follows imports torch, which takes seconds.
    from valora_train.model import distributed

    check_with_libraries(settings)
    logs = settings.command not in ("teach", "distill") or any(
        domain.teacher == "train" for domain in settings.chosen()
    )
    if logs and os.environ.get("RANK", "0") == "0":
        from valora_train.reporting.mlflow_store import try_store

        try_store(settings.paths.tracking, f"valora/{settings.task.name}", settings.paths.work)
    fuses = settings.command in ("fuse", "export")
    accelerator = distributed.start(settings.model.device)
    if not accelerator.is_main_process:
        display = Display(Console(quiet=True))
    with stopwatch() as seconds, display():
        pipeline = _Pipeline(settings, display, accelerator, wait)
        domains = _prepare_domains(settings, display, pipeline, accelerator)
        if not fuses:
            return {}
        pipeline.memorise(domains)
        domains = pipeline.measure_dedicated(domains)
        fused = pipeline.fuse(domains)
        if accelerator.is_main_process and settings.command == "export":
            pipeline.export(domains, fused, seconds)
        return pipeline.figures(fused)


class _NotBuiltError(Exception):
    """A stage is not up to date, and nobody asked to run it."""


class _Pipeline:
    """The stages of one run; stages that are up to date are skipped.

    Args:
        settings: All settings.
        display: The terminal.
        accelerator: The processes that train together; only the main one runs the stages without
            training.
        wait: Whether to wait for a stage that another process is running, instead of raising.
    """

    def __init__(
        self, settings: Settings, display: Display, accelerator: Accelerator, wait: bool
    ) -> None:
        self._settings = settings
        self._display = display
        self._accelerator = accelerator
        self._wait = wait
        self._builds = True

    def is_prepared(self, domain: DomainSettings) -> bool:
        """Whether the stages before fusion are up to date for a domain."""
        quiet = Display(Console(quiet=True))
        looked = _Pipeline(self._settings, quiet, self._accelerator, self._wait)
        looked._builds = False
        try:
            looked.prepare_domain(domain)
        except _NotBuiltError:
            return False
        return True

    def prepare_domain(self, domain: DomainSettings) -> DomainInputs:
        """Run the stages before fusion: read the data, train the teacher, run the teacher."""
        from valora_data.schema import Split
        from valora_data.shards import open_shard
        from valora_train.fusion.requirement import contract_of, few_samples
        from valora_train.stages import data as domains
        from valora_train.stages import distill
        from valora_train.stages.fuse import DomainInputs

        teacher = domain.taught_by or self._settings.teacher
        work = Path(self._settings.paths.work)
        data = self._run_stage(
            domains.data_stage(domain, work),
            lambda folder, step: domains.build_data(domain, folder, step),
        )
        contract, fusion = contract_of(domain), self._settings.fusion
        if fusion.of_dedicated is not None:
            contract = replace(contract, required=None, of_teacher=fusion.of_dedicated)
        val, test = (len(open_shard(data / split)) for split in (Split.VAL, Split.TEST))
        for told in few_samples(domain.name, val, test, contract, fusion.margin):
            self._display.note("data", told)
        stage = distill.teach_stage(domain, teacher, data, work)
        taught = None
        if stage is not None:
            taught = self._run_stage(stage, partial(self._teach, domain, teacher, stage.key, data))
        if self._settings.command == "teach":
            return DomainInputs(domain, data, data)
        distilled = self._run_stage(
            distill.distill_stage(domain, teacher, data, taught, work),
            lambda folder, step: distill.build_distilled(
                domain, teacher, data, taught, folder, step
            ),
            distill.describe_distilled,
        )
        return DomainInputs(domain, data, distilled)

    def take_teacher(self, domain: DomainSettings) -> None:
        """Load and copy a small model that is given as a file, unless that is up to date."""
        from valora_train.stages import distill

        work, teacher = Path(self._settings.paths.work), domain.taught_by or self._settings.teacher
        if domain.teacher == distill.TRAIN or not self._accelerator.is_main_process:
            return
        if (stage := distill.teach_stage(domain, teacher, Path(), work)) is not None:
            build = partial(
                distill.build_teacher, domain, teacher, Path(), on_epoch=lambda *_: None
            )
            stage.run(work, build, self._wait)

    def _teach(
        self,
        domain: DomainSettings,
        teacher: TeacherSettings,
        stage: str,
        data: Path,
        folder: Path,
        step: Step,
    ) -> None:
        """Train a small model, or copy a given one; its curves go to MLflow."""
        from valora_train.reporting.mlflow_store import store_lock
        from valora_train.reporting.tracking import TeacherRun, end_stale_runs
        from valora_train.settings import as_dict
        from valora_train.stages import distill

        if domain.teacher != distill.TRAIN:
            distill.build_teacher(domain, teacher, data, folder, step)
            return
        paths = self._settings.paths
        with store_lock(paths.work):
            end_stale_runs(paths.tracking, paths.work)
            run = TeacherRun(paths.tracking, domain.name, stage, as_dict(teacher))

        def on_epoch(epoch: int, epochs: int, loss: float, figures: Mapping[str, float]) -> None:
            step(epoch, epochs, loss, figures)
            run.add(epoch, {"loss": loss, **figures})

        with run:
            distill.build_teacher(domain, teacher, data, folder, on_epoch)

    def memorise(self, domains: list[DomainInputs]) -> None:
        """Train an encoder of memory tokens, with which those of the fusion begin."""
        if not self._settings.context.encoder_steps:
            return
        from valora_train.stages.memorise import MEMORIES, build_memories, memorise_stage

        settings = self._settings
        stage = memorise_stage(settings, domains)
        if self._accelerator.is_main_process:
            folder = self._run_stage(
                stage, lambda folder, step: build_memories(settings, domains, folder, step)
            )
        self._accelerator.wait_for_everyone()
        folder = stage.folder(Path(settings.paths.work))
        options = dict(settings.heads.options)
        options["context"] = options.get("context", {}) | {"start": str(folder / MEMORIES)}
        self._settings = replace(settings, heads=replace(settings.heads, options=options))

    def measure_dedicated(self, domains: list[DomainInputs]) -> list[DomainInputs]:
        """Train every domain in an adapter of its own, if requirements follow from that."""
        if self._settings.fusion.of_dedicated is None:
            return domains
        from valora_train.stages.dedicated import measure_dedicated

        return measure_dedicated(self._settings, domains, self._display)

    def fuse(self, domains: list[DomainInputs]) -> Path:
        """Pack the domains into adapters.

        Returns:
            Output folder of the stage.

        Raises:
            UnreachableError: A domain is out of reach, and `fusion.unreachable` is `fail`.
        """
        from valora_train.stages.fuse import check_result

        folder = self._fuse(domains)
        check_result(self._settings, domains, folder)
        return folder

    def _fuse(self, domains: list[DomainInputs]) -> Path:
        from valora_train.stages.fuse import build_fusion, fuse_stage, unchanged_parent

        stage = fuse_stage(self._settings, domains)
        unchanged = unchanged_parent(self._settings, domains, stage)
        if unchanged is not None:
            parent = self._settings.fusion.parent
            self._display.done("fuse", f"{parent} already holds exactly these domains")
            return unchanged

        def build(folder: Path) -> None:
            # Until every process has read the state of an interrupted fusion.
            self._accelerator.wait_for_everyone()
            build_fusion(self._settings, domains, stage, folder, self._display, self._accelerator)

        if self._accelerator.is_main_process:
            return self._run_stage(stage, lambda folder, _: build(folder))
        work = Path(self._settings.paths.work)
        if not stage.folder(work).is_dir():
            with TemporaryDirectory() as folder:
                if stage.partial(work).is_dir():
                    shutil.copytree(stage.partial(work), folder, dirs_exist_ok=True)
                build(Path(folder))
        self._accelerator.wait_for_everyone()
        return stage.folder(work)

    def figures(self, fused: Path) -> dict[str, Any]:
        """Figures of a fusion, for sweeps."""
        from valora_train.reporting.sweep import figures_of

        return figures_of(fused) if self._accelerator.is_main_process else {}

    def export(
        self, domains: list[DomainInputs], fused: Path, seconds: Callable[[], float]
    ) -> None:
        """Export the bundle and print a summary."""
        from valora_train.reporting.summary import print_summary
        from valora_train.reporting.tracking import find_run
        from valora_train.stages.export import export_bundle

        with self._display.work("export", "writing and checking the bundle"), stopwatch() as took:
            bundle, reused = export_bundle(self._settings, domains, fused)
        self._display.done("export", str(bundle.folder), None if reused else took())
        run = bundle.manifest["lineage"]["mlflow_run_id"]
        link = find_run(self._settings.paths.tracking, run)
        print_summary(bundle, self._display.console, seconds(), link)

    def _run_stage(
        self,
        stage: Stage,
        build: Callable[[Path, Step], None],
        describe: Callable[[Path], str] = lambda _: "",
    ) -> Path:
        """Run a stage unless it is up to date, and report it in the terminal.

        Args:
            stage: The stage.
            build: Fills the output folder; may report its progress.
            describe: Describes the output folder for the terminal.

        Returns:
            Output folder of the stage.
        """
        if not self._builds:
            if not stage.is_done(Path(self._settings.paths.work)):
                raise _NotBuiltError
            return stage.folder(Path(self._settings.paths.work))
        if not self._accelerator.is_main_process:
            self._accelerator.wait_for_everyone()
            return stage.folder(Path(self._settings.paths.work))
        verb, _, what = stage.name.partition("-")
        with stopwatch() as took, self._display.work(verb, what) as on_step:
            folder, reused = stage.run(
                Path(self._settings.paths.work), lambda folder: build(folder, on_step), self._wait
            )
        self._accelerator.wait_for_everyone()
        self._display.done(verb, what + describe(folder), None if reused else took())
        return folder


def _prepare_domains(
    settings: Settings, display: Display, pipeline: _Pipeline, accelerator: Accelerator
) -> list[DomainInputs]:
    """Run the stages before fusion, of several domains side by side if there is much to do."""
    chosen = settings.chosen()
    for domain in chosen:  # before any data is read
        pipeline.take_teacher(domain)
    asked, device = settings.processes, settings.model.device
    several = preparing_processes(asked, device, len(chosen)) > 1
    waiting = chosen if several and accelerator.is_main_process else []
    waiting = [domain for domain in waiting if not pipeline.is_prepared(domain)]
    processes = preparing_processes(asked, device, len(waiting))
    if processes == 1:
        return [pipeline.prepare_domain(domain) for domain in chosen]
    _prepare_side_by_side(settings, display, waiting, processes)
    names = {domain.name for domain in waiting}
    quiet = _Pipeline(settings, Display(Console(quiet=True)), accelerator, wait=True)
    return [
        (quiet if domain.name in names else pipeline).prepare_domain(domain) for domain in chosen
    ]


def _prepare_side_by_side(
    settings: Settings, display: Display, domains: Sequence[DomainSettings], count: int
) -> None:
    """Run the stages before fusion in several processes, one domain in each."""
    from concurrent.futures import as_completed

    from valora_train.processes import threads_beside, worker_processes
    from valora_train.reporting.progress import Relay

    threads = threads_beside(count)
    with (
        Relay(display) as relay,
        worker_processes(count, "processes", _begin_worker, relay.messages, threads) as executor,
    ):
        jobs = [executor.submit(_prepare, settings, domain.name) for domain in domains]
        for job in as_completed(jobs):
            job.result()


def _begin_worker(messages: Any, threads: int) -> None:
    """Prepare a process that prepares domains."""
    global _relayed  # noqa: PLW0603 (one display for each process)
    import torch

    from valora_train.reporting.progress import RelayedDisplay

    _silence_libraries()
    torch.set_num_threads(threads)
    _relayed = RelayedDisplay(messages)


_relayed: Display | None = None
"""Where a process that prepares domains shows what it does."""


def _prepare(settings: Settings, name: str) -> None:
    """Run the stages before fusion for a domain, in a process of its own."""
    from accelerate import Accelerator

    assert _relayed is not None
    (domain,) = (one for one in settings.chosen() if one.name == name)
    _Pipeline(settings, _relayed, Accelerator(), wait=True).prepare_domain(domain)


def _hydra_main(config: DictConfig) -> dict[str, Any]:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from valora_train.checks import check_contracts_asked
    from valora_train.configuration import from_config

    # Errors end the process here; Hydra would print its own traceback first.
    _end_on_signals()
    try:
        settings, hydra = from_config(config), HydraConfig.get()
        check_contracts_asked(settings, list(hydra.overrides.task))
        if hydra.mode is RunMode.MULTIRUN:
            # A launcher may run jobs in parallel; a job waits for stages that another runs.
            from valora_train.reporting.sweep import record_job

            number = hydra.job.num
            figures = run(settings, Display(job=f"{settings.task.name} {number}"), wait=True)
            record_job(settings, number, list(hydra.overrides.task), figures)
            return figures
        return run(settings, Display())
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (raised unless it is told)
        if isinstance(error, Exception) and HydraConfig.get().mode is RunMode.MULTIRUN:
            raise _job_error(error, HydraConfig.get().job.num) from None
        _end(error)


def _job_error(error: Exception, number: int) -> SweepError:
    """What a job of a sweep hands to the sweep, which goes on with the other jobs.

    The job may run on another machine, whose errors not every process can unpickle.
    """
    if (store := sys.modules.get("valora_train.reporting.mlflow_store")) is not None:
        store.end_open_runs()
    fault = describe_fault(error)
    if isinstance(error, ValoraError):
        said = str(error)
    elif fault is not None:
        said = f"{fault.cause}: {fault.remedy}"
    else:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"
    said = without_passwords(said)
    print(f"job {number} failed: {said}", file=sys.stderr, flush=True)
    return SweepError(said)


def _end_on_signals() -> None:
    """Let the signals of `STOPPING` end the run as Ctrl-C does; a second one ends it at once."""
    if threading.current_thread() is not threading.main_thread():
        return

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    for name in STOPPING:
        number = getattr(signal, name, None)
        # Where a signal is ignored, as nohup does, it stays so.
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)


def _end(error: BaseException) -> NoReturn:
    """End the process with one sentence on an error, if there is one for it.

    Raises:
        BaseException: The error itself, if it is a fault of the code.
    """
    if (store := sys.modules.get("valora_train.reporting.mlflow_store")) is not None:
        store.end_open_runs()
    if isinstance(error, KeyboardInterrupt):
        _end_children()
        number = error.number if isinstance(error, Stopped) else signal.SIGINT
        _stop("interrupted: run the same command again to continue", 128 + number)
    if isinstance(error, ValoraError):
        _stop(f"error: {error}")
    fault = describe_fault(error)
    if fault is not None:
        _stop(f"error: {fault.cause}: {fault.remedy} and run the same command again")
    raise error


def _end_children() -> None:
    """End the processes that this one started."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        try:
            child.terminate()
        except psutil.Error:
            continue


def config_folder() -> Path:
    """The folder `conf/` of the checkout, or its copy in the installed package."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "conf"


def main() -> None:
    """Entry point; errors that the user can correct are one sentence and a non-zero status."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    _end_on_signals()
    # Makes Hydra raise errors instead of printing them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _silence_libraries()
    from valora_train.removed import refuse_removed
    from valora_train.sweeps import register

    if "--version" in sys.argv:
        print(f"valora-train {version('valora')}")
        return
    given = sys.argv
    try:
        refuse_removed(*given[1:])
        arguments = [_as_hydra_reads(argument) for argument in given[1:]]
        register(given[1:])
        sys.argv = [given[0], *arguments]
        hydra.main(config_path=str(config_folder()), config_name="config", version_base="1.3")(
            _hydra_main
        )()
    except ValoraError as error:  # of the command line or a sweep; those of a run end it
        _stop(f"error: {error}")
    except (HydraException, OmegaConfBaseException) as error:
        _stop(f"error: {_one_sentence(error)}")
    except YAMLError as error:
        _stop(f"error: a file of settings is no YAML ({' '.join(str(error).split())}): correct it")
    except (KeyboardInterrupt, OSError, UnicodeEncodeError) as error:
        _end(error)
    finally:
        sys.argv = given
    if "WORLD_SIZE" in os.environ:
        from valora_train.model.distributed import end_process

        end_process()


def _as_hydra_reads(argument: str) -> str:
    """An argument in Hydra's grammar; keys that no file sets are added: `from_config` judges."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    argument.encode()  # raises for what is no UTF-8
    key, given, value = argument.partition("=")
    if not given or not key[:1].isalpha() or re.search(r"[/@]|^hydra\.", key):
        return argument
    try:
        OverridesParser.create().parse_override(argument)
    except HydraException:
        if value[0] not in "[{":
            value = "'" + value.replace("'", "\\'") + "'"
    is_group = key == "local" or (config_folder() / key).is_dir()
    return f"{'' if is_group else '++'}{key}={value}"


def _one_sentence(error: Exception) -> str:
    """The message of an error of Hydra, whose own messages take several lines."""
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return f"unknown {group or 'config'} {name!r}: choose from {', '.join(error.options)}"
    text = " ".join(str(error).split())
    if "recognition error" in text or "Lexer" in text:
        return f"{text}: put text in quotes, as in 'task.only=[\"Übung\"]'"
    return f"{text.rstrip('.')}: `valora-train --help` lists the settings"


def _silence_libraries() -> None:
    """Keep libraries from writing to the terminal and from using the network."""
    defaults: dict[str, Any] = {
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "YOLO_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def _stop(message: str, status: int = 1) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # only the main process prints
        print(without_passwords(message), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
