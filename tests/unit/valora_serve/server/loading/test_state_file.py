"""State files: which are none, and two servers with one."""

import logging
import os
from pathlib import Path

import pytest
from filelock import FileLock

from valora_serve.errors import SettingsError
from valora_serve.server.loading.state_file import StateFile, own_state


def test_one_server_has_a_file_by_whatever_name(tmp_path):
    file = tmp_path / "served.json"
    with own_state(file), own_state(tmp_path / "other.json"):
        for again in (file, tmp_path / ".." / tmp_path.name / "served.json"):
            with (
                pytest.raises(SettingsError, match=r"served.json is in use .*--state-file"),
                own_state(again),
            ):
                pass
    with own_state(file):
        pass


def test_a_file_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileLock, "acquire", full)
    with caplog.at_level(logging.WARNING), own_state(tmp_path / "served.json"):
        pass
    monkeypatch.undo()
    (tmp_path / "place").write_text("a file in the folder's place")
    with own_state(tmp_path / "place" / "served.json"):
        pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 2, "fleets": {}}', "version: Input should be 1, got 2"),
        ('{"version": 1, "adapters": {"one": "goo', "is no JSON"),
        ('{"version": "1", "adapters": {}}', "damaged"), ('{"adapters": 5}', "damaged"),
        ('{"unknown": {}}', "damaged"), ('{"adapters": {"a": 1}}', "damaged"),
        ('["x"]', r"dictionary, got \['x"), ("", "is no JSON"),
        (Path.mkdir, "no regular file"), (os.mkfifo, "no regular file"),
        (lambda file: [file.parent.rmdir(), file.parent.touch()], r"cannot be read \(Not a dir"),
    ],
)  # fmt: skip
def test_state_files_that_are_none(tmp_path, content, message):
    file = tmp_path / "served.json"
    if callable(content):
        content(file)
    else:
        file.write_text(content)
    with pytest.raises(SettingsError, match=message):
        StateFile(file).read()
