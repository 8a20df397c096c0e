"""Copies of a request's body: each is freed as soon as the next one exists."""

import asyncio
import base64
import contextlib
import gc
import io
import json
import threading
import time
import tracemalloc
import types
import weakref

import numpy as np
import pytest
from PIL import Image

from tests.support.cases import others_slow
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import CHAT, chat, data_url, encoded, serving, until
from tests.support.media_files import scans
from valora_serve.server.gather import AT_ONCE, gathered

LONG = {"max_tokens": 100_000, "ignore_eos": True}
NOISE = encoded(
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (1000, 900, 3), np.uint8))
)


def requests():
    """Requests with a file of 2.7 MB, by name: path and arguments of the client."""
    url = data_url(NOISE)
    frames = "data:video/jpeg;base64," + base64.b64encode(NOISE).decode()
    video = [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "video_url", "video_url": {"url": frames}}
    ]}]  # fmt: skip
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    said = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 100_000}
    return {
        "chat": (CHAT, {"json": chat(url=url, **LONG)}),
        "stream": (CHAT, {"json": chat(url=url, stream=True, **LONG)}),
        "frames": (CHAT, {"json": {"messages": video, **LONG}}),
        "responses": ("/v1/responses", {"json": said}),
        "vision": ("/v1/vision/caption", {"json": {"images": [url], "max_tokens": 100_000}}),
        "look": ("/v1/vision", {"json": {"images": [url], "max_tokens": 9999, "domains": "*"}}),
        "form": ("/v1/vision/caption", {"files": {"image": NOISE}, "data": {"max_tokens": "9999"}}),
    }


@pytest.fixture(scope="module", autouse=True)
def _few_objects():
    """What other tests have left is not looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", others_slow(["chat", "responses", "form"], requests()))
def test_a_running_request_holds_no_copy_of_its_body(name):
    assert len(NOISE) > 2 * 2**20  # twice as much as may be left
    with serving(FakeEngine(step=0.05), drain_seconds=0.1) as server:
        path, sent = requests()[name]
        request = server.client.build_request("POST", path, **sent)
        content = request.read()
        head = {"content-type": request.headers["content-type"]}

        def send():
            with contextlib.suppress(Exception):
                server.client.post(path, content=content, headers=head)

        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            thread = threading.Thread(target=send)
            thread.start()
            until(lambda: server.engine.running, 30)
            # Pillow's pixels are not Python's memory.
            until(lambda: tracemalloc.get_traced_memory()[0] < 2**20, 3)
        finally:
            tracemalloc.stop()
            gc.enable()
            server.stop()
            thread.join()


def test_what_fails_leaves_nothing_to_the_garbage_collector():
    """Its frames hold images and files of megabytes, and the collector may run much later."""
    slow = scans(encoded(Image.new("RGB", (1500, 1500)), "JPEG", progressive=True), 2000)
    cut = NOISE[:-9000]
    with serving(FakeEngine(), decode_seconds=0.4) as server:
        sent = [
            (CHAT, {"json": chat(url=data_url(slow))}),
            (CHAT, {"json": chat(url=data_url(NOISE) + "@")}),
            ("/v1/vision/person", {"files": {"image": cut}}),
            (CHAT, {"content": json.dumps(chat(url=data_url(NOISE)))[:-1] + ', "x": 1}',
                    "headers": {"content-type": "application/json"}}),
        ]  # fmt: skip
        for path, arguments in sent:
            gc.collect()
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.garbage.clear()
            try:
                assert server.client.post(path, **arguments).status_code == 400
                time.sleep(0.1)
                gc.collect()
                kinds = (types.FrameType, BaseException, Image.Image, io.BytesIO)
                assert not [item for item in gc.garbage if isinstance(item, kinds)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()


class Held:
    """Something large."""


@pytest.mark.parametrize("fails", [0, 5, AT_ONCE, 29])
def test_an_error_ends_the_others_and_leaves_nothing(fails):
    ended, started = [], []
    held = []

    async def work(number):
        large = Held()
        held.append(weakref.ref(large))
        started.append(number)
        try:
            await asyncio.sleep(0 if number <= fails else 60)
            if number == fails:
                raise ValueError(f"number {number}")
        finally:
            ended.append(number)

    async def ask():
        with pytest.raises(ValueError, match=f"number {fails}"):
            await gathered(*(work(number) for number in range(30)))
        assert sorted(ended) == sorted(started)
        assert len(asyncio.all_tasks()) == 1

    gc.disable()
    try:
        asyncio.run(ask())
        assert [one() for one in held] == [None] * len(held)  # without the garbage collector
    finally:
        gc.enable()
