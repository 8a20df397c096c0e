"""The process that decodes: ``python -m valora_serve.server.media.worker``.

It answers the jobs that `valora_serve.server.media.pool` writes to its standard input, one after
another, and ends with its input. Whatever a file does to a codec (crash, endless work, memory),
it does to this process, which holds nothing else.

A job is a line of JSON and the file's content. An answer is a `HEADER` of kind and three numbers:

- `SIZE` (width, height): may this be decoded? The server writes `GO` or anything else for no.
- `MEMORY` (bytes): decoding takes as much. The server writes `GO` once it is free.
- `PIXELS` (width, height, times): an image that was allowed; its RGB bytes, row by row, follow. A
  frame of a video is taken `times` times.
- `FAILED` (bytes): an error message of so many bytes follows, and the job has ended.
- `DONE` (retire): the job has ended; if `retire`, this process wants to be replaced.
- `READY`: written once, before the first job.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from valora_data.images import to_rgb
from valora_serve.errors import ServeError
from valora_serve.server.media.decode import Limits, decode_image, decode_video

if TYPE_CHECKING:
    from PIL import Image

HEADER = struct.Struct(">cIII")
READY, SIZE, MEMORY, PIXELS, FAILED, DONE = b"R", b"S", b"M", b"P", b"F", b"D"
GO, NO = b"y", b"n"
STRIP_BYTES = 1 << 20
"""Pixels are converted and sent in strips of about so many bytes."""
GRACE = 0.1
"""Seconds after its time limit at which a decoder that has not ended is killed."""
_MOST_NUMBER = 2**32 - 1
GROWN = 64 << 20
"""A process that has grown by so many bytes since its start is replaced."""


class _RefusedError(ServeError):
    """The server does not take an image of this size."""


class _Answers:
    """Writes the answers to jobs.

    Args:
        source: Where the server's permissions come from.
        target: Where the answers go.
    """

    def __init__(self, source: BinaryIO, target: BinaryIO) -> None:
        self._source, self._target = source, target

    def send(self, kind: bytes, *numbers: int, content: bytes = b"") -> None:
        self._target.write(HEADER.pack(kind, *(*numbers, 0, 0, 0)[:3]) + content)
        self._target.flush()

    def take(self, width: int, height: int) -> None:
        """Ask the server whether an image of this size may be decoded."""
        self.send(SIZE, width, height)
        if self._source.read(1) != GO:
            raise _RefusedError("refused")

    def reserve(self, size: int) -> None:
        """Wait until so many bytes are free for decoding; the time limit does not run meanwhile."""
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        self.send(MEMORY, min(size, _MOST_NUMBER))
        if self._source.read(1) != GO:
            raise _RefusedError("refused")
        signal.setitimer(signal.ITIMER_REAL, left)

    def image(self, image: Image.Image, times: int = 1) -> None:
        """Send the RGB pixels of an image; converted in strips: no second image is made."""
        self.send(PIXELS, image.width, image.height, times)
        rows = max(1, STRIP_BYTES // (3 * image.width))
        for top in range(0, image.height, rows):
            strip = image.crop((0, top, image.width, min(top + rows, image.height)))
            self._target.write(to_rgb(strip, image.format).tobytes())


def main() -> None:
    """Answer jobs until the input ends."""
    import av  # noqa: F401 - libraries are loaded before memory is limited

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also inside a codec
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # what libraries print is no answer
        os.dup2(nothing, number)
    start = _address_space()
    answers = _Answers(source, target)
    answers.send(READY)
    while line := source.readline():
        job = json.loads(line)
        limits = Limits(**job["limits"])
        limited = _address_space() + limits.memory  # the file counts
        content = source.read(job["bytes"])
        if len(content) < job["bytes"]:
            return
        _answer(answers, job["what"], content, limits, limited)
        del content
        grown = _address_space() - start
        answers.send(DONE, int(grown > GROWN))


def _answer(
    answers: _Answers, what: str, content: bytes, limits: Limits, address_space: int
) -> None:
    """Answer a job.

    Args:
        answers: Where the answers go.
        what: ``image`` or ``video``.
        content: The file's content.
        limits: Its limits.
        address_space: Most address space of this process meanwhile, in bytes.
    """

    def reserve_video(size: int) -> None:
        answers.reserve(size)
        _limit_memory(address_space - limits.memory + size)

    signal.setitimer(signal.ITIMER_REAL, limits.seconds + GRACE)
    _limit_memory(address_space)
    try:
        if what == "image":
            answers.image(decode_image(content, limits, answers.take, answers.reserve))
        else:
            for image, times in decode_video(content, limits, answers.take, reserve_video):
                answers.image(image, times)
    except _RefusedError:
        pass
    except ServeError as error:
        said = str(error).encode()
        answers.send(FAILED, len(said), content=said)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_memory(resource.RLIM_INFINITY)


def _limit_memory(size: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        size = hard if size == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def _address_space() -> int:
    """Address space of this process in bytes; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()
