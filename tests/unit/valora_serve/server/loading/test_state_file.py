"""State files: which are none, and two servers with one."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from valora_serve.errors import SettingsError
from valora_serve.server.loading.state_file import own_state, read_state

HOLD = """
import sys
from pathlib import Path
from valora_serve.server.loading.state_file import own_state
with own_state(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(file):
    """A process that uses a state file."""
    found = subprocess.Popen(
        [sys.executable, "-c", HOLD, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, text=True,
    )  # fmt: skip
    assert found.stdout.readline() == "held\n"
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, None])
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path, how):
    file = tmp_path / "state" / "served.json"
    with holder(file) as first:
        with (
            pytest.raises(SettingsError, match=f"{file} is in use .*--state-file"),
            own_state(file),
        ):
            pass
        with own_state(tmp_path / "state" / "other.json"):  # a file of its own
            pass
        if how is not None:
            first.send_signal(how)
        first.stdin.close()
        first.wait(30)
        with own_state(file):  # also after a crash
            pass


def test_the_same_file_by_another_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        own_state(tmp_path / "served.json"),
        pytest.raises(SettingsError),
        own_state(tmp_path / ".." / tmp_path.name / "served.json"),
    ):
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


def test_the_command_says_so_before_it_loads_a_model(tmp_path, early_error):
    (tmp_path / "store").mkdir()
    state = tmp_path / "served.json"
    given = [
        "--port", "0", "--api-key", "x" * 20, "--allow-runtime-loading", "--adapter-folder",
        str(tmp_path / "store"), "--state-file", str(state),
    ]  # fmt: skip
    with own_state(state):
        error = early_error(*given)
        assert error.startswith(f"error: state file {state} is in use by another server")
        assert error.count("\n") == 1
    state.write_text('{"version": 1, "ada')
    assert f"error: state file {state} is damaged" in early_error(*given)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"version": 2, "fleets": {}}', "newer version"),
        ('{"version": 0, "loaded": {}}', "another version"),
        ('{"version": 1, "adapters": {"one": "goo', "damaged"),
        ('{"version": "1", "adapters": {}}', "damaged"), ('{"adapters": 5}', "damaged"),
        ('{"unknown": {}}', "damaged"), ('{"adapters": {"a": 1}}', "damaged"), (300, "damaged"),
        ('["adapters"]', "damaged"), ("[" * 10**5, "damaged, as it is nested"),
        ('{"adapters": {"a": "x", "a": "y"}}', "key 'a' twice"), ("", "damaged"),
        ('{"bundles": {"a": "\\ud800"}}', "not Unicode"), (b"\xff", "damaged"),
        (Path.mkdir, "no regular file"), (os.mkfifo, "no regular file"),
    ],
)  # fmt: skip
def test_state_files_that_are_none(tmp_path, content, message):
    file = tmp_path / "served.json"
    if callable(content):
        content(file)
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else bytes(content))
    with pytest.raises(SettingsError, match=message):
        read_state(file)
