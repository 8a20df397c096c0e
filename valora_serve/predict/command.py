"""Command ``valora predict``: a bundle's answers for a folder of images or videos."""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from valora_data.contract.bundle import MANIFEST, read_manifest
from valora_data.contract.files import expanded
from valora_data.errors import ValoraError
from valora_data.hashing import file_hash
from valora_data.sources.formats.videos import SUFFIXES
from valora_data.wording import plural
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.pauses import short_pauses
from valora_serve.predict import beside, run
from valora_serve.predict.formats import WRITERS
from valora_serve.server.media.pool import shared_pool
from valora_serve.types import EngineClient, ServedModel

_ABOUT = """\
Answer every image or video of a folder with the domains of a bundle, without a server. An
interrupted run continues where it was; files that have changed are answered again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0; 1 if a file could not be answered or something is wrong; 130 if interrupted."""
    options = _parser().parse_args(arguments)
    try:
        return asyncio.run(_run(options))
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        file = error.filename2 or error.filename or options.out
        print(f"error: {file} cannot be used ({error.strerror}): make room, or name another folder",
              file=sys.stderr)  # fmt: skip
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _interrupted()


def _interrupted() -> int:
    print("interrupted: run the same command again to continue", file=sys.stderr, flush=True)
    return 130


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "valora predict", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("folder", type=expanded, help="folder of images or videos, or one file")
    said = "folder of a bundle, or one of bundles; without it, the folder is a server's sample"
    add("--bundle", help=said)
    add("--out", type=expanded, default="predictions", help="output folder (default: predictions)")
    names = ", ".join(WRITERS)
    add("--format", default="jsonl", help=f"formats, separated by commas: {names} (default: jsonl)")
    add("--domain", help="domains to ask, separated by commas (default: *)")
    add("--prompt", help="question or phrase, for domains that need one")
    add("--min-score", type=float, help="least confidence of boxes, 0 to 1")
    add("--max-tokens", type=int, help="most tokens of written answers")
    said = "compare with a small model, such as best.pt, or with its answers, a .jsonl"
    add("--beside", metavar="MODEL", help=said)
    add("--device", default="auto", help="cpu, cuda, cuda:1 … (default: the GPU)")
    add("--base", help="folder of the base model (default: the bundle's)")
    add("--at-once", type=int, default=32, help="most files in the engine at a time")
    add("--no-golden", action="store_true", help="do not replay the golden examples first")
    return made


