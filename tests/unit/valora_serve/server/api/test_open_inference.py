"""``/v2``, which is no longer served, and what replaces its readiness."""

from tests.support.http_helpers import serving
from valora_serve.server.access.keys import new_key


def test_every_request_below_it_is_told_what_to_use(tmp_path):
    (tmp_path / "keys").write_text(new_key("app", "user")[1])
    with serving(keys_file=str(tmp_path / "keys")) as server:
        for method, path, content in (
            ("GET", "/v2", b""), ("GET", "/v2/", b""), ("HEAD", "/v2/health/ready", b""),
            ("GET", "/v2/models/person/versions/1/ready", b""), ("DELETE", "/v2/models/x", b""),
            ("POST", "/v2/repository/index", b""),
            ("POST", "/v2/models/person/infer", bytes(2**20)),
        ):  # fmt: skip
            headers = {"host": "10.0.0.9", "content-type": "application/octet-stream"}
            answer = server.client.request(method, path, content=content, headers=headers)
            assert answer.status_code == 410, (method, path, answer.text)
            if method != "HEAD":
                error = answer.json()["error"]
                assert "/v1/vision/{domain}" in error["message"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "gone")
        assert not server.engine.asked
        assert server.client.get("/v2x").status_code == 404
