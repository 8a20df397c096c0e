"""Videos: the right frames, turned upright, and one sentence for each broken file."""

import numpy as np
import pytest

from tests.support.data_sets import write_video
from valora_data.errors import DataError
from valora_data.sources.formats import videos
from valora_data.sources.formats.videos import read_frames

av = pytest.importorskip("av")


def level(image):
    return float(np.asarray(image)[4:-4, 16:-4].mean())


def test_frames_are_taken_uniformly(tmp_path):
    levels = [20 + 7 * i for i in range(24)]
    video = write_video(tmp_path / "a.mp4", levels)
    for source in (video, video.read_bytes()):
        frames = read_frames(source, 4)
        assert [(frame.mode, frame.size) for frame in frames] == [("RGB", (32, 16))] * 4
        shown = [levels[i] for i in (3, 9, 15, 21)]  # the middles of equal parts
        assert [level(f) for f in frames] == pytest.approx(shown, abs=4)
    frames = read_frames(write_video(tmp_path / "b.mp4", [40, 200]), 5)  # too short: some repeat
    assert [level(f) > 120 for f in frames] == [False, False, True, True, True]


def test_frames_are_turned_as_a_player_shows_them(tmp_path):
    """A phone writes what it sees lying down, and says how to turn it."""
    video = write_video(tmp_path / "a.mp4", [60] * 6)
    content = bytearray(video.read_bytes())
    start = content.index(b"tkhd") + 4 + 4 + 20 + 16  # version and flags, times and ids, layer
    one, minus = (65536).to_bytes(4, "big"), (-65536).to_bytes(4, "big", signed=True)
    zero, unit = bytes(4), (1 << 30).to_bytes(4, "big")
    # A quarter turn clockwise.
    content[start : start + 36] = (zero + one + zero) + (minus + zero + zero) + (zero + zero + unit)
    video.write_bytes(content)
    (frame,) = read_frames(video, 1)
    assert frame.size == (16, 32)
    pixels = np.asarray(frame).mean(-1)
    assert pixels[:6].mean() > 230 > 120 > pixels[-6:].mean()  # what was left is now on top


def test_what_cannot_be_read(tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video at all" * 40)
    with av.open(str(tmp_path / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    video = write_video(tmp_path / "cut.avi", [10 * i for i in range(20)])
    video.write_bytes(video.read_bytes()[: video.stat().st_size * 2 // 3])
    for name, count, message in (
        ("no.mp4", 4, r"video no\.mp4 cannot be decoded"),
        ("broken.mp4", 4, r"video broken\.mp4 cannot be decoded.*repair or remove them"),
        ("cut.avi", 4, r"video cut\.avi cannot be decoded"),
        ("sound.mp4", 4, r"video sound\.mp4 has no frames"),
        ("sound.mp4", 0, r"at least one frame, got 0: raise source\.frames"),
    ):
        with pytest.raises(DataError, match=message):
            read_frames(tmp_path / name, count)


def test_packets_without_frames(tmp_path, monkeypatch):
    """Some codecs have packets that show nothing: what counts is what decodes."""
    video = write_video(tmp_path / "a.mp4", [10 * i for i in range(20)])
    right = [frame.tobytes() for frame in read_frames(video, 4)]
    monkeypatch.setattr(videos, "_packets", lambda *_: 27)
    assert [frame.tobytes() for frame in read_frames(video, 4)] == right
