"""Keys and rate limits are checked on every route, before the body is read."""

import httpx

from tests.support.http_helpers import (
    CHAT,
    ask,
    serving,
    talk,
)


def test_every_route_under_v1_asks_for_a_key(keys_file):
    with serving(keys_file=str(keys_file[0])) as server:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/status", "/v1/unknown"):
            assert server.client.get(path).status_code == 401, path
        for path in (CHAT, "/v1/completions", "/v1/vision/person"):
            assert server.client.post(path, json={}).status_code == 401, path
        for path in ("/health", "/ready", "/version", "/metrics", "/", "/openapi.json"):
            assert server.client.get(path).status_code == 200, path
        # No spelling of a path leads around.
        for path in ("//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/%76%31/models",
                     "/console/../v1/models"):  # fmt: skip
            raw = httpx.Request("GET", server.url + path)
            raw.url = raw.url.copy_with(raw_path=path.encode())
            assert server.client.send(raw).status_code in (401, 404), path


def test_metrics_can_be_protected(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), protect_metrics=True) as server:
        assert server.client.get("/metrics").status_code == 401
        headers = {"authorization": f"Bearer {secrets['app']}"}
        assert server.client.get("/metrics", headers=headers).status_code == 200


def test_a_stranger_costs_no_body(keys_file):
    """The key is checked before the body is read."""
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with serving(keys_file=str(keys_file[0])) as server:
        assert b" 401 " in talk(server, f"{head}content-length: 1000000\r\n\r\n{{".encode())


def test_each_key_has_its_rate(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), rate=6, burst=2) as server:
        assert [ask(server, secrets["app"]).status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(server, secrets["app"])
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert ask(server, secrets["ops"]).status_code == 200
        assert server.client.get("/health").status_code == 200
