"""Processes that decode: they may be killed, crash, hang or be left alone at any time."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from tests.support.cases import others_slow
from tests.support.disk_faults import files_of_at_most
from tests.support.http_helpers import PNG, encoded, picture, until
from tests.support.media_files import scans
from valora_serve.errors import ImageError, OverloadedError, ServeError
from valora_serve.server.media import decode
from valora_serve.server.media.pool import DecodePool
from valora_serve.server.media.reader import MediaReader, MediaUrl
from valora_serve.server.settings import ServerSettings

LIMITS = ServerSettings(decode_seconds=20.0, media_seconds=60.0)


@pytest.fixture(scope="module")
def pool():
    return DecodePool(2)  # its processes end with this one


@pytest.fixture(scope="module")
def slow():
    """A JPEG that takes many seconds to decode."""
    content = scans(encoded(Image.new("RGB", (3000, 3000)), "JPEG", progressive=True), 2000)
    assert len(content) < 2 * 2**20
    return content


def job(content, limits=LIMITS, take=lambda *_: None):
    return "image", MediaUrl(content), SimpleNamespace(limits=limits, take=take, seconds=[])


def decoded(pool, *jobs):
    """Results of several jobs at once; an exception where one failed."""

    async def run():
        return await asyncio.gather(*(pool.decode(*j) for j in jobs), return_exceptions=True)

    return asyncio.run(run())


def test_many_at_once_and_processes_that_are_killed_while_they_are_idle(pool):
    jobs = [job(encoded(picture(10 + n, 20, (n, 0, 0)))) for n in range(12)]
    found = [(image.size, image.getpixel((5, 5))[0]) for [image] in decoded(pool, *jobs)]
    assert found == [((10 + n, 20), n) for n in range(12)]
    workers = list(pool._processes._pool_manager.worker_manager.workers)
    assert len(workers) == 2
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert all(isinstance(found, list) for found in decoded(pool, job(PNG), job(PNG)))


def test_a_process_that_is_killed_while_it_decodes(pool, slow):
    async def run():
        one = asyncio.create_task(pool.decode(*job(slow)))
        tasks = pool._processes._pool_manager.task_manager.tasks
        while not (pool._held and any(task.started for task in tuple(tasks.values()))):
            await asyncio.sleep(0.01)
        [task] = tasks.values()
        os.kill(task.worker_id, signal.SIGSEGV)
        with pytest.raises(ImageError, match="decoder gave up"):
            await one
        return await pool.decode(*job(PNG))

    decoded(pool, job(PNG))
    assert asyncio.run(run())[0].size == (40, 20)


@pytest.mark.parametrize(
    ("limit", "wait", "last"), [(0.4, 60, list), (0.8, 0.2, (OverloadedError, list))]
)
def test_a_decode_that_takes_too_long_holds_no_place(pool, slow, limit, wait, last):
    """Another one is decoded then, or refused where it may not wait as long."""
    began = time.monotonic()
    limits = replace(LIMITS, decode_seconds=limit, media_seconds=wait)
    *late, found = decoded(pool, *(job(one, limits) for one in (slow, slow, PNG)))
    assert [type(error) for error in late] == [ImageError] * 2
    assert all(f"longer than {limit} s" in str(error) for error in late)
    assert isinstance(found, last)
    assert time.monotonic() - began < 20


def test_a_process_that_nobody_stops_in_time_ends_itself(pool, slow, monkeypatch):
    schedule = pool._schedule
    monkeypatch.setattr(pool, "_schedule", lambda function, _, *rest: schedule(function, 60, *rest))
    [error] = decoded(pool, job(slow, replace(LIMITS, decode_seconds=0.1)))
    assert "longer than 0.1 s to decode" in str(error)


@pytest.mark.parametrize("error", [OverloadedError("no"), RuntimeError("a fault of ours")])
def test_the_server_may_refuse_a_size(pool, error):
    asked = []

    def refuse(count):
        asked.append(count)
        raise error

    found = decoded(pool, job(PNG, take=refuse))
    assert isinstance(found[0], type(error))
    assert asked == [800]
    assert decoded(pool, job(encoded(picture(7, 5))))[0][0].size == (7, 5)


def test_a_header_that_tells_too_little(pool, monkeypatch):
    """The system limits the memory of a decode to what was reserved for it.

    The 192 MB of this one are more than whatever libraries have mapped before, and may give back.
    """
    content = encoded(Image.new("RGB", (8000, 6000)), "PNG")
    limits = replace(LIMITS, max_image_pixels=50_000_000, max_decode_bytes=2**30)
    measure = pool._result

    def less(one, function, *arguments):
        if function is decode.decode:
            arguments = (*arguments[:-1], 2**22)
        return measure(one, function, *arguments)

    monkeypatch.setattr(pool, "_result", less)
    assert "bytes to decode" in str(decoded(pool, job(content, limits))[0])


def test_memory_is_shared(pool):
    """Two that fit alone but not together are decoded one after the other."""
    content = encoded(Image.new("RGB", (2000, 2000)), "JPEG")
    held, one = [], replace(LIMITS, max_decode_bytes=50 * 2**20)

    async def run():
        tasks = [asyncio.create_task(pool.decode(*job(content, one))) for _ in range(6)]
        while not all(task.done() for task in tasks):
            held.append(pool._held)
            await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks)

    assert [image.size for [image] in asyncio.run(run())] == [(2000, 2000)] * 6
    assert 0 < max(held) <= one.max_decode_bytes


def test_a_pool_that_cannot_start_processes(monkeypatch):
    pool = DecodePool(1)
    monkeypatch.setattr(decode, "begin", len)  # fails, as it takes an argument
    [error] = decoded(pool, job(PNG))
    assert isinstance(error, ServeError)
    assert "log" in str(error) or "memory" in str(error)
    monkeypatch.undo()
    assert decoded(pool, job(PNG))[0][0].size == (40, 20)


ENDS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None]
PROGRAM = """
import asyncio, io, signal, sys
# A shell starts what runs in its background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from PIL import Image
from valora_serve.server.loading.golden import LIMITS, MediaReader, MediaUrl
from valora_serve.server.media.pool import shared_pool
pool = shared_pool()
pool.start()
buffer = io.BytesIO()
Image.new("L", (9, 9)).save(buffer, "PNG")
asyncio.run(pool.decode("image", MediaUrl(buffer.getvalue()), MediaReader(LIMITS).pixels()))
print(*pool._processes._pool_manager.worker_manager.workers, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", others_slow([signal.SIGKILL], ENDS))
def test_processes_end_with_the_server(how):
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.DEVNULL,
    ) as server:  # fmt: skip
        pids = [int(pid) for pid in server.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            names = {str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
            assert not any("socket" in name for name in names), names
        if how is None:
            server.stdin.close()
        else:
            server.send_signal(how)
        server.wait(30)
        until(lambda: not any(alive(pid) for pid in pids))


def alive(pid):
    """Whether a process runs; one that has ended, and that nobody waits for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_time_of_a_requests_images_is_limited_together(slow):
    errors = []

    async def run():
        reader = MediaReader(ServerSettings(decode_seconds=0.2))
        with reader.pixels() as pixels:
            for _ in range(4):
                with pytest.raises(ImageError) as raised:
                    await reader.image(MediaUrl(slow), pixels)
                errors.append(str(raised.value))
        await reader.close()
        assert reader.held == 0

    asyncio.run(run())
    assert "longer than 0.2 s to decode" in errors[0]
    assert "longer than 0.6 s to decode together" in errors[3]


def test_a_file_that_is_held_in_part_is_not_called_damaged(pool):
    content = encoded(picture(), "PNG")
    with files_of_at_most(16):
        (found,) = decoded(pool, job(content))
    assert isinstance(found, OverloadedError)
    (image,) = decoded(pool, job(content))[0]
    assert image.size == picture().size
