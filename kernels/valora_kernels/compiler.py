"""Compiles tilings in another process, beside work that must not wait for it.

The other process runs every kernel once, on small inputs and at the lowest priority. Triton keeps
what it compiles on disk, from where this process loads it within milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from valora_kernels.search import Job, run_once
from valora_kernels.tiling import ProjectionGroup, Tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Most seconds for the process to end when it is told to."""


class Compiler:
    """A process that compiles tilings, started when there is something to compile.

    Args:
        device: GPU that they are compiled for.

    Attributes:
        on_news: Called in another thread whenever a job is done, or the process has ended.
        failed: Jobs that cannot be compiled.
        lost: Whether the process has ended by itself, so that nothing more is compiled.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_news: Callable[[], None] = _nothing
        self.failed: set[Job] = set()
        self.lost = False
        self._device = device
        self._done: set[Job] = set()
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._process: subprocess.Popen[str] | None = None

    def compile(self, jobs: Collection[Job]) -> bool:
        """Compile jobs; does not wait for them.

        Returns:
            Whether all are done, those among them that failed included.
        """
        with self._lock:
            new = [job for job in jobs if job not in self._done and job not in self._waiting]
            if self.lost:
                new = []
            self._waiting += new
        if new:
            process = self._process = self._process or self._start()
            try:
                assert process.stdin is not None
                process.stdin.writelines(_line(job) for job in new)
                process.stdin.flush()
            except OSError:  # it has ended, which the other thread notices too
                self.lost = True
        return all(job in self._done for job in jobs)

    def close(self) -> None:
        """End the process; the next job starts another one."""
        with self._lock:
            process, self._process = self._process, None
            self._waiting.clear()
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(self._device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, args=[process], daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Take the answers of a process, one a job in the order of the jobs, until it ends."""
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                if process is not self._process:
                    return
                job = self._waiting.popleft()
                if json.loads(line) is not None:
                    self.failed.add(job)
                self._done.add(job)
            self.on_news()
        with self._lock:
            if process is not self._process:
                return
            self.lost = True
        log.warning("the process that compiles kernels has ended: tilings are not measured")
        self.on_news()


def _nothing() -> None:
    """Tell nobody."""


def _line(job: Job) -> str:
    return json.dumps([asdict(job.group), job.step, asdict(job.tiling), job.first]) + "\n"


def main() -> None:
    """Compile the jobs on stdin, one a line, and answer each on stdout with null or its error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    os.nice(19)
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for line in sys.stdin:
        group, step, tiling, first = json.loads(line)
        group["out_features"] = tuple(group["out_features"])
        job = Job(ProjectionGroup(**group), step, Tiling(**tiling), first)
        error = run_once(job, str(device))
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
