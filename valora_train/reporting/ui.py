"""`make ui`: MLflow's pages, with links that land on the latest fusions.

MLflow 3 has two halves, GenAI and Model training, and each browser begins in the first, where an
experiment of runs looks empty. The browser's choice decides, not the kind of the experiment. So
the page that is served here chooses Model training in browsers that have not chosen yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from valora_train.errors import TrackingError
from valora_train.reporting.mlflow_store import LOCAL_SERVER
from valora_train.reporting.tracking import latest_fusions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Message, Receive, Send], Awaitable[None]]

APP = "valora"
"""Name of `create_app` in the entry-point group ``mlflow.app``."""
CHOOSE = (
    b"<script>localStorage.getItem('mlflow.workflowType_v1')||"
    b"localStorage.setItem('mlflow.workflowType_v1','\"machine_learning\"')</script>"
)
NOT_COPIED = {b"content-length", b"etag", b"last-modified", b"cache-control", b"expires"}
CONDITIONS = {b"if-none-match", b"if-modified-since"}


def create_app() -> App:
    """MLflow's server, whose start page chooses Model training."""
    from mlflow.server.fastapi_app import app

    return choosing_model_training(app)


def choosing_model_training(app: App) -> App:
    """Put the script that chooses Model training into the start page of an ASGI application."""

    async def changed(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/" or scope["method"] != "GET":
            await app(scope, receive, send)
            return
        kept = [pair for pair in scope["headers"] if pair[0] not in CONDITIONS]
        start: Message = {}
        body = b""

        async def collect(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            body += message.get("body", b"")
            if message.get("more_body", False):
                return
            page = body.replace(b"<head>", b"<head>" + CHOOSE, 1)
            headers = [pair for pair in start["headers"] if pair[0].lower() not in NOT_COPIED]
            headers += [
                (b"content-length", str(len(page)).encode()),
                (b"cache-control", b"no-cache"),
            ]
            await send({**start, "headers": headers})
            await send({"type": "http.response.body", "body": page})

        await app({**scope, "headers": kept}, receive, collect)

    return changed


def print_links(uri: str | None, server: str, console: Console) -> None:
    """Print the addresses of the latest fusions.

    Args:
        uri: Tracking URI; None for the default.
        server: Address at which MLflow is served.
        console: The console to print to.
    """
    found = latest_fusions(uri)
    for experiment, run, address in found:
        place = address.replace(LOCAL_SERVER, server, 1)
        console.print(f"[bold]{experiment}[/]  {run}\n  {place}", highlight=False, soft_wrap=True)
    if not found:
        console.print("no fusion has run in this folder yet: make fuse", highlight=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print links and serve MLflow's pages until Ctrl-C; other options are `mlflow server`'s."""
    import mlflow

    parser = argparse.ArgumentParser(
        description="Serves MLflow's pages. Other options are those of `mlflow server`."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=5000, help="port to listen on")
    parser.add_argument("--backend-store-uri", help="tracking URI; default: MLflow's")
    options, rest = parser.parse_known_args(arguments)
    uri = options.backend_store_uri or mlflow.get_tracking_uri()
    try:
        print_links(uri, f"http://{options.host}:{options.port}", Console())
    except TrackingError as error:
        sys.exit(f"error: {error}")
    if uri.startswith(("http://", "https://")):
        return  # that server shows the pages
    command = [
        "mlflow", "server", "--app-name", APP, "--workers", "1", "--backend-store-uri", uri,
        "--host", options.host, "--port", str(options.port), *rest,
    ]  # fmt: skip
    # Jobs are for evaluations of language models; their runners only take memory here.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *command])  # Ctrl-C reaches MLflow itself


if __name__ == "__main__":
    main()
