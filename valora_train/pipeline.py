"""A run: the stages in order; those that are up to date are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock
from rich.console import Console

from valora_data.cpu import usable_cores
from valora_data.schema import Split
from valora_data.shards import open_shard
from valora_train.errors import StageError
from valora_train.fusion.requirement import few_samples
from valora_train.fusion.state import FUSION
from valora_train.model import distributed
from valora_train.processes import preparing_processes, worker_processes
from valora_train.reporting.progress import Display, Step, relay, stopwatch
from valora_train.reporting.sweep import figures_of
from valora_train.reporting.texts import print_summary
from valora_train.reporting.tracking import find_run, teacher_run, try_store
from valora_train.settings import DomainSettings, Settings, as_dict
from valora_train.stage import Span, Stage, timed
from valora_train.stages import data, distill, encoder_training, fuse
from valora_train.stages.dedicated import measure_dedicated
from valora_train.stages.export import export_bundle
from valora_train.stages.fuse import DomainInputs, Fusion

PHOTO = (
    "photo sees 448 × 448 pixels with a pretrained tower, which suits photographs on a CPU; "
    "model=tiny train=default is faster on drawings of 96 pixels, and on a GPU "
    "model=qwen2.5-vl-7b train=large knows more"
)


def run_stages(settings: Settings, display: Display, wait: bool) -> dict[str, Any]:
    """Run the stages up to `settings.command`; see `valora_train.cli.run`."""
    teaches = any(domain.teacher == distill.TRAIN for domain in settings.chosen())
    fuses = settings.command not in ("teach", "distill")
    if (fuses or teaches) and os.environ.get("RANK", "0") == "0":
        try_store(settings.paths, f"valora/{settings.task.name}")
    accelerator = distributed.start(settings.model.device)
    if not accelerator.is_main_process:
        display = Display(Console(quiet=True))
    with stopwatch() as seconds, display():
        if settings.model.id == "photo":
            display.note("model", PHOTO)
        pipeline = Pipeline(settings, display, accelerator, wait)
        domains = pipeline.prepare()
        if not fuses:
            return {}
        settings = pipeline.train_encoder(domains)
        domains = measure_dedicated(settings, domains, display)
        fused = pipeline.fuse(settings, domains)
        fuse.check_result(settings, domains, fused)
        if not accelerator.is_main_process:
            return {}
        if settings.command == "export":
            alone = FileLock(pipeline.work / f"export-{settings.task.name}.lock")
            shown = display.work("export", "writing and checking the bundle")
            with shown, alone, stopwatch() as took:
                bundle, reused = export_bundle(settings, domains, fused)
            display.done("export", str(bundle.folder), None if reused else took())
            link = find_run(bundle.manifest["lineage"]["mlflow_run_id"])
            print_summary(bundle, display.console, seconds(), link)
        return figures_of(fused)


@dataclass
class Pipeline:
    """The stages of one run."""

    settings: Settings
    display: Display
    accelerator: Accelerator  # its main process alone runs the stages without training
    wait: bool = False  # for a stage that another process is running, instead of raising
    builds: bool = True  # stages that are not up to date, instead of raising
    spans: list[Span] = field(default_factory=list)  # of the stages that it has run

    @property
    def work(self) -> Path:
        """Folder of all stages."""
        return Path(self.settings.paths.work)

    def prepare(self) -> list[DomainInputs]:
        """Run the stages before fusion, of several domains side by side if there is much to do."""
        asked, device = self.settings.processes, self.settings.model.device
        chosen, waiting = self.settings.chosen(), []
        if self.accelerator.is_main_process:
            for domain in chosen:  # before any data is read
                teacher = domain.taught_by or self.settings.teacher
                given = domain.teacher != distill.TRAIN  # in a file, which is loaded and copied
                stage = distill.teach_stage(domain, teacher, Path(), self.work) if given else None
                if stage is not None:
                    build = partial(distill.build_teacher, domain, teacher, Path())
                    stage.run(self.work, partial(build, on_epoch=lambda *_: None), self.wait)
            if preparing_processes(asked, device, len(chosen)) > 1:
                waiting = [domain for domain in chosen if not self._is_prepared(domain)]
        processes = preparing_processes(asked, device, len(waiting))
        if processes == 1:
            return [self.prepare_domain(domain) for domain in chosen]
        self.spans += _prepare_side_by_side(self.settings, self.display, waiting, processes)
        quiet = replace(self, display=Display(Console(quiet=True)), wait=True)
        return [(quiet if one in waiting else self).prepare_domain(one) for one in chosen]

    def _is_prepared(self, domain: DomainSettings) -> bool:
        try:
            replace(self, display=Display(Console(quiet=True)), builds=False).prepare_domain(domain)
        except StageError:
            return False
        return True

    def prepare_domain(self, domain: DomainSettings) -> DomainInputs:
        """Run the stages before fusion: read the data, train the teacher, run the teacher."""
        teacher, work = domain.taught_by or self.settings.teacher, self.work
        read = self._run(data.data_stage(domain, work), partial(data.build_data, domain))
        val, test = (len(open_shard(read / split)) for split in (Split.VAL, Split.TEST))
        fusion = self.settings.fusion
        for message in few_samples(domain, val, test, fusion.of_dedicated, fusion.margin):
            self.display.note("data", message)
        stage = distill.teach_stage(domain, teacher, read, work)
        trained = None
        if stage is not None:
            trained = self._run(stage, partial(self._teach, domain, stage.key, read))
        if self.settings.command == "teach":
            return DomainInputs(domain, read, read)
        distilled = self._run(
            distill.distill_stage(domain, teacher, read, trained, work),
            partial(distill.build_distilled, domain, teacher, read, trained),
            distill.describe_distilled,
        )
        return DomainInputs(domain, read, distilled, teacher=trained)

    def _teach(
        self, domain: DomainSettings, stage: str, read: Path, folder: Path, step: Step
    ) -> None:
        """Train a small model, or copy a given one; its curves go to MLflow."""
        teacher, paths = domain.taught_by or self.settings.teacher, self.settings.paths
        if domain.teacher != distill.TRAIN:
            distill.build_teacher(domain, teacher, read, folder, step)
            return

        def on_epoch(epoch: int, epochs: int, loss: float, figures: Mapping[str, float]) -> None:
            step(epoch, epochs, loss, figures)
            log(epoch, {"loss": loss, **figures})

        with teacher_run(paths, domain.name, stage, as_dict(teacher)) as log:
            distill.build_teacher(domain, teacher, read, folder, on_epoch)

    def train_encoder(self, domains: list[DomainInputs]) -> Settings:
        """Train an encoder of memory tokens, if asked for; the settings of a fusion with it."""
        settings = self.settings
        if not settings.context.encoder_steps:
            return settings
        stage = encoder_training.encoder_stage(settings, domains)
        folder = self._run(stage, partial(encoder_training.build_encoder, settings, domains))
        options, start = dict(settings.heads.options), str(folder / encoder_training.MEMORIES)
        options["context"] = options.get("context", {}) | {"start": start}
        return replace(settings, heads=replace(settings.heads, options=options))

    def fuse(self, settings: Settings, domains: list[DomainInputs]) -> Path:
        """Pack the domains into adapters; returns the output folder."""
        work, stage = self.work, fuse.fuse_stage(settings, domains)
        if (unchanged := fuse.unchanged_parent(settings, domains, stage)) is not None:
            message = f"{settings.fusion.parent} already holds exactly these domains"
            self.display.done("fuse", message)
            return unchanged

        def build(folder: Path, _: object = None) -> None:
            # Until every process has read the state of an interrupted fusion.
            self.accelerator.wait_for_everyone()
            if not (folder / FUSION).is_file():  # else killed after the last write
                Fusion(
                    settings, domains, stage, folder, self.display, self.accelerator, self.spans
                ).run()

        if not self.accelerator.is_main_process and not stage.folder(work).is_dir():
            with TemporaryDirectory() as folder:
                if stage.partial(work).is_dir():
                    shutil.copytree(stage.partial(work), folder, dirs_exist_ok=True)
                build(Path(folder))
        return self._run(stage, build)

    def _run(
        self,
        stage: Stage,
        build: Callable[[Path, Step], None],
        describe: Callable[[Path], str] = lambda _: "",
    ) -> Path:
        """Run a stage unless it is up to date, and report it; returns the output folder."""
        work = self.work
        if not self.builds:
            if not stage.is_done(work):
                raise StageError(f"{stage.name} is not up to date")
            return stage.folder(work)
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return stage.folder(work)
        verb, _, what = stage.name.partition("-")
        spans: list[Span] = []
        with timed(spans, f"{verb} {what}"), self.display.work(verb, what) as on_step:
            folder, reused = stage.run(work, lambda folder: build(folder, on_step), self.wait)
        took = (spans[0].end - spans[0].start) / 1e9
        self.accelerator.wait_for_everyone()
        self.display.done(verb, what + describe(folder), None if reused else took)
        self.spans += [] if reused else spans
        return folder


def _prepare_side_by_side(
    settings: Settings, display: Display, domains: Sequence[DomainSettings], count: int
) -> list[Span]:
    """Run the stages before fusion in several processes, one domain in each; return their spans."""
    threads = max(1, usable_cores() // count)
    with (
        relay(display) as messages,
        worker_processes(count, "processes", _begin_worker, messages, threads) as executor,
    ):
        jobs = [executor.submit(_prepare_one, settings, domain) for domain in domains]
        return [span for job in as_completed(jobs) for span in job.result()]


_relayed: list[Display] = []  # where a process that prepares domains shows what it does


def _begin_worker(messages: Any, threads: int) -> None:
    torch.set_num_threads(threads)
    _relayed.append(Display(messages=messages))


def _prepare_one(settings: Settings, domain: DomainSettings) -> list[Span]:
    pipeline = Pipeline(settings, _relayed[0], Accelerator(), wait=True)
    pipeline.prepare_domain(domain)
    return pipeline.spans
