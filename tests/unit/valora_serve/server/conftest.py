"""A server with the default settings, which no request changes; and keys."""

import pytest

from tests.support.http_helpers import serving
from valora_serve.server.access.keys import new_key


@pytest.fixture(scope="module")
def plain():
    with serving() as server:
        yield server


@pytest.fixture
def keys_file(tmp_path):
    """A file with the keys of a user and an administrator, and the keys by name."""
    secrets = {}
    lines = ["# who may ask", ""]
    for name, role in (("app", "user"), ("ops", "admin")):
        secrets[name], line = new_key(name, role)
        lines.append(line + "  # made today")
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return file, secrets
