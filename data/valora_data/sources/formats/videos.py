"""Frames of video files, decoded by PyAV (FFmpeg)."""

from io import BytesIO
from typing import Any

from PIL import Image

from valora_data.errors import DataError
from valora_data.faults import FaultError, FaultKind

SUFFIXES = frozenset({".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})
FRAMES = 8  # Default number of frames that are taken of a video


def frame_places(total: int, count: int) -> list[int]:
    """Indices of frames to take: the middle of each of `count` equal parts of the video."""
    return [int((2 * part + 1) * total / (2 * count)) for part in range(count)]


def read_frames(video: Any, count: int = FRAMES, name: str = "") -> list[Image.Image]:
    """`count` RGB frames of a path or of bytes (see `frame_places`); or a `FaultError`."""
    import av

    if count < 1:
        raise DataError(f"a video needs at least one frame, got {count}: raise source.frames")
    name = name or getattr(video, "name", "video")
    try:
        total = _packets(av, video)
        frames, decoded = _decode(av, video, frame_places(total, count)) if total else ({}, 0)
        if len(frames) < len(set(frame_places(total, count))) and decoded:
            total = decoded  # some packets decode to no frame of their own
            frames, _ = _decode(av, video, frame_places(total, count))
    except (av.error.FFmpegError, OSError) as error:
        text = f"video {name} cannot be decoded ({error})"
        raise FaultError(FaultKind.VIDEO_UNREADABLE, text) from error
    if not frames:
        raise FaultError(FaultKind.VIDEO_UNREADABLE, f"video {name} has no frames")
    return [frames[index] for index in frame_places(total, count)]


def _open(av: Any, video: Any) -> Any:
    return av.open(BytesIO(video) if isinstance(video, bytes) else str(video))


def _packets(av: Any, video: Any) -> int:
    """Number of frames that the video should have, counted without decoding it."""
    with _open(av, video) as container:
        streams = container.streams.video[:1]
        return sum(packet.size > 0 for packet in container.demux(streams)) if streams else 0


def _decode(av: Any, video: Any, indices: list[int]) -> tuple[dict[int, Any], int]:
    frames: dict[int, Any] = {}
    decoded = 0
    with _open(av, video) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            if decoded in indices:
                image = frame.to_image()
                if frame.rotation:  # counter-clockwise, as Pillow turns
                    image = image.rotate(frame.rotation, expand=True)
                frames[decoded] = image.convert("RGB")
            decoded += 1
            if decoded > indices[-1]:
                break
    return frames, decoded
