"""The command `valora` and its parts that need no model."""

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

from valora_serve import commands
from valora_serve.demo import command as demo

ROOT = Path(__file__).parents[3]


def test_every_command_can_be_asked_for_help(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, place in declared["entry-points"]["valora.commands"].items():
        module, _, attribute = place.partition(":")
        assert callable(getattr(import_module(module), attribute)), name
    assert commands.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in commands.ABOUT)
    for name in set(commands.COMMANDS) - {"fuse", "doctor"}:
        try:
            assert commands.main([name, "--help"]) == 0
        except SystemExit as end:
            assert end.code == 0, name
        assert "usage:" in capsys.readouterr().out, name


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert commands.main(["bake"]) == 2
    assert "unknown command 'bake': choose one of" in capsys.readouterr().err


def test_the_gathering_command_imports_nothing_heavy():
    code = (
        "import sys, valora_serve.commands as c; c.main(['--help'])\n"
        "heavy = {'torch', 'fastapi', 'transformers', 'hydra', 'valora_train'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_demo_serves_the_bundle_of_the_package(monkeypatch, capsys):
    given, opened = [], []

    def serve(arguments, on_started):
        given.extend(arguments)
        on_started("http://127.0.0.1:8000/")
        return 0

    monkeypatch.setattr(demo.cli, "main", serve)
    monkeypatch.setattr(demo.webbrowser, "open", opened.append)
    assert demo.main(["--no-browser", "--port", "0"]) == 0
    assert given[1:] == ["--no-profile", "--port", "0"]
    assert "The console is at http://127.0.0.1:8000/" in capsys.readouterr().err
    (manifest,) = Path(given[0]).glob("*/bundle.json")
    assert json.loads(manifest.read_text())["base"]["id"] == "tiny"
    assert opened == []
