"""Processes that decode: they may be killed, crash, hang or be left alone at any time."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.fuzz.media import scans
from tests.support.http_helpers import encoded, picture, until
from valora_serve.errors import ImageError, OverloadedError, ServeError
from valora_serve.server.media import pool as pool_module
from valora_serve.server.media.decode import Limits
from valora_serve.server.media.pool import DecodePool, Job
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.settings import ServerSettings

LIMITS = Limits(
    pixels=10**8,
    video_pixels=10**8,
    side=10**5,
    ratio=50.0,
    memory=2**29,
    seconds=20.0,
    video_seconds=60.0,
    frames=4,
)


@pytest.fixture
def pool():
    found = DecodePool(2)
    yield found
    found.close()


@pytest.fixture(scope="module")
def slow():
    """A JPEG that takes many seconds to decode."""
    content = scans(encoded(Image.new("RGB", (3000, 3000)), "JPEG", progressive=True), 2000)
    assert len(content) < 2 * 2**20
    return content


def job(content, limits=LIMITS, take=lambda *_: None):
    return Job("image", content, limits, take)


def decoded(pool, *jobs, wait=60.0):
    """Results of several jobs at once; an exception where one failed."""

    async def run():
        return await asyncio.gather(*(pool.decode(j, wait) for j in jobs), return_exceptions=True)

    return asyncio.run(run())


def seconds(count):
    return replace(LIMITS, seconds=count)


def test_many_at_once(pool):
    contents = [encoded(picture(10 + n, 20, (n, 0, 0))) for n in range(30)]
    found = decoded(pool, *map(job, contents))
    assert [image.size for [image] in found] == [(10 + n, 20) for n in range(30)]
    assert [image.getpixel((5, 5))[0] for [image] in found] == list(range(30))
    assert len(pool._all) == 2


def test_a_process_that_is_killed_while_it_is_idle(pool):
    good = encoded(picture())
    decoded(pool, job(good), job(good))
    for process in list(pool._all):
        os.kill(process._popen.pid, signal.SIGKILL)
        process._popen.wait()
    assert all(isinstance(found, list) for found in decoded(pool, job(good), job(good)))


def test_a_process_that_is_killed_while_it_decodes(pool, slow):
    async def run():
        one = asyncio.create_task(pool.decode(job(slow), 60))
        other = asyncio.create_task(pool.decode(job(encoded(picture())), 60))
        await other
        while not busy(pool):
            await asyncio.sleep(0.01)
        [process] = busy(pool)
        process.kill()
        with pytest.raises(ImageError, match="decoder gave up"):
            await one
        return await pool.decode(job(encoded(picture())), 60)

    assert asyncio.run(run())[0].size == (40, 20)
    assert len(pool._all) == 2


def busy(pool):
    return [process for process in pool._all if process not in pool._idle and process._ready]


def test_a_decode_that_takes_too_long_holds_no_place(pool, slow):
    began = time.monotonic()
    found = decoded(pool, *[job(slow, seconds(0.4)) for _ in range(4)], job(encoded(picture())))
    assert all(isinstance(error, ImageError) for error in found[:4])
    assert all("longer than 0.4 s" in str(error) for error in found[:4])
    assert found[4][0].size == (40, 20)
    assert time.monotonic() - began < 20


def test_who_is_cancelled_frees_the_place(pool, slow):
    async def run():
        tasks = [asyncio.create_task(pool.decode(job(slow), 60)) for _ in range(6)]
        while len(busy(pool)) < 2:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, asyncio.CancelledError) for error in ended)
        began = time.monotonic()
        [image] = await pool.decode(job(encoded(picture())), 60)
        assert time.monotonic() - began < 10  # far below what six would take
        return image

    assert asyncio.run(run()).size == (40, 20)


def test_waiting_is_limited(pool, slow):
    limits = seconds(1.5)
    began = time.monotonic()
    found = decoded(pool, *[job(slow, limits) for _ in range(2)], job(encoded(picture())), wait=0.3)
    if not isinstance(found[2], list):
        assert isinstance(found[2], OverloadedError)
    assert [type(error) for error in found[:2]] == [ImageError] * 2
    assert time.monotonic() - began < 20


def test_the_server_may_refuse_a_size(pool):
    asked = []

    def refuse(width, height):
        asked.append((width, height))
        raise OverloadedError("no")

    found = decoded(pool, job(encoded(picture()), take=refuse))
    assert isinstance(found[0], OverloadedError)
    assert asked == [(40, 20)]
    assert decoded(pool, job(encoded(picture())))[0][0].size == (40, 20)
    assert len(pool._all) == 1  # the same process


def test_an_error_of_the_server_itself_leaves_no_process_out_of_step(pool):
    def breaks(*_):
        raise RuntimeError("a fault of ours")

    found = decoded(pool, job(encoded(picture()), take=breaks))
    assert isinstance(found[0], RuntimeError)
    assert decoded(pool, job(encoded(picture(7, 5))))[0][0].size == (7, 5)


def test_memory_is_limited_by_the_system_too(pool):
    """A header that says less than the decoder then takes."""
    content = encoded(Image.effect_noise((3000, 3000), 60), "JPEG")
    limits = replace(LIMITS, memory=120 * 2**20)
    assert decoded(pool, job(content, limits))[0][0].size == (3000, 3000)
    tight = replace(LIMITS, memory=4 * 3000 * 3000)
    assert isinstance(decoded(pool, job(content, tight))[0], ImageError)


def test_a_pool_that_cannot_start_processes(monkeypatch):
    monkeypatch.setattr(pool_module.worker, "__name__", "valora_serve.no_such_module")
    pool = DecodePool(1)
    try:
        [error] = decoded(pool, job(encoded(picture())))
        assert isinstance(error, ServeError)
        assert "log" in str(error)
        monkeypatch.undo()
        decoded(pool, job(encoded(picture())))  # the process that was started meanwhile
        assert decoded(pool, job(encoded(picture())))[0][0].size == (40, 20)
    finally:
        pool.close()


def test_close_leaves_nothing(slow):
    files = len(list(Path("/proc/self/fd").iterdir()))
    pool = DecodePool(2)
    pool.start()
    pids = [process._popen.pid for process in pool._all]
    assert len(pids) == 2

    async def run():
        task = asyncio.create_task(pool.decode(job(slow), 60))
        while not busy(pool):
            await asyncio.sleep(0.01)
        pool.close()
        with pytest.raises((ImageError, ServeError)):
            await task

    asyncio.run(run())
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))  # no zombies either
    until(lambda: len(list(Path("/proc/self/fd").iterdir())) == files)
    until(lambda: not any(thread.is_alive() for thread in pool._threads._threads))


PROGRAM = """
import asyncio, io, signal, sys
# A shell starts what runs in its background with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from PIL import Image
from valora_serve.server.media.decode import Limits
from valora_serve.server.media.pool import Job, shared_pool
pool = shared_pool()
pool.start()
buffer = io.BytesIO()
Image.new("L", (9, 9)).save(buffer, "PNG")
limits = Limits(10**6, 10**7, 10**4, 50.0, 2**28, 60.0, 60.0, 4)
asyncio.run(pool.decode(Job("image", buffer.getvalue(), limits, lambda *_: None), 60))
print(*[process._popen.pid for process in pool._all], flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, None])
def test_processes_end_with_the_server(how):
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 2
    assert all(os.getsid(pid) == pid for pid in pids)  # Ctrl-C reaches the server only
    for pid in pids:
        names = {str(f.readlink()) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
        assert not any("socket" in name for name in names), names
    if how is None:
        server.stdin.close()
    else:
        server.send_signal(how)
    server.wait(30)
    until(lambda: not any(alive(pid) for pid in pids))
    server.stdout.close()
    with contextlib.suppress(OSError):
        server.stdin.close()


def alive(pid):
    """Whether a process runs; one that has ended, and that nobody waits for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_time_of_a_requests_images_is_limited_together(slow):
    async def run():
        reader = MediaReader(ServerSettings(decode_seconds=0.3))
        errors = []
        with reader.pixels() as pixels:
            for _ in range(4):
                try:
                    await reader.decode_image(slow, pixels)
                except ImageError as error:
                    errors.append(str(error))
        await reader.close()
        assert reader._held == 0
        return errors

    errors = asyncio.run(run())
    assert "longer than 0.3 s to decode" in errors[0]
    assert "longer than 0.9 s to decode together" in errors[3]
