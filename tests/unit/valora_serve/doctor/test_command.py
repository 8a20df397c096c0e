"""The command, and what it says of a machine without a GPU."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from valora_serve import cli
from valora_serve.doctor import command, gpu, machine
from valora_serve.doctor.base import Facts, Level, Patient

NOBODY = Patient("tiny", 1, lambda: Facts("2.15.0"))


def test_it_says_what_is_wrong_and_how_to_mend_it(monkeypatch, capsys):
    assert command.main(["python", "files", "machine"]) == 0
    said = capsys.readouterr().out
    assert "✓ Python" in said
    assert "nothing is wrong" in said
    monkeypatch.setattr(machine, "PYTHONS", ((3, 99),))
    monkeypatch.setattr(machine, "EXTRAS", {"serve": ("no_such_module",)})
    assert command.main(["python", "extras"]) == 1
    said = capsys.readouterr().out
    assert "install Python 3.99" in said
    assert "pip install 'valora[serve]'" in said
    assert "1 of these must be mended" in said


def test_a_reader_that_goes_away_sees_no_traceback():
    with subprocess.Popen(
        [sys.executable, "-m", "valora_serve.doctor.command", "python", "machine"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as running:  # fmt: skip
        running.stdout.close()
        assert running.stderr.read() == b""
    assert running.returncode == 1


def test_for_programs(monkeypatch, capsys):
    broken = Facts(None, "no such file")
    monkeypatch.setattr(gpu, "installed", lambda _: None)
    assert command.main(["torch", "--json"], facts=lambda: broken) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["findings"] == [{
        "check": "torch", "level": "wrong", "what": "PyTorch", "remedy": "pip install torch",
        "found": "cannot be imported (no such file)",
    }]  # fmt: skip
    assert cli.main(["doctor", "python", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    "failure",
    [
        "ImportError('libcudart.so.13: cannot open')",
        "ValueError('libcublas.so.*[0-9] not found in the system path')",
    ],
)
def test_a_pytorch_that_cannot_be_imported_hides_nothing(tmp_path, failure):
    (tmp_path / "torch.py").write_text(f"raise {failure}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    command = [sys.executable, "-m", "valora_serve.cli", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    found = {one["what"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["base model"]["level"] == "fine"
    assert failure.split("'")[1] in found["PyTorch"]["found"]
    assert found["PyTorch"]["remedy"] == "pip install --force-reinstall torch"


def test_a_terminal_that_lacks_characters():
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "valora_serve.cli", "doctor", "python"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(r"\u2713 Python")


def test_a_base_model_that_is_not_there(monkeypatch, capsys):
    assert command.main(["files", "--base", "a/b/c"]) == 1
    said = capsys.readouterr().out
    assert "'a/b/c' is neither a folder nor a name on the hub: name a folder that holds one" in said
    assert command.main(["files", "--base", "~no-such-user/model"]) == 1
    assert "does not exist: name a folder that holds one" in capsys.readouterr().out
    for offline, level in ((True, "✗"), (False, "–")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        assert command.main(["files", "--base", "acme/absent"]) == int(offline)
        assert f"{level} base model    acme/absent is not on this" in capsys.readouterr().out
    assert command.main(["files", "--base", "/no/such/model"]) == 1
    assert "✗ base model" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--tensor-parallel", "0"])
    with pytest.raises(SystemExit):
        command.main(["python", "disk"])
    assert "disk is no check: name some of python, machine, disks," in capsys.readouterr().err


def denied(path):
    raise PermissionError(13, "Permission denied", path)


def test_limits_and_disks(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    notes = [f for f in machine.check_machine(NOBODY) if f.level is Level.NOTE]
    assert [(f.what, "768 connections" in f.found) for f in notes] == [("open files", True)]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton" / "deep"))
    assert {f.level for f in machine.check_disks(NOBODY)} == {Level.FINE}
    monkeypatch.setattr(machine.os, "access", lambda path, _: path != tmp_path)
    wrong = [f for f in machine.check_disks(NOBODY) if f.level is Level.WRONG]
    assert [f.what for f in wrong] == ["kernels"]
    monkeypatch.setattr(machine.os, "access", lambda *_: True)
    monkeypatch.setattr(machine.shutil, "disk_usage", denied)
    wrong = [f for f in machine.check_disks(NOBODY) if f.level is Level.WRONG]
    assert len(wrong) == 4
    assert all("cannot be written" in f.found for f in wrong)
    monkeypatch.undo()
    monkeypatch.setattr(machine, "LEAST_DISK", 1 << 60)
    assert {f.level for f in machine.check_disks(NOBODY)} == {Level.WRONG}


def test_folders_of_caches(monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(file / "triton"))
    monkeypatch.setenv("VALORA_COST_FOLDER", str(tmp_path / "costs"))
    found = {one.what: one for one in machine.check_disks(NOBODY)}
    assert str(tmp_path / "costs") in found["costs"].found
    assert found["kernels"].level is Level.WRONG
    assert found["kernels"].remedy.endswith("name another folder with TRITON_CACHE_DIR")


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    monkeypatch.chdir(tmp_path)
    for name in ("TRITON_CACHE_DIR", "HF_HOME", "XDG_CACHE_HOME", "VALORA_COST_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    found = {one.what: one for one in machine.check_disks(NOBODY)}
    assert (found["home folder"].level, found["costs"].level) == (Level.NOTE, Level.FINE)
    assert str(tmp_path / ".cache" / "valora") in found["costs"].found


def test_ray_is_optional(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda _: None)
    (found,) = [f for f in machine.check_extras(NOBODY) if f.what == "Ray"]
    assert (found.level, found.remedy) == (Level.NOTE, "pip install 'valora[scale]'")
