"""Settings from file, environment and command line."""

import dataclasses
import os
import re

import pytest
import yaml

from valora_serve import cli, options
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.server.settings import ServerSettings

BOTH = (ServerSettings, EngineSettings)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("VALORA_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("cls", BOTH)
def test_every_field_has_a_help(cls):
    said = options.helps(cls)
    for item in dataclasses.fields(cls):
        assert len(said[item.name]) > 10, item.name
    assert set(said) == {item.name for item in dataclasses.fields(cls)}


def test_help_names_every_option_and_default(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for cls in BOTH:
        for item in dataclasses.fields(cls):
            assert f"--{item.name.replace('_', '-')}" in text
    assert "(default: 8000)" in text and "tuple" not in text


def test_the_command_line_goes_before_the_environment_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"port": 1, "burst": 1, "rate": 1, "bundles": ["a", "b"]}))
    monkeypatch.setenv("VALORA_PORT", "2")
    monkeypatch.setenv("VALORA_BURST", "2")
    bundles, server, engine, _ = cli.read(["--config", str(file), "--port", "3", "--base", "x"])
    assert (server.port, server.burst, server.rate) == (3, 2, 1)
    assert bundles == ["a", "b"]
    assert engine.base == "x"
    assert cli.read(["c", "--config", str(file)])[0] == ["c"]


def test_types(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        'media_hosts = ["a.org", "b.org"]\ndeadline_admission = false\nmax_waiting = 7\n'
        "pages = 100\n[deadlines]\nperson = 0.5\n"
    )
    _, server, engine, _ = cli.read(["--config", str(file)])
    assert server.media_hosts == ("a.org", "b.org")
    assert server.deadlines == {"person": 0.5}
    assert (server.deadline_admission, server.max_waiting) == (False, 7)
    assert engine.pages == 100
    _, server, engine, _ = cli.read([
        "--media-hosts", "a.org, b.org,", "--media-hosts", "c.org", "--deadlines", "person=0.5",
        "--deadlines", "scene=2, ", "--no-deadline-admission", "--protect-metrics",
        "--deadline", "1.5", "--pages", "none", "--no-graphs",
    ])  # fmt: skip
    assert server.media_hosts == ("a.org", "b.org", "c.org")
    assert server.deadlines == {"person": 0.5, "scene": 2.0}
    assert (server.deadline_admission, server.protect_metrics) == (False, True)
    assert (server.deadline, engine.pages, engine.graphs) == (1.5, None, False)


def test_paths_may_begin_at_home(tmp_path, monkeypatch):
    """Also where no shell looks at them: in a file, a variable or behind ``--option=``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    texts = {i.name for cls in BOTH for i in dataclasses.fields(cls) if str(i.type)[:3] == "str"}
    assert {"unix_socket", "tls_key"} < {name for name in texts if name.endswith(options.PATHS)}
    file = tmp_path / "serve.yaml"
    file.write_text("adapter-cache: ~/cache\nstate_file: ~/s.json\nkeys_file: ~nobody-here/keys\n")
    monkeypatch.setenv("VALORA_COST_FOLDER", "~/costs")
    arguments = ["--config=~/serve.yaml", "--tiling-folder=~/tilings", "--media-folder=none"]
    _, server, engine, _ = cli.read(arguments)
    assert server.adapter_cache == f"{tmp_path}/cache"
    assert server.state_file == f"{tmp_path}/s.json"
    assert server.keys_file == "~nobody-here/keys"
    assert server.media_folder is None
    assert engine.cost_folder == f"{tmp_path}/costs"
    assert engine.tiling_folder == f"{tmp_path}/tilings"


@pytest.mark.parametrize(
    ("name", "near"),
    [("VALORA_PROT", "port"), ("VALORA_XYZ", "--help"), ("VALORA_DEADLNE", "deadline")],
)
def test_unknown_variables_are_refused(monkeypatch, name, near):
    monkeypatch.setenv(name, "1")
    with pytest.raises(SettingsError, match=near) as caught:
        cli.read([])
    assert name in str(caught.value)


@pytest.mark.parametrize("name", ["api_key", "keys_file"])
def test_an_unset_variable_of_a_shell_lets_nobody_in(monkeypatch, name):
    with pytest.raises(SettingsError, match=f"{name} is empty: set it"):
        cli.read(["--" + name.replace("_", "-"), ""])
    monkeypatch.setenv(f"VALORA_{name.upper()}", "")
    with pytest.raises(SettingsError, match=f"{name} is empty: set it"):
        cli.read([])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot: 1", "did you mean port"), ("[1, 2]", "names and values"), ("a: [", "read"),
        ("port: high", "port"), ("port: 70000", "port"), ("max_waiting: 0", "max_waiting"),
        ("deadlines: {a: -1}", "deadlines"), ("log_level: loud", "log_level"),
        ("log_format: xml", "log_format"), ("tls_cert: a.pem", "tls_key"),
        ("api_key: short", "guess"), ("allow_runtime_loading: true", "adapter_folder"),
        ("{allow_runtime_loading: true, adapter_folder: .}", "API key"), ("rate: -1", "rate"),
        ("media_hosts: 5", "media_hosts"), ("decode_seconds: .inf", "finite"),
        ("deadlines: [a]", "name=value"), ("deadline: .nan", "deadline"),
        *((f"root_path: {path}", rf"root_path.*{re.escape(path)}.*: (write|name)")
          for path in ("valora", "/valora/", "/a?b")),
        *((f"trusted_proxies: ['{one}']", rf"trusted_proxies.*{re.escape(one)}.*: (write|name)")
          for one in ("*", "localhost", "10.0.0.1/8")),
        ("dtype: banana", "dtype: expected one of auto"),
        ("pages: 0", "pages: expected at least 2"),
        ("context_length: -1", "context_length: expected at least 1"),
        ("otlp_endpoint: nourl", "otlp_endpoint is nourl: write a URL"),
        ("host_bytes: -1", "host_bytes: expected at least 0"),
        ("max_rank: 100000", "max_rank: expected at most 1024"),
        ("{share_by: key, policy: algorithm1}", "algorithm1 keeps no shares"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(tmp_path, content, said):
    file = tmp_path / "serve.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError, match=said) as caught:
        cli.read(["--config", str(file)])
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_wrong_arguments(tmp_path, capsys):
    assert cli.main(["--config", str(tmp_path / "none.yaml")]) == 1
    assert "error: configuration file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["--prot", "1"])
    assert cli.main([str(tmp_path), "--log-level", "error"]) == 1
    assert "is no bundle" in capsys.readouterr().err
