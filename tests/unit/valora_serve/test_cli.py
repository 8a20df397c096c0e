"""The commands `valora-serve` and `valora`, and their parts that need no model."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.disk_faults import files_of_at_most
from tests.support.fake_engine import ADAPTER, BASE, PERSON
from valora_serve import cli, commands
from valora_serve.demo import command as demo
from valora_serve.server.loading import startup


def test_make_a_key(tmp_path, capsys):
    from valora_serve.server.access.keys import hashed, read_keys

    file = tmp_path / "keys"
    assert cli.main(["key", "app", "--file", str(file)]) == 0
    file.write_text(file.read_text().rstrip())  # as an editor may leave it
    assert cli.main(["key", "ops", "--role", "admin", "--file", str(file)]) == 0
    secrets = [line.split()[-1] for line in capsys.readouterr().err.splitlines()]
    keys = read_keys(file)
    assert [(key.name, key.role) for key in keys] == [("app", "user"), ("ops", "admin")]
    assert [key.sha256 for key in keys] == [hashed(secret) for secret in secrets]
    assert file.stat().st_mode & 0o077 == 0
    assert cli.main(["key", "print"]) == 0
    assert capsys.readouterr().out.startswith("print user ")
    with pytest.raises(SystemExit):
        cli.main(["key", "a b"])


@pytest.mark.parametrize("there", ["app user 0\n", ""])
def test_a_key_that_does_not_fit_leaves_the_file_as_it_was(tmp_path, capsys, there):
    file = tmp_path / "keys"
    file.write_text(there)
    with files_of_at_most(len(there) + 20):
        assert cli.main(["key", "ops", "--file", str(file)]) == 1
    said = capsys.readouterr().err
    assert "could not be written" in said and "key (shown" not in said
    assert file.read_text() == there


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--tensor-parallel", "3"], "3 GPUs cannot share base model tiny"),
        (["--device", "cuda", "--tensor-parallel", "99"], "99 GPUs are asked for, and this"),
        (["--tensor-parallel", "2", "--lora-parallel", "both"], "lora_parallel: expected one of"),
        (["--tensor-parallel", "0"], "tensor_parallel: expected at least 1, got 0"),
        (["--device", "meta"], "device meta cannot be used ("),
        (["--fronts", "2"], "fronts is for replicas: name their number"),
        (["--adapter-folder", "nowhere"], "adapter_folder nowhere is no folder: make it"),
        (["--media-folder", "nowhere"], "media_folder nowhere is no folder: make it"),
        (["--context-length", "10"], "context_length is 10: name at least 64 tokens"),
    ],
)
def test_settings_that_cannot_be_served_are_refused_in_a_sentence(
    tmp_path, monkeypatch, capfd, arguments, said
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--port", "0", *arguments]) == 1
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_shares_of_adapters_that_are_not_there_are_said(caplog):
    shares = {"adapter-1": 2.0, "base": 2.0, "adaptor-1": 3.0, "person": 4.0}
    known = [model.adapter or "base" for model in (BASE, ADAPTER, PERSON)]
    startup.tell_of_unknown("shares", shares, "adapter", known)
    assert [record.message for record in caplog.records] == [
        f"shares: there is no adapter {name}, so this has no effect"
        for name in ("adaptor-1", "person")  # a domain, which the shares of its adapter count for
    ]


def test_names_are_shown_as_they_are(capsys):
    cli._tell(startup.Served([replace(PERSON, name="[b]c[/d]")], 0, []), "http://x/", 0.0)
    assert "[b]c[/d]" in capsys.readouterr().err


ROOT = Path(__file__).parents[3]


def test_every_command_can_be_asked_for_help(capsys):
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name, place in declared["entry-points"]["valora.commands"].items():
        module, _, attribute = place.partition(":")
        assert callable(getattr(import_module(module), attribute)), name
    assert commands.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in commands.ABOUT)
    for name in set(commands.COMMANDS) - {"fuse"}:
        try:
            assert commands.main([name, "--help"]) == 0
        except SystemExit as end:
            assert end.code == 0, name
        assert "default: None" not in (text := capsys.readouterr().out) and "usage:" in text, name


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert commands.main(["bake"]) == 2
    said = capsys.readouterr().err
    assert "unknown command 'bake': choose one of" in said and "doctor" not in said
    assert commands.main(["doctor", "--json"]) == 1
    assert "use `valora-serve --check" in capsys.readouterr().err


def test_the_gathering_command_imports_nothing_heavy():
    code = (
        "import sys, valora_serve.commands as c; c.main(['--help'])\n"
        "heavy = {'torch', 'fastapi', 'transformers', 'hydra', 'valora_train'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_interrupted_starts_are_sentences(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(cli, "read", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["bundle"]) == commands.main(["demo"]) == 130
    monkeypatch.setattr(cli, "main", Mock(side_effect=KeyboardInterrupt))
    assert commands.main(["serve"]) == 130
    assert capsys.readouterr().err.count("interrupted: ") == 3


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
