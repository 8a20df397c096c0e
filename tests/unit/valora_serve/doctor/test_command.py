"""The command, and what it says of a machine without a GPU."""

import json
import resource

import pytest

from valora_serve import cli
from valora_serve.doctor import command, machine
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


def test_for_programs(capsys):
    broken = Facts(None, "no such file")
    assert command.main(["torch", "--json"], facts=lambda: broken) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["findings"] == [{
        "check": "torch", "level": "wrong", "what": "PyTorch", "remedy": "pip install torch",
        "found": "cannot be imported (no such file)",
    }]  # fmt: skip
    assert cli.main(["doctor", "python", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


def test_a_base_model_that_is_not_there(capsys):
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


def test_ray_is_optional(monkeypatch):
    monkeypatch.setattr(machine, "installed", lambda _: None)
    (found,) = [f for f in machine.check_extras(NOBODY) if f.what == "Ray"]
    assert (found.level, found.remedy) == (Level.NOTE, "pip install 'valora[scale]'")
