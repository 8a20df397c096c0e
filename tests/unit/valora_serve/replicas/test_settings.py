"""Settings of replicas."""

import sys

import pytest

from valora_serve import cli
from valora_serve.replicas.settings import ReplicaSettings


def test_options_are_read():
    assert cli.read(["x"])[3] == ReplicaSettings()
    found = cli.read([
        "x", "--replicas", "3", "--max-replicas", "5", "--router", "least",
        "--router-settings", "choices=3", "--ray-address", "head:6379",
    ])[3]  # fmt: skip
    assert (found.replicas, found.max_replicas, found.router) == (3, 5, "least")
    assert found.router_settings.choices == 3
    assert found.ray_address == "head:6379"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "name at least 1"),
        (["--replicas", "two"], "replicas cannot be 'two'"),
        (["--max-replicas", "2"], "name the fewest replicas"),
        (["--replicas", "3", "--max-replicas", "2"], "less than 3 replicas"),
        (["--replicas", "1", "--router", "nearest"], "choose one of affinity, least, random"),
        (["--replicas", "1", "--router-settings", "bound=1"], "above 1"),
        (["--replicas", "1", "--target-requests", "nan"], "more than 0"),
        (["--replicas", "1", "--application", "a/b"], "letters, digits"),
        (["--replica", "2"], None),
    ],
)
def test_bad_values_are_one_sentence(options, message, capsys):
    if message is None:  # argparse knows no such option
        with pytest.raises(SystemExit):
            cli.read(["x", *options])
        return
    assert cli.main(["x", *options]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert message in said


def test_without_ray_replicas_say_which_extra(tmp_path, monkeypatch, capsys):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bundle.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("valora_serve.replicas.")]:
        if not name.endswith(".settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert cli.main([str(tmp_path / "b"), "--replicas", "2", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "error: ray is missing: pip install 'valora[scale]'"
    assert "Traceback" not in said
