"""A server on a port of its own, over the fake engine, in a thread; and requests to it."""

import asyncio
import base64
import contextlib
import io
import json
import logging
import socket
import threading
import time

import httpx
import uvicorn.server
from PIL import Image

from tests.support.fake_engine import FakeEngine
from valora_serve.server.app import create_app, make_server
from valora_serve.server.listen import bind
from valora_serve.server.media.fetch import MediaUrl
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.resolving.cache import Entry
from valora_serve.server.settings import ServerSettings

CHAT = "/v1/chat/completions"


class _Brisk:
    """uvicorn's asyncio: a tenth of its pauses, two of which a server takes only to end."""

    def __getattr__(self, name):
        return getattr(asyncio, name)

    @staticmethod
    def sleep(seconds):
        return asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _Brisk()


class Running:
    """A running server.

    Attributes:
        engine: The fake engine behind it.
        url: Base URL of the server.
        client: httpx client for it.
    """

    def __init__(self, engine, app, server, thread):
        self.engine, self.app, self.server, self._thread = engine, app, server, thread
        sock = server.servers[0].sockets[0]
        address = sock.getsockname()
        unix = address if isinstance(address, str) else None
        self.port = None if unix else address[1]
        self.url = "http://localhost" if unix else f"http://127.0.0.1:{self.port}"
        # Certificates, which nothing needs here, take 30 ms to read.
        transport = httpx.HTTPTransport(uds=unix, verify=False)
        self.client = httpx.Client(base_url=self.url, timeout=30, transport=transport)

    @property
    def context(self):
        return self.app.state.context

    @property
    def service(self):
        return self.context.service

    @property
    def inside(self):
        """Requests that the server has let in and not answered yet."""
        return self.service.admission.inside

    @property
    def names(self):
        """Names of all that the engine serves."""
        return {model.name for model in self.engine.models()}

    def stop(self):
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def serving(engine=None, served=None, *, share_by="none", key=None, **settings):
    """A server with these settings, and a client that sends a key."""
    engine = engine or FakeEngine()
    chosen = ServerSettings(**({"port": 0, "drain_seconds": 1.0} | settings))
    app = create_app(engine, chosen, served, share_by=share_by)
    server = make_server(app, chosen)
    thread = threading.Thread(target=server.run, args=(bind(chosen),), daemon=True)
    thread.start()
    until(lambda: server.started)
    running = Running(engine, app, server, thread)
    running.client.headers.update({"authorization": f"Bearer {key}"} if key else {})
    try:
        yield running
    finally:
        running.client.close()
        running.stop()


@contextlib.contextmanager
def own_logging():
    """Puts the loggers that a server sets up back."""
    loggers = [logging.getLogger(name) for name in ("valora_serve", "uvicorn.error")]
    before = [(item.handlers, item.propagate, item.level) for item in loggers]
    try:
        yield
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def until(condition, seconds=10.0, pause=0.005):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(pause)


def picture(width=40, height=20, colour=(200, 30, 60)):
    """An image with a gradient, so that its orientation can be told."""
    image = Image.new("RGB", (width, height), colour)
    image.putpixel((0, 0), (255, 255, 255))
    return image


def encoded(image, form="PNG", **options):
    """An image as a file's content."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


PNG = encoded(picture())


def entry(name, folder):
    """An adapter as a request has fetched it."""
    return Entry(name, "file", "place", "1", 8, {}, folder)


def adapter(folder, base="tiny", size=8, content=None):
    """The folder of an adapter, for the fake engine."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"base_model_name_or_path": base, "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    (folder / "adapter_model.safetensors").write_bytes(content or b"\0" * size)
    return folder


def bundle(folder, domains=("car",), name="cars", base="tiny"):
    """The folder of a bundle for the fake engine, whose manifest every reader accepts."""
    folder.mkdir(parents=True)
    facts = {"task": "detection", "metric": "f1", "adapter": None, "head": None, "labels": ["x"],
             "prompt": "p", "status": "met"}  # fmt: skip
    content = {"schema_version": 2, "name": name, "version": 1, "base": {"id": base, "sha256": "0"},
               "adapters": {}, "domains": dict.fromkeys(domains, facts), "files": {}}  # fmt: skip
    (folder / "bundle.json").write_text(json.dumps(content))
    return folder


ADMIN = "an-admin-key-of-32-characters-ok"


def loading(place, **more):
    """Settings of a server that loads at run time."""
    return {
        "allow_runtime_loading": True, "adapter_folder": str(place / "adapters"),
        "api_key": ADMIN, "state_file": str(place / "state" / "served.json"), **more,
    }  # fmt: skip


def data_url(content, kind="image/png"):
    """A data: URL."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


PNG_URL = data_url(PNG)


def chat(text="what is this?", url=None, **more):
    """Body of a chat request."""
    content = [{"type": "text", "text": text}]
    if url is not None:
        content.append({"type": "image_url", "image_url": {"url": url}})
    return {"messages": [{"role": "user", "content": content}], **more}


def read_media(url, kind="image", **settings):
    """An image, or a video's frames, as a server with these settings reads them."""

    async def once():
        reader = MediaReader(ServerSettings(**settings))
        try:
            with reader.pixels() as pixels:
                return await getattr(reader, kind)(MediaUrl(url), pixels)
        finally:
            await reader.close()

    return asyncio.run(once())


def ask(server, key=None, **more):
    """Send a chat request."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return server.client.post(CHAT, json=chat(**more), headers=headers)


def refused(answer, status, *words):
    """Check that an answer is an error that says these words in one sentence; gives its code."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"] and "\n" not in error["message"]
    assert all(word in error["message"] for word in words), error["message"]
    return error["code"]


def talk(server, data, close=False):
    """Send bytes over a connection of their own; what comes back, up to the end of its head."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(10)
        sock.sendall(data)
        if close:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while piece := sock.recv(65536):
                found += piece
                if b"\r\n\r\n" in found:
                    break
        except TimeoutError:
            pass
        return found


def head(length):
    """The head of a chat request whose body has so many bytes."""
    line = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{line}content-length: {length}\r\n\r\n".encode()


def begin(server, body):
    """Send a request, or bytes as they are, and give the open connection."""
    if not isinstance(body, bytes):
        content = json.dumps(body).encode()
        body = head(len(content)) + content
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(5)
    sock.sendall(body)
    return sock
