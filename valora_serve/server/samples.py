"""A sample of requests for `valora predict`: pictures, each with what a domain answered."""

import io
import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from urllib.parse import quote

from filelock import FileLock
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from valora_serve.errors import SettingsError
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs
from valora_serve.types import Output, Request, ServedModel

NOTE = "valora"  # text chunk of a PNG file that holds the domain and its answer
_FACTS = ("name", "task", "labels", "boxes", "prompt", "bundle")
_WAITING = 4  # most pictures that wait to be written; others are passed over
_SECONDS = 30.0  # most that a picture waits for another process, which may hang


class Samples:
    """Writes pictures to a folder by domain, of whose limit other processes use a part."""

    def __init__(self, settings: ServerSettings) -> None:
        self._folder, self._max_bytes = Path(settings.sample_folder or "."), settings.sample_bytes
        self._shares, self._room = dict(settings.sample_shares), Semaphore(_WAITING)
        self._thread = ThreadPoolExecutor(1, "samples", os.nice, (19,))  # on Linux, of the thread
        if settings.sample_folder is None:
            return
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise SettingsError(f"sample_folder {self._folder} cannot be written "
                                f"({error.strerror}): name another folder") from error  # fmt: skip

    def offer(self, model: ServedModel, request: Request, output: Output) -> None:
        """Keep a picture with its answer, if its turn comes, and a small model could answer it."""
        if random.random() >= self._shares.get(model.name, 0) or not request.store:
            return
        head, fits = output.head, model.labels and not (model.takes_words or request.embed)
        one = len(request.images) == 1 and not request.videos and request.min_score is None
        if head is not None and fits and one and self._room.acquire(blocking=False):
            domain = {name: getattr(model, name) for name in _FACTS}
            note = json.dumps({"domain": domain, "answer": head.image_fields(0)})
            self._thread.submit(self._keep, model.name, request.images[0], note)

    def _keep(self, name: str, image: Image, note: str) -> None:
        content, info = io.BytesIO(), PngInfo()
        info.add_itxt(NOTE, note)
        folder = self._folder / quote(name, safe="").replace(".", "%2E")[:200]
        try:
            if not self._shares:  # nothing is kept any more
                return
            image.save(content, "PNG", compress_level=1, pnginfo=info)
            with FileLock(self._folder / ".lock", timeout=_SECONDS, mode=0o600):
                held = sum(file.stat().st_size for file in self._folder.rglob("*.png"))
                if full := held + content.tell() > self._max_bytes:
                    reason = "it is full"
                else:
                    folder.mkdir(0o700, exist_ok=True)
                    partial = folder / ".partial"
                    partial.touch(0o600)
                    partial.write_bytes(content.getbuffer())
                    partial.replace(folder / f"{time.time_ns()}.png")
        except FileNotFoundError:  # somebody deletes pictures
            full = False
        except OSError as error:
            full, reason = True, str(error.strerror or error)
        finally:
            self._room.release()
        if full:
            self._shares.clear()
            text = "sample_folder %s keeps nothing more, as %s: make room, and start again"
            logs.LOG.warning(text, self._folder, reason)
