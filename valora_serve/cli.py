"""Command ``valora-serve``: serve bundles, make keys."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from valora_data.contract.files import expanded
from valora_data.errors import ValoraError
from valora_data.wording import encode_all_output, plural
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError, StorageError
from valora_serve.pauses import short_pauses
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.server.access.keys import ROLES, KeyRing, new_key
from valora_serve.server.settings import ServerSettings, existing_folder

if TYPE_CHECKING:
    import uvicorn

    from valora_serve.engine.process import EngineProcess
    from valora_serve.server.loading.startup import Served

_ABOUT = """\
Serve bundles over HTTP: OpenAI's chat and completions endpoints, /v1/vision/DOMAIN, and a web
console at /. Options can also be set in a file (--config) and in environment variables
(VALORA_PORT=8000). The command line takes precedence over the environment, and the environment
over the file."""
_MORE = """\
another command:
  valora-serve key NAME [--role admin] [--file FILE]   make an API key"""

_GONE = {
    "bench": "use guidellm, or `python -m tests.bench.valora_serve.bench_load` in a checkout",
    "doctor": "use `valora-serve --check BUNDLE`",
}
"""Commands of earlier releases, and what to use instead."""

WATCH_SECONDS = 0.2  # between two looks at the processes of a tensor-parallel group


def parser() -> argparse.ArgumentParser:
    """Command line of serving; `options.load` adds an option for every setting."""
    made = argparse.ArgumentParser(
        "valora-serve",
        usage="%(prog)s [BUNDLE ...] [options]",
        description=_ABOUT,
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --prot is a typo, not --protect-metrics
    )
    made.add_argument(
        "bundles",
        nargs="*",
        metavar="BUNDLE",
        default=[],
        help="a bundle's folder, a folder of bundles, or models:/NAME/VERSION of MLflow's registry",
    )
    made.add_argument("--config", metavar="FILE", default=None, help="YAML or TOML file of options")
    made.add_argument(
        "--check", action="store_true", help="say whether the server would start here, and end"
    )
    version = f"valora-serve {importlib.metadata.version('valora')}"
    made.add_argument("--version", action="version", version=version)
    return made


def read(
    arguments: Sequence[str], file: Mapping[str, Any] | None = None
) -> tuple[list[str], ServerSettings, EngineSettings, ReplicaSettings]:
    """Bundles and settings from command line, environment and file (its content), if valid."""
    from valora_serve import options

    classes = (ServerSettings, EngineSettings, ReplicaSettings)
    bundles, (server, engine, replicas) = options.load(parser(), arguments, classes, file or {})
    if engine.context_length is not None and engine.context_length < 64:
        raise SettingsError(f"context_length is {engine.context_length}: name at least 64 tokens")
    return bundles, server, engine, replicas


async def serve(
    bundles: Sequence[str],
    settings: ServerSettings,
    engine_settings: EngineSettings,
    replica_settings: ReplicaSettings,
    on_started: Callable[[str], None] | None = None,
) -> int:
    """Load and verify the bundles, print what is served, and serve until a signal comes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's waits for imports
    from valora_serve.engine.process import EngineProcess
    from valora_serve.server.app import make_server
    from valora_serve.server.constrain import read_tokenizer
    from valora_serve.server.listen import bind
    from valora_serve.server.loading import startup
    from valora_serve.server.media.pool import shared_pool

    began = time.monotonic()
    with contextlib.ExitStack() as held:
        _prepare(settings, engine_settings, held)
        sockets = bind(settings)
        folders = startup.find_bundles(bundles, Path(settings.state_file).parent / "downloads")
        engine_settings = startup.follow_bundles(engine_settings, folders)
        address = f"unix:{settings.unix_socket}"
        if not settings.unix_socket:
            scheme = "https" if settings.tls_cert else "http"
            address = f"{scheme}://{settings.host}:{sockets[0].getsockname()[1]}/"

        def announce(found: Served | None) -> None:
            if found is not None:  # else the board of replicas has started anew meanwhile
                _tell(found, address, began)
            if on_started:
                on_started(address)

        if replica_settings.replicas is not None:
            from valora_serve.replicas.cluster import run

            await run(sockets, folders, settings, engine_settings, replica_settings, announce)
            return 0
        shared_pool().start()  # ready by the time that the model is loaded
        engine = await EngineProcess.start(engine_settings, read_tokenizer)
        try:
            app, found = await startup.make_app(engine, settings, folders, engine_settings)
            server = make_server(app, settings)
        except BaseException:
            await engine.close()
            raise
        watching = asyncio.create_task(_watch(server, engine, partial(announce, found)))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # uvicorn raises those that it has handled again
        with short_pauses():
            await server.serve(sockets)
        watching.cancel()
        if engine.lost is None:
            return 0
        print(f"error: {engine.lost}", file=sys.stderr, flush=True)
        os._exit(1)  # collectives may wait for the lost process for ever


