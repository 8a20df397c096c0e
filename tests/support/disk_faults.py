"""Disks that fail: an error at one file operation of the state file, whichever it is."""

import contextlib
import os
import resource
from pathlib import Path
from unittest import mock


class Faults:
    """Counts the file operations on a folder and raises an error at one of them.

    Attributes:
        seen: Names of the operations so far, in order.
    """

    def __init__(self, folder, at, error):
        self._folder, self._at, self._error = str(folder), at, error
        self.seen = []

    def step(self, name):
        self.seen.append(name)
        if len(self.seen) - 1 == self._at:
            raise self._error

    def _inside(self, path):
        return str(path).startswith(self._folder)

    def path_method(self, name):
        real = getattr(Path, name)

        def method(path, *arguments, **options):
            if self._inside(path):
                self.step(name)
            made = real(path, *arguments, **options)
            if name == "open" and self._inside(path):
                made.flush = self._before(made.flush, "write")
            return made

        return method

    def _before(self, function, name):
        def call(*arguments):
            self.step(name)
            return function(*arguments)

        return call

    def fsync(self, descriptor):
        self.step("fsync")

    def open(self, path, *arguments, **options):
        if self._inside(path):
            self.step("os.open")
        return _open(path, *arguments, **options)


_open = os.open


@contextlib.contextmanager
def failing(folder, at=None, error=None):
    """Let the file operation of number `at` on a folder fail with an error; gives `Faults`."""
    faults = Faults(folder, at, error)
    with contextlib.ExitStack() as stack:
        for name in ("mkdir", "open", "replace"):
            stack.enter_context(mock.patch.object(Path, name, faults.path_method(name)))
        stack.enter_context(mock.patch.object(os, "fsync", faults.fsync))
        stack.enter_context(mock.patch.object(os, "open", faults.open))
        yield faults


@contextlib.contextmanager
def files_of_at_most(size):
    """No file of this process may have more bytes: what is written beyond them fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
