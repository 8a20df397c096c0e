"""A keys file with a user's and an admin's key."""

import pytest

from valora_serve.server.access.keys import new_key


@pytest.fixture
def keys_file(tmp_path):
    secrets = {}
    lines = ["# who may ask", ""]
    for name, role in (("app", "user"), ("ops", "admin")):
        secrets[name], line = new_key(name, role)
        lines.append(line + "  # made today")
    file = tmp_path / "keys"
    file.write_text("\n".join(lines))
    return file, secrets
