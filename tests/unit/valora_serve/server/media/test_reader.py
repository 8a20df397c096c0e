"""Limits on the images and videos of a request."""

import asyncio
import base64
from dataclasses import asdict

import pytest
from PIL import Image

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import begin, chat, data_url, encoded, picture, serving, until
from tests.support.http_helpers import read_media as read
from tests.support.media_files import scans
from valora_serve.errors import ImageError, OverloadedError
from valora_serve.server.media.fetch import MediaUrl
from valora_serve.server.media.reader import MediaReader
from valora_serve.server.settings import ServerSettings


def test_decoders_get_limits_and_no_key():
    settings = ServerSettings(
        api_key="k" * 16, allow_runtime_loading=True, adapter_folder="/srv", video_frames=3
    )
    limits = MediaReader(settings).pixels().limits
    assert "k" * 16 not in str(asdict(limits)) and limits.video_frames == 3


def test_pixels_of_a_request_and_of_all_are_bounded():
    """Many small files that are large images are a bomb, too."""

    async def once():
        settings = ServerSettings(max_request_pixels=3 * 10**6, max_held_pixels=4 * 10**6)
        reader = MediaReader(settings)
        content = encoded(Image.new("L", (1000, 1000)))
        assert len(content) < 5000
        with reader.pixels() as first:
            for _ in range(3):
                await reader.image(MediaUrl(content), first)
            with pytest.raises(ImageError, match="together"):
                await reader.image(MediaUrl(content), first)
            with reader.pixels() as second:
                await reader.image(MediaUrl(content), second)
                with pytest.raises(OverloadedError, match="other requests"):
                    await reader.image(MediaUrl(content), second)
        with reader.pixels() as third:
            for _ in range(3):
                await reader.image(MediaUrl(content), third)
        with pytest.raises(ImageError, match="over"):
            third.take(1)  # a thread that comes too late takes nothing
        assert reader.held == 0
        await reader.close()

    asyncio.run(once())


def test_frames_in_one_data_url():
    frames = [encoded(picture(16, 12, (n, n, n)), "JPEG", quality=95) for n in (10, 90)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(f).decode() for f in frames)
    found = read(url, "video")
    assert [frame.getpixel((8, 6))[0] for frame in found] == pytest.approx([10, 90], abs=3)
    with pytest.raises(ImageError, match="frames"):
        read(url, "video", max_video_frames=1)


def test_pixels_are_given_back_when_a_request_ends():
    engine = FakeEngine(step=0.02)
    urls = [data_url(encoded(picture(50, 50)))] * 3
    with serving(engine, max_held_pixels=3 * 2500) as server:
        media = server.context.media
        for body in ({"images": urls}, {"images": [*urls, *urls]}, {"images": [urls[0], "data:x"]}):
            server.client.post("/v1/vision/person", json=body)
            until(lambda: media.held == 0)
        sock = begin(server, chat(url=urls[0], max_tokens=2000, ignore_eos=True, stream=True))
        until(lambda: engine.running)
        assert media.held == 2500
        busy = server.client.post("/v1/vision/person", json={"images": urls})
        assert busy.status_code == 429
        sock.close()
        until(lambda: media.held == 0, 3)
        assert server.client.post("/v1/vision/person", json={"images": urls}).status_code == 200


def test_a_client_that_leaves_while_its_image_is_decoded():
    """Its pixels are free at once, its place when the time of a decode is over."""
    slow = scans(encoded(Image.new("RGB", (3000, 3000)), "JPEG", progressive=True), 2000)
    with serving(FakeEngine(), decode_seconds=4.0) as server:
        media = server.context.media
        socks = [begin(server, chat(url=data_url(slow))) for _ in range(4)]
        until(lambda: media.held >= 2 * 9 * 10**6)
        small = {"images": [data_url(encoded(picture()))]}
        late = server.client.post("/v1/vision/person", json=small | {"deadline": 0.3})
        assert late.status_code == 504 and "deadline" in late.json()["error"]["message"]
        for sock in socks:
            sock.close()
        until(lambda: media.held == 0, 15)
        assert server.client.post("/v1/vision/person", json=small).status_code == 200
