"""MLflow's start page as `make ui` serves it."""

import asyncio
import io
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from tests.support.stores import new_store
from tests.unit.valora_train.reporting.test_tracking import started
from valora_train.reporting.ui import CHOOSE, choosing_model_training, print_links


async def page(scope, receive, send):
    known = dict(scope["headers"])
    body = [b"<html><head><title>", b"x</title></head></html>"]
    status = 304 if b"if-none-match" in known else 200
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-length", b"42"), (b"etag", b"1"), (b"x-a", b"b")],
        }
    )
    await send({"type": "http.response.body", "body": body[0], "more_body": True})
    await send({"type": "http.response.body", "body": body[1]})


def get(path: str, **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(choosing_model_training(page))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def test_the_start_page_chooses_model_training_once() -> None:
    plain, again = get("/elsewhere"), get("/", **{"if-none-match": "1"})
    assert CHOOSE not in plain.content
    assert plain.headers["etag"] == "1"
    # A copy of the page that the browser took from MLflow itself is not used.
    assert again.status_code == 200
    assert again.content == plain.content.replace(b"<head>", b"<head>" + CHOOSE)
    assert int(again.headers["content-length"]) == len(again.content)
    assert "etag" not in again.headers
    assert again.headers["x-a"] == "b"
    # A browser that has chosen GenAI keeps its choice.
    assert b"getItem('mlflow.workflowType_v1')||" in CHOOSE


def test_links_name_the_server_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = new_store(tmp_path)
    console = Console(file=io.StringIO(), width=40)
    print_links(uri, "http://127.0.0.1:5055", console)
    assert "no fusion has run" in console.file.getvalue()
    tracker = started(uri)
    print_links(uri, "http://127.0.0.1:5055", console)
    assert tracker.link is not None
    # In one line, however narrow the terminal is.
    assert tracker.link.replace(":5000", ":5055") in console.file.getvalue()