def _prepare(
    settings: ServerSettings, engine_settings: EngineSettings, held: contextlib.ExitStack
) -> None:
    """Refuse wrong settings before models are loaded, and take the lock of the state file."""
    from valora_serve.server.listen import check_certificate
    from valora_serve.server.loading import startup
    from valora_serve.server.loading.state_file import StateFile, own_state
    from valora_serve.server.media.reader import MediaReader
    from valora_serve.server.resolving.cache import lock_folder
    from valora_serve.server.resolving.sources import make_resolvers
    from valora_serve.server.samples import Samples
    from valora_serve.server.telemetry import logs

    logs.set_up(settings.log_level, settings.log_format)
    keys = KeyRing(settings)
    if engine_settings.share_by == "key":
        startup.tell_of_unknown("shares", engine_settings.shares, "key", keys.names)
    check_certificate(settings)
    MediaReader(settings), Samples(settings)
    if make_resolvers(settings.adapter_sources):
        lock_folder(Path(settings.adapter_cache)).release()
    if settings.allow_runtime_loading:
        held.enter_context(own_state(Path(settings.state_file)))
    if settings.adapter_folder:
        existing_folder("adapter_folder", settings.adapter_folder)
        StateFile(settings.state_file).read()


def _check(
    bundles: Sequence[str], settings: ServerSettings, engine: EngineSettings, _: ReplicaSettings
) -> int:
    from valora_data.contract.base_model import base_folder, base_hash
    from valora_data.contract.bundle import check_base, read_bundle
    from valora_serve.check import check
    from valora_serve.server.loading import startup

    folders = startup.find_bundles(bundles, Path(settings.state_file).parent / "downloads")
    engine = startup.follow_bundles(engine, folders)
    if Path(base_folder(engine.base)).is_dir() and folders:  # otherwise the hub's, fetched later
        found = base_hash(engine.base)
        for one in map(read_bundle, folders):
            check_base(one, engine.base, found, one.manifest["base"].get("quantize"))
    return check(engine, folders, settings.max_connections)


def _tell(found: Served, address: str, began: float) -> None:
    from rich.console import Console

    from valora_serve.server.loading import startup

    console = Console(stderr=True, markup=False)  # names may have brackets
    if not console.is_terminal:
        console.width = 160  # lines in a log file are not wrapped
    console.print(startup.table(found))
    for problem in found.left_out:
        console.print(f"not served: {problem}", style="yellow")
    console.print(
        f"{plural(found.examples, 'golden example')} reproduced; ready after "
        f"{time.monotonic() - began:.1f} s at {address} (API: /docs)",
        highlight=False,
    )


async def _watch(
    server: uvicorn.Server, engine: EngineProcess, on_started: Callable[[], None]
) -> None:
    """Call `on_started`, and end the server when its engine has lost a process of its group."""
    while not server.started:
        await asyncio.sleep(0.02)
    on_started()
    while engine.lost is None or engine.healthy:
        await asyncio.sleep(WATCH_SECONDS)
    server.should_exit = True


def make_key(arguments: Sequence[str]) -> int:
    """Command ``valora-serve key``."""
    made = argparse.ArgumentParser(
        "valora-serve key",
        description="Make an API key. The key is shown once; only its hash is stored.",
    )
    made.add_argument("name", help="name of the key's owner: letters, digits, - and _")
    said = "admin keys may load and unload adapters and bundles"
    made.add_argument("--role", choices=ROLES, default="user", help=said)
    said = "keys file that the key is appended to; without it, the line is printed"
    made.add_argument("--file", type=expanded, help=said)
    made.add_argument(
        "--models", nargs="+", default=[], metavar="PATTERN",
        help="models that the key may see and ask, e.g. 'vehicles-*', and bundles with their "
        "version, e.g. 'detection@*'; all by default",
    )  # fmt: skip
    found = made.parse_args(list(arguments))
    if not found.name.replace("-", "").replace("_", "").isalnum() or not found.name.isascii():
        made.error(f"name {found.name!r} may have letters, digits, - and _ only")
    if found.models and found.role == "admin":
        made.error("admin keys may see all models: leave --models out")
    for pattern in found.models:
        if len(pattern.split()) != 1 or "#" in pattern or not pattern.isprintable():
            made.error(f"pattern {pattern!r} has a space or #: put ? in its place")
    secret, line = new_key(found.name, found.role, found.models)
    if found.file is None:
        print(line)
    else:
        _append(found.file, line)
    print(f"key (shown only now): {secret}", file=sys.stderr)
    return 0


def _append(file: Path, line: str) -> None:
    """Append a line to a file that only its owner may read, or leave the file as it was."""
    content, written = f"{line}\n".encode(), 0
    try:
        file.touch(mode=0o600)
        with file.open("a+b", buffering=0) as opened:
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - 1))
            content = b"\n" * (opened.read() not in (b"", b"\n")) + content
            written = opened.write(content) or 0
            if written < len(content):
                opened.truncate(size)
        reason = "the disk is full"
    except OSError as error:
        reason = str(error.strerror)
    if written < len(content):
        raise StorageError(
            f"the key could not be written to {file} ({reason}), and none was made: make room or "
            "name another file"
        )


def main(
    arguments: Sequence[str] | None = None, on_started: Callable[[str], None] | None = None
) -> int:
    """Run the command; `on_started` is called with the server's address once it answers."""
    encode_all_output()
    given: list[Any] = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["key"]:
            return make_key(given[1:])
        if given and given[0] in _GONE:
            raise SettingsError(f"the command {given[0]} is gone: {_GONE[given[0]]}")
        found = read(given)
        return _check(*found) if "--check" in given else asyncio.run(serve(*found, on_started))
    except ValoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if (name := error.name or "").startswith("valora_"):
            raise
        extra = "scale" if name.partition(".")[0] == "ray" else "serve"
        print(f"error: {name} is missing: pip install 'valora[{extra}]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while it starts
        print("interrupted: nothing is served", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
