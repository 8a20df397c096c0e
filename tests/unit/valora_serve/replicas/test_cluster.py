"""Settings of replicas; Ray clusters: joining them, their room, why replicas do not start."""

import asyncio
import contextlib
import socket
import sys
import time
from types import SimpleNamespace

import pytest
import ray
from ray._private.utils import check_version_info

from tests.support.http_helpers import bundle
from valora_serve import cli
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import SettingsError
from valora_serve.replicas import cluster
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.server.settings import ServerSettings


def node(cores=0.0, gpus=0.0, alive=True):
    return {"Alive": alive, "Resources": {"CPU": cores, "GPU": gpus}}


@pytest.mark.parametrize(
    ("count", "engine", "machines", "found"),
    [
        (2, {}, [node(8, 2)], {"num_gpus": 1, "num_cpus": 0}),
        (8, {}, [node(4, 4), node(4, 4)], {"num_gpus": 1, "num_cpus": 0}),
        (2, {"tensor_parallel": 2}, [node(2, 4)], {"num_gpus": 2, "num_cpus": 0}),
        (2, {}, [node(8)], {"num_cpus": 4.0}), (3, {}, [node(8)], {"num_cpus": 2.0}),
        (3, {}, [node(2)], {"num_cpus": 0.66}),
        (3, {}, [node(8, 2)], "has 2 GPUs, enough for 2 of 3 replicas with 1 each, .*: lower"),
        (1, {"device": "cuda"}, [node(8)], "has 0 GPUs, enough for 0 of 1 replica with 1"),
        (2, {"tensor_parallel": 2}, [node(8, 3), node(0, 1)], "has 4 GPUs, .* for 1 .*on one"),
        (2, {"device": "cuda", "tensor_parallel": 2}, [node(0, 3)], "has 3 GPUs, .* for 1 of 2 "),
        (300, {}, [node(1), node(1)], "has 2 CPUs, .* for 200 of 300 .* with 0.01 each"),
    ],
)  # fmt: skip
def test_what_a_replica_gets(count, engine, machines, found, monkeypatch):
    monkeypatch.setattr(ray, "nodes", lambda: [*machines, node(640, 64, alive=False)])
    given = ReplicaSettings(replicas=count), EngineSettings(**engine)
    if isinstance(found, dict):
        assert cluster.resources(*given) == found
        return
    with pytest.raises(SettingsError, match=found):
        cluster.resources(*given)


def other_version(**_):
    there = {"ray_version": "2.1.0", "python_version": "3.8.1"}
    check_version_info(there, "this process")


def strange(**_):
    raise RuntimeError("This node is no part of it:\nsomething\nelse")


def not_asked(**_):
    pytest.fail("Ray was asked")


@pytest.mark.parametrize(
    ("address", "ray_says", "words"),
    [
        ("ray://head:10001", not_asked, ["not known", "name HOST:PORT of its head"]),
        ("head", not_asked, ["name HOST:PORT of its head"]),
        ("127.0.0.1:99999", not_asked, ["127.0.0.1:99999 cannot be joined"]),
        ("no-such-host.invalid:6379", not_asked, ["no-such-host.invalid:6379 cannot be joined"]),
        ("127.0.0.1:free", not_asked, ["Connection refused", "started with `ray start --head`"]),
        ("auto", other_version,
         ["Ray: 2.1.0 Python: 3.8.1", f"Ray: {ray.__version__}", "its versions of Ray and Python"]),
        ("auto", strange, ["cannot be joined (This node is no part of it: something else)"]),
        (None, strange, ["Ray cannot be started on this machine"]),
    ],
)  # fmt: skip
def test_a_cluster_that_cannot_be_joined_is_one_sentence(address, ray_says, words, monkeypatch):
    monkeypatch.setattr(ray, "init", ray_says)
    with contextlib.closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        free = str(bound.getsockname()[1])
        with pytest.raises(SettingsError) as caught:
            cluster.join(address and address.replace("free", free))
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


def test_an_application_that_ray_does_not_know_in_time_has_not_begun(monkeypatch):
    monkeypatch.setattr(cluster.serve, "start", lambda **_: None)
    monkeypatch.setattr(cluster.serve, "run", lambda *_, **__: time.sleep(0.2))
    monkeypatch.setattr(cluster.serve, "status", lambda: SimpleNamespace(applications={}))
    monkeypatch.setattr(ray, "nodes", lambda: [node(8)])
    given = ReplicaSettings(replicas=1, start_seconds=0.01), EngineSettings(), ServerSettings(), []
    with pytest.raises(SettingsError, match=r"not begun within 0\.01 s.*raise start_seconds"):
        asyncio.run(cluster.deploy(*given))


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", ReplicaSettings()),
        ("--replicas 3 --max-replicas 5 --router least --ray-address head:6379",
         ReplicaSettings(3, max_replicas=5, router="least", ray_address="head:6379")),
        ("--replicas 0", "should be greater than 0"),
        ("--replicas two", "replicas cannot be 'two'"),
        ("--max-replicas 2", "name their number with replicas"),
        ("--replicas 3 --max-replicas 2", "max_replicas is less than 3"),
        ("--replicas 1 --router nearest", "choose one of affinity, least, random"),
        ("--replicas 1 --router-settings bound=1", ".bound cannot be '1': input should be gr"),
        ("--replicas 1 --target-requests nan", "cannot be 'nan': input should be greater than 0"),
        ("--replicas 1 --application a/b", "should match pattern"),
    ],
)  # fmt: skip
def test_options_are_read_and_bad_ones_are_one_sentence(options, found, capsys):
    given = ["x", *options.split()]
    if isinstance(found, ReplicaSettings):
        assert cli.read(given)[3] == found
        return
    assert cli.main(given) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert found in said


def test_without_ray_replicas_say_which_extra(tmp_path, monkeypatch, capsys):
    bundle(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("valora_serve.replicas.")]:
        if not name.endswith(".settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    assert cli.main([str(tmp_path / "b"), "--replicas", "2", "--port", "0"]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "error: ray is missing: pip install 'valora[scale]'"
    assert "Traceback" not in said