async def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for imports
    from valora_serve.engine.async_engine import start_engine
    from valora_serve.server.loading import golden, startup

    began, console = time.monotonic(), Console(stderr=True, highlight=False, markup=False)
    # An unknown format is refused before a model is loaded.
    writers = {name: WRITERS[name] for name in _split(options.format)}
    _check(options)
    folders = startup.find_bundles(
        [options.bundle] if options.bundle else [], options.out / "downloads"
    )
    facts = {
        "folder": str(options.folder.resolve()),
        # Not their folders: a download has a new one each time.
        "bundles": [file_hash(folder / MANIFEST) for folder in folders],
        **{name: getattr(options, name) for name in ("prompt", "min_score", "max_tokens")},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    models = run.check_run(options.out, facts)
    small, failed, engine = None, 0, None
    async with AsyncExitStack() as stack:

        async def load() -> EngineClient:
            settings = startup.follow_bundles(EngineSettings(
                base=options.base or str(read_manifest(folders[0])["base"]["id"]),
                device=options.device,
                profile=False,  # a measurement would take longer than most folders
                policy="slora",  # first come, first served: nobody waits for a single answer
            ), folders)  # fmt: skip
            try:
                with console.status("Loading the model …"):
                    engine = await start_engine(settings)
            except asyncio.CancelledError:  # a thread that loads cannot be ended, only waited for
                os._exit(_interrupted())
            stack.push_async_callback(engine.close)
            models[:] = []
            for folder in folders:
                models.extend(m for m in await engine.load("bundle", folder) if m.kind == "domain")
                if not options.no_golden:
                    shared_pool().start()
                    await golden.replay(engine, folder)
            run.note_run(options.out, facts, models)
            return engine

        if not folders:
            os.nice(10)  # beside the server whose sample it is
            models = run.take_sample(options.folder, options.out)
        elif not models:
            engine = await load()
        asked = _chosen(models, options, console)
        if options.beside:  # first, as it takes less time to fail
            small = beside.answers_of(
                options.beside, options.folder, asked[0], options.out, options.min_score
            )
        jobs, kept = run.find_jobs(options.folder, asked, options.out) if folders else ([], 0)
        if kept:
            console.print(f"{plural(kept, 'answer')} of an earlier run kept")
        if jobs:  # only then the model that an earlier run has loaded is needed again
            with short_pauses():
                failed = await _answer(engine or await load(), jobs, options, console)
    results = run.Results(
        options.out,
        (options.folder if options.folder.is_dir() else options.folder.parent).resolve(),
        ", ".join(dict.fromkeys(model.bundle or "" for model in asked)),
        {model.name: model for model in asked},
    )
    _summary(results, console)
    for name, write in writers.items():
        console.print(f"{name}: {write(results)}", soft_wrap=True)
    if small is not None:
        made = beside.compare(results.predictions(), small)
        if not made.images:
            raise SettingsError(
                f"{options.beside} answers no picture of {options.folder}: run valora label on it"
            )
        page = beside.write(made, asked[0], results.source, options.out)
        console.print(f"beside {options.beside}: agreement {made.agreement:.3f} on "
                      f"{plural(made.images, 'image')}: {page}")  # fmt: skip
    console.print(f"took {time.monotonic() - began:.1f} s")
    return int(failed > 0)


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _check(options: argparse.Namespace) -> None:
    if options.min_score is not None and not 0 <= options.min_score <= 1:
        raise SettingsError(f"--min-score is {options.min_score}: name one from 0 to 1")
    if options.beside and (not options.domain or "," in options.domain or options.domain == "*"):
        raise SettingsError("--beside compares one domain: name it with --domain")
    if not options.bundle and {options.prompt, options.min_score, options.max_tokens} != {None}:
        raise SettingsError("--prompt, --min-score, --max-tokens go with --bundle: leave them out")
    for name in ("at_once", "max_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise SettingsError(f"--{name.replace('_', '-')} is {value}: name at least 1")
    for name in ("bundle", "domain", "beside", "format", "prompt"):  # as of an unset variable
        if (value := getattr(options, name)) is not None and not value.strip(" ,"):
            raise SettingsError(f"--{name} is empty: give it a value, or leave it out")
    if not options.folder.exists():
        raise SettingsError(f"{options.folder} does not exist: check the path")
    if options.bundle and not run.files_in(options.folder, run.STILLS | SUFFIXES, options.out)[1]:
        raise SettingsError(f"{options.folder} holds no images or videos: check the path")


def _chosen(
    models: Sequence[ServedModel], options: argparse.Namespace, console: Console
) -> list[ServedModel]:
    named = list(dict.fromkeys(_split(None if options.domain == "*" else options.domain)))
    known = {model.name: model for model in models}
    for name in named:
        if name not in known:
            raise SettingsError(f"there is no domain {name!r}: choose from {', '.join(known)}")
    asked = [known[name] for name in named] or list(models)
    left: dict[str, str] = {}
    for model in asked:
        if not (model.reads(video=False) or model.reads(video=True)):
            left[model.name] = "reads no single image or video: ask it over HTTP"
        elif options.prompt is None and model.takes_words:
            left[model.name] = "answers questions: give one with --prompt"
    for name, why in left.items():
        if named:
            raise SettingsError(f"{name} {why}")
        console.print(f"left out {name}, which {why}", style="yellow")
    if not (asked := [model for model in asked if model.name not in left]):
        raise SettingsError("no domain is left to ask: name one with --domain, or give --prompt")
    return asked


async def _answer(
    engine: EngineClient, jobs: Sequence[run.Job], options: argparse.Namespace, console: Console
) -> int:
    """Answer what is left; return the number of answers that failed."""
    path, failed = options.out / run.PREDICTIONS, 0
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    bars = Progress(
        "{task.description}", BarColumn(), MofNCompleteColumn(),
        TimeRemainingColumn(), console=console,
    )  # fmt: skip
    try:
        with bars as progress, path.open("ab") as file:
            bar = progress.add_task("answers", total=sum(len(job.domains) for job in jobs))

            def note(made: run.Prediction) -> None:
                nonlocal failed
                file.write(json.dumps(asdict(made), ensure_ascii=False).encode() + b"\n")
                file.flush()  # at once: a kill loses nothing
                progress.advance(bar)
                if made.error is not None:
                    failed += 1
                    text = f"{made.file}, {made.domain}: {made.error}"
                    progress.console.print(text, style="yellow")

            await run.answer_all(engine, jobs, options, note)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
    if failed:
        text = f"{plural(failed, 'answer')} failed; the next run tries them again"
        console.print(text, style="yellow")
    return failed


def _summary(results: run.Results, console: Console) -> None:
    answers: Counter[str] = Counter()
    labels: dict[str, Counter[str]] = {name: Counter() for name in results.domains}
    for made in results.predictions():
        answers[made.domain] += 1
        if results.domains[made.domain].boxes:
            labels[made.domain].update(found["label"] for found in made.detections)
        elif made.answer.get("label") is not None:
            labels[made.domain][made.answer["label"]] += 1
    table = Table(title=f"Answers of {results.model}", title_justify="left")
    for name in ("domain", "task", "files", "found"):
        table.add_column(name, justify="right" if name == "files" else "left")
    for name, facts in results.domains.items():
        found = ", ".join(f"{label} {count}" for label, count in labels[name].most_common(8))
        table.add_row(name, facts.task or "text", str(answers[name]), found)
    console.print(table)
