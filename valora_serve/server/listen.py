"""Sockets and certificates of the server, checked before a model is loaded."""

from __future__ import annotations

import ctypes
import errno
import socket
import ssl
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from valora_serve.errors import SettingsError

if TYPE_CHECKING:
    from valora_serve.server.settings import ServerSettings

_SO_ATTACH_FILTER = 26  # of Linux's asm-generic/socket.h; Python's socket has no name for it
# A filter of Linux for received TCP segments, as (code, jt, jf, k) of linux/filter.h: drop those
# with the flag SYN, which ask for a new connection, and keep all others.
_NO_SYN = (
    (0x30, 0, 0, 13),  # load byte 13 of the TCP header, its flags
    (0x45, 0, 1, 0x02),  # SYN?
    (0x06, 0, 0, 0),  # yes: keep 0 bytes
    (0x06, 0, 0, 0xFFFFFFFF),  # no: keep all
)


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Bind the server's address, without listening yet: clients are refused until it serves.

    Those of a Unix socket wait.

    Returns:
        A socket for each address that the host stands for.

    Raises:
        SettingsError: The host is unknown, or the port or Unix socket cannot be used; the message
            says why.
    """
    if settings.unix_socket is not None:
        return [_bind_unix(Path(settings.unix_socket).absolute())]
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"host {host} is not known: name an address of this machine, e.g. 127.0.0.1"
        ) from error
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            sock = _made(family, kind, protocol)
            if sock is None:
                continue
            bound.append(sock)
            # With port 0, all addresses get the port that the first one got.
            chosen = port or (bound[0].getsockname()[1] if len(bound) > 1 else 0)
            sock.bind((address[0], chosen, *address[2:]))
            # Linux lets two sockets that may share an address bind it until one listens.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        for sock in bound:
            sock.close()
        _explain(error, host, port)
    if not bound:
        raise SettingsError(f"host {host} has no address that this machine supports: name another")
    return bound


def ready(sockets: list[socket.socket]) -> list[socket.socket]:
    """The sockets, ready to listen, also beside connections of a former server that linger."""
    for sock in sockets:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return sockets


def take_no_more(sock: socket.socket) -> None:
    """Let a listening socket keep the connections that wait in its queue, and take no more.

    On Linux, clients that come now get no answer: they ask again after a second, and are refused,
    or served by the next server, once this socket is closed. Connections that are being opened
    still reach the queue. Elsewhere the queue becomes as short as the system allows. The file of a
    Unix socket is removed.
    """
    if sock.family == socket.AF_UNIX:
        Path(sock.getsockname()).unlink(missing_ok=True)
    elif sys.platform != "linux" or not _attach(sock, _NO_SYN):
        sock.listen(0)


def check_certificate(settings: ServerSettings) -> None:
    """Check the files of tls_cert and tls_key.

    Raises:
        SettingsError: A file is missing, is no PEM, needs a password, or the two do not match.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return
    for name, file in (("tls_cert", settings.tls_cert), ("tls_key", settings.tls_key)):
        try:
            Path(file).read_bytes()
        except OSError as error:
            raise SettingsError(
                f"{name} {file} cannot be read ({error.strerror}): name a PEM file"
            ) from error

    def asked() -> NoReturn:
        raise SettingsError(f"tls_key {settings.tls_key} needs a password: name a key without one")

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key, password=asked
        )
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} are no certificate and "
            "its private key: name two PEM files that belong together"
        ) from error


def _attach(sock: socket.socket, steps: tuple[tuple[int, int, int, int], ...]) -> bool:
    """Attach a filter of Linux to a socket; False where there are none, as in some sandboxes."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HP", len(steps), ctypes.addressof(code))
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    except OSError:
        return False
    return True


def _made(family: int, kind: int, protocol: int) -> socket.socket | None:
    try:
        sock = socket.socket(family, kind, protocol)
    except OSError:  # e.g. IPv6 where the kernel has none
        return None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.setblocking(False)
    return sock


def _bind_unix(path: Path) -> socket.socket:
    """Bind a Unix socket, and listen, so that a second server can tell it from a former one's."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    try:
        if path.is_socket() and sock.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
        sock.bind(str(path))
        sock.listen()
    except OSError as error:
        sock.close()
        raise SettingsError(
            f"unix_socket {path} cannot be used ({error.strerror or error}): name a short, free "
            "path in a folder that this user may write to"
        ) from error
    return sock


def _explain(error: OSError, host: str, port: int) -> NoReturn:
    if error.errno == errno.EADDRINUSE:
        said = f"port {port} of {host} is in use: stop what uses it, or choose another with --port"
    elif error.errno in (errno.EACCES, errno.EPERM):
        said = f"port {port} needs more rights than this user has: choose one from 1024"
    elif error.errno == errno.EADDRNOTAVAIL:
        said = f"host {host} is no address of this machine: name one that is, or 0.0.0.0 for all"
    else:
        said = f"host {host} and port {port} cannot be listened on ({error.strerror}): name others"
    raise SettingsError(said) from error
