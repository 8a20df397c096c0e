"""API keys: which are accepted, and how they are stored."""

from tests.support.http_helpers import CHAT, ask, chat, serving
from valora_serve.server.access.keys import hashed, read_keys
from valora_serve.server.settings import ServerSettings


def test_every_known_key_is_let_in_and_no_other(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file)) as server:
        for secret in secrets.values():
            assert ask(server, secret).status_code == 200
        stored = hashed(secrets["app"])
        for wrong in ("x", secrets["app"][:-1], secrets["app"] + "x", stored, "é", "\udc80"):
            headers = {"authorization": f"Bearer {wrong}".encode("utf-8", "surrogateescape")}
            answer = server.client.post(CHAT, json=chat(), headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for header in ("", "Bearer", f"Basic {secrets['app']}", secrets["app"]):
            headers = {"authorization": header}
            assert server.client.post(CHAT, json=chat(), headers=headers).status_code == 401


def test_keys_are_kept_as_hashes(keys_file):
    file, secrets = keys_file
    text = file.read_text()
    for key, secret in zip(read_keys(file), secrets.values(), strict=True):
        assert secret not in text
        assert key.sha256 == hashed(secret)
    assert "an-api-key-in-the-clear" not in repr(ServerSettings(api_key="an-api-key-in-the-clear"))


def test_keys_are_rotated_without_a_restart(keys_file, monkeypatch):
    from valora_serve.server.access import keys

    monkeypatch.setattr(keys, "LOOK_SECONDS", 0.0)
    file, secrets = keys_file
    before = file.read_text()
    with serving(keys_file=str(file)) as server:
        secret, line = keys.new_key("new", "user")
        file.write_text(f"{before}\n{line}\n")
        assert ask(server, secret).status_code == 200
        assert ask(server, secrets["app"]).status_code == 200
        file.write_text(f"{line}\n")  # the others are withdrawn
        assert ask(server, secrets["app"]).status_code == 401
        assert ask(server, secret).status_code == 200
        for damage in ("", "# nothing\n", "name root x\n"):  # never open, and nobody locked out
            file.write_text(damage)
            assert server.client.post(CHAT, json=chat()).status_code == 401
            assert ask(server, secret).status_code == 200
        file.unlink()
        assert ask(server, secret).status_code == 200
        file.write_text(before)
        assert ask(server, secrets["app"]).status_code == 200
        assert ask(server, secret).status_code == 401
