"""Settings of replicas; Ray clusters: joining them, their room, why replicas do not start."""

import contextlib
import socket
import sys

import pytest
import ray
from ray._private.utils import check_version_info

from valora_serve import cli
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.replicas import cluster
from valora_serve.replicas.settings import ReplicaSettings


def machines(monkeypatch, *resources):
    nodes = [{"Alive": True, "Resources": one} for one in resources]
    gone = {"Alive": False, "Resources": {"GPU": 64.0, "CPU": 640.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, gone])


@pytest.mark.parametrize(
    ("count", "found", "reserved"),
    [
        (2, [{"CPU": 8.0, "GPU": 2.0}], {"num_gpus": 1, "num_cpus": 1.0}),
        (8, [{"CPU": 4.0, "GPU": 4.0}, {"CPU": 4.0, "GPU": 4.0}], {"num_gpus": 1, "num_cpus": 1.0}),
        (4, [{"CPU": 2.0, "GPU": 4.0}], {"num_gpus": 1, "num_cpus": 0.5}),
        (2, [{"CPU": 8.0}], {"num_cpus": 4.0}), (3, [{"CPU": 8.0}], {"num_cpus": 2.0}),
        (3, [{"CPU": 2.0}], {"num_cpus": 0.66}),
    ],
)  # fmt: skip
def test_what_a_replica_gets(count, found, reserved, monkeypatch):
    machines(monkeypatch, *found)
    assert cluster.resources(ReplicaSettings(replicas=count), EngineSettings()) == reserved


@pytest.mark.parametrize(
    ("count", "engine", "found", "message"),
    [
        (3, EngineSettings(), [{"CPU": 8.0, "GPU": 2.0}], "3 replicas need 3 GPUs, .* has 2"),
        (1, EngineSettings(device="cuda"), [{"CPU": 8.0}], "1 replica needs 1 GPU, .* has 0"),
        (
            2,
            EngineSettings(tensor_parallel=2),
            [{"CPU": 8.0, "GPU": 3.0}, {"GPU": 1.0}],
            "2 GPUs on one machine.*has 4",
        ),
        (
            2,
            EngineSettings(device="cuda", tensor_parallel=2),
            [{"GPU": 3.0}],
            "need 4 GPUs, .* enough for 1",
        ),
    ],
)
def test_more_gpus_than_there_are(count, engine, found, message, monkeypatch):
    machines(monkeypatch, *found)
    with pytest.raises(SettingsError, match=message):
        cluster.resources(ReplicaSettings(replicas=count), engine)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "no address of a Ray cluster"),
        ("127.0.0.1:99999", "no Ray cluster answers"),
        ("no-such-host.invalid:6379", "no Ray cluster answers"),
    ],
)
def test_addresses_that_lead_nowhere(address, message, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was asked"))
    with pytest.raises(SettingsError, match=message):
        cluster.join(address)


def test_a_port_that_nobody_listens_on():
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(SettingsError, match="start one with `ray start --head`"):
            cluster.join(f"127.0.0.1:{bound.getsockname()[1]}")


def test_errors_of_ray_are_one_sentence(monkeypatch):
    there = {"ray_version": "2.1.0", "python_version": "3.8.1"}

    def other_version(**_):
        check_version_info(there, "this process")

    def nothing(**_):
        raise ConnectionError("Could not find any running Ray instance.")

    def strange(**_):
        raise RuntimeError("This node is no part of it:\nsomething\nelse")

    for wrong, address, words in (
        (
            other_version,
            "auto",
            ["has Ray 2.1.0 and Python 3.8.1, and this", "install the same versions"],
        ),
        (nothing, "auto", ["no Ray cluster answers at auto", "ray start --head"]),
        (strange, "auto", ["cannot be joined (This node is no part of it: something else)"]),
        (strange, None, ["Ray cannot be started on this machine"]),
    ):
        monkeypatch.setattr(ray, "init", wrong)
        with pytest.raises(SettingsError) as caught:
            cluster.join(address)
        assert all(word in str(caught.value) for word in words)
        assert "\n" not in str(caught.value)


def test_why_replicas_do_not_start():
    told = """The deployment failed to start 2 times in a row. Error:
ray::ServeReplica:valora:EngineReplica.initialize_and_get_metadata() (pid=1, ip=1.2.3.4)
  File "replica.py", line 1, in initialize
RuntimeError: Traceback (most recent call last):
  File "valora_serve/catalogue/store.py", line 1, in load
valora_serve.errors.AdapterError: bundle b on node-2 is not the one that the server has
"""
    assert cluster._why(told) == "bundle b on node-2 is not the one that the server has"
    other = "x\nRuntimeError: Traceback\n  File y\nOSError: no file z\n"
    assert "(OSError: no file z)" in cluster._why(other)
    assert "(it hangs)" in cluster._why("it hangs")


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
        *((["--replicas", "1", "--router-settings", wrong], f"of the router is {said}")
          for wrong, said in (("bound=1", "1: choose a number above 1"), ("slack=-1", "-1: choose"),
                              ("excess=0", "0: choose"), ("choices=0", "0: choose"))),
        (["--replicas", "1", "--target-requests", "nan"], "more than 0"),
        (["--replicas", "1", "--application", "a/b"], "letters, digits"),
        (["--replica", "2"], None),
    ],
)  # fmt: skip
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
