"""Sockets and certificates of the server, checked before a model is loaded."""

import errno
import socket
import ssl
from pathlib import Path

from valora_serve.errors import SettingsError
from valora_serve.server.settings import ServerSettings

_REMEDIES = {
    errno.EADDRINUSE: "stop what uses it, or choose another with --port",
    errno.EACCES: "choose a port from 1024",
    errno.EADDRNOTAVAIL: "name an address of this machine, or 0.0.0.0 for all",
}


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Bind the server's address, without listening yet: clients are refused until it serves."""
    if settings.unix_socket is not None:
        return [_bind_unix(Path(settings.unix_socket).absolute())]
    host, port = settings.host, settings.port
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:  # IPv6 where the kernel has none
                continue
            bound.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Connections inherit it: those whose client reads nothing end by it.
            milliseconds = int(min(1000 * settings.send_seconds, 2**31 - 1))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            # With port 0, all addresses get the port that the first one got.
            chosen = port or (bound[0].getsockname()[1] if len(bound) > 1 else 0)
            sock.bind((address[0], chosen, *address[2:]))
    except (OSError, UnicodeError) as error:
        for sock in bound:
            sock.close()
        remedy = _REMEDIES.get(getattr(error, "errno", None) or 0, "name others")
        said = getattr(error, "strerror", None) or error
        raise SettingsError(f"host {host}, port {port}: {said}: {remedy}") from error
    if not bound:
        raise SettingsError(f"host {host}: this machine has no such kind of address: name another")
    return bound


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


def check_certificate(settings: ServerSettings) -> None:
    """Check the files of tls_cert and tls_key."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} are no certificate and "
            f"its private key ({error}): name two PEM files that belong together, the key without "
            "a password"
        ) from error
