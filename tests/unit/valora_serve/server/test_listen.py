"""Addresses and certificates are checked before a model is loaded."""

import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
import pytest

from tests.support.http_helpers import serving
from valora_serve.errors import SettingsError
from valora_serve.server.listen import bind, check_certificate
from valora_serve.server.loading.state_file import own_state
from valora_serve.server.settings import ServerSettings


def settings(**chosen):
    return ServerSettings(**{"host": "127.0.0.1", "port": 0} | chosen)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"host": "no.such.host.invalid"}, "host no.such.host.invalid"),
        ({"host": "a" * 300}, "host aaa"),
        ({"host": "192.0.2.7"}, "host 192.0.2.7.*name an address of this"),
    ],
)  # fmt: skip
def test_addresses_that_cannot_be(chosen, said):
    with pytest.raises(SettingsError, match=said):
        bind(settings(**chosen))


def test_an_address_of_a_kind_that_the_machine_lacks(monkeypatch):
    found = [(200, socket.SOCK_STREAM, 0, "", ("::1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(SettingsError, match="host ::1: this machine has no such kind"):
        bind(settings(host="::1"))


def test_a_bound_port_refuses_until_it_listens_and_is_taken_again_after_a_restart():
    (sock,) = bind(settings())
    port = sock.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    sock.listen()
    with pytest.raises(SettingsError, match=f"port {port}: .*in use: .*--port"):
        bind(settings(port=port))
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = sock.accept()
    accepted.close()  # the server's side ends first, and lingers
    sock.close()
    client.close()
    time.sleep(0.05)
    (again,) = bind(settings(port=port))
    again.listen()
    again.close()


@pytest.mark.parametrize(("seconds", "milliseconds"), [(7, 7000), (float("inf"), 2**31 - 1)])
def test_the_kernel_ends_connections_whose_client_reads_nothing(seconds, milliseconds):
    (sock,) = bind(settings(send_seconds=seconds))
    sock.listen()
    with sock, socket.create_connection(sock.getsockname()):
        accepted, _ = sock.accept()
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == milliseconds
        accepted.close()


def test_localhost_listens_on_one_port_of_all_its_addresses():
    sockets = bind(settings(host="localhost"))
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def certificate(folder, name):
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj",
        "/CN=localhost", "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem",
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl makes the certificate, and is not installed")


def test_certificates(tmp_path):
    certificate(tmp_path, "a")
    certificate(tmp_path, "b")
    (tmp_path / "text").write_text("hello")
    locked = ["openssl", "pkey", "-aes256", "-passout", "pass:1234", "-in", tmp_path / "a.key",
              "-out", tmp_path / "locked.key"]  # fmt: skip
    subprocess.run(locked, check=True, capture_output=True)

    def check(cert, key):
        check_certificate(settings(tls_cert=str(tmp_path / cert), tls_key=str(tmp_path / key)))

    check("a.pem", "a.key")
    files = {"tls_cert": str(tmp_path / "a.pem"), "tls_key": str(tmp_path / "a.key")}
    with serving(**files) as server:
        context = ssl.create_default_context(cafile=tmp_path / "a.pem")
        context.check_hostname = False
        answer = httpx.get(f"https://127.0.0.1:{server.port}/health", verify=context)
        assert answer.status_code == 200
    for cert, key, said in (
        ("c.pem", "a.key", "No such file"), ("a.pem", "c.key", "No such file"),
        ("a.pem", "b.key", "belong together"), ("text", "a.key", "no certificate"),
        ("a.pem", "locked.key", "without a password"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=said):
            check(cert, key)


def test_the_command_says_what_is_wrong_before_it_loads_anything(
    monkeypatch, early_error, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    (tmp_path / "file").touch()
    asks = ["--port", "0", "--adapter-sources", "store", "--adapter-allow", "*", "--adapter-cache",
            "file"]  # fmt: skip
    loads = ["--port", "0", "--api-key", "x" * 20, "--allow-runtime-loading", "--adapter-folder",
             "store", "--state-file", "served.json"]  # fmt: skip
    with socket.socket() as other, own_state(tmp_path / "served.json"):
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for said, given in (
            (f"host 127.0.0.1, port {port}: Address already in use", ["--port", port]),
            ("tls_cert no.pem and tls_key no.key are no certificate",
             ["--tls-cert", "no.pem", "--tls-key", "no.key"]),
            ("adapter_cache file cannot be used (File exists)", asks),
            ("state file served.json is in use by another server", loads),
        ):  # fmt: skip
            assert f"error: {said}" in early_error(*given)
    (tmp_path / "served.json").write_text('{"version": 1, "ada')
    assert "state file served.json cannot be used, as it is no JSON" in early_error(*loads)


@pytest.fixture
def short():
    """A short folder, as paths of Unix sockets have at most 107 characters."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_a_unix_socket_is_served_taken_over_and_removed(short):
    path = short / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # of a server that was killed
    with serving(unix_socket=str(path), rate=1, burst=1, trusted_proxies=("unix",)) as server:
        assert path.is_socket()
        assert server.client.get("/health").json() == {"status": "ok"}
        found = [
            server.client.get("/v1/models", headers=headers).status_code
            for headers in ({}, {}, {"x-forwarded-for": "203.0.113.9"})
        ]
        assert found == [200, 429, 200]
        with pytest.raises(SettingsError, match="Address already in use"):
            bind(settings(unix_socket=str(path)))
    bind(settings(unix_socket=str(path)))[0].close()  # the file that is left is taken over


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("file", "Address already in use"), ("", "Address already in use"),
        ("no/s", "No such file"), ("x" * 150, "too long"), ("x" * 300, "too long"),
    ],
)  # fmt: skip
def test_unix_sockets_that_cannot_be(short, name, said):
    (short / "file").write_text("kept")
    with pytest.raises(
        SettingsError, match=rf"unix_socket .* cannot be used \(.*{said}\)?.*: name"
    ):
        bind(settings(unix_socket=str(short / name)))
    assert (short / "file").read_text() == "kept"
