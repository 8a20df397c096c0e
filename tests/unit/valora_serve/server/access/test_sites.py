"""Hosts and origins of requests to a server without keys."""

import pytest
from starlette.datastructures import Headers

from tests.support.http_helpers import CHAT, chat, serving
from valora_serve.errors import ForbiddenError, RequestError
from valora_serve.server.access.guard import Sites


def refused(sites, host="localhost", method="POST", **headers):
    scope = {"method": method, "http_version": "1.1", "server": ("127.0.0.1", 8000)}
    sent = Headers({"host": host, **{n.replace("_", "-"): text for n, text in headers.items()}})
    try:
        sites.check(scope, sent, any_host=False)
    except (ForbiddenError, RequestError) as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", None), ("LocalHost:8000", None), ("localhost.", None), ("127.0.0.1", None),
        ("127.0.0.1:8000", None), ("127.9.9.9", None), ("[::1]", None), ("[::1]:80", None),
        ("evil.example", 403), ("evil.example:8000", 403), ("localhost.evil.example", 403),
        ("evil.example#localhost", 400), ("localhost@evil.example", 400), ("10.1.2.3", 403),
        ("127.0.0.1.nip.io", 403), ("0x7f000001", 403), ("2130706433", 403), ("[::2]", 403),
        ("", 400), ("a b", 400), ("localhost/x", 400), ("[::1", 400), ("::1", 400),
    ],
)  # fmt: skip
def test_hosts_of_a_server_on_localhost(host, status):
    assert refused(Sites("127.0.0.1", (), ()), host) == status
    assert refused(Sites("127.0.0.1", (), ()), host, "GET") == status


def test_hosts_of_a_server_for_others():
    assert refused(Sites("0.0.0.0", (), ()), "192.168.7.3:8000") is None
    assert refused(Sites("0.0.0.0", (), ()), "evil.example") == 403
    assert refused(Sites("gpu.example", (), ()), "gpu.example") is None
    assert refused(Sites("0.0.0.0", ("api.example",), ()), "API.example:443") is None
    assert refused(Sites("0.0.0.0", ("*",), ()), "evil.example") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, None), ({"origin": "http://localhost:8000"}, None),
        ({"origin": "http://localhost:8000", "sec_fetch_site": "same-origin"}, None),
        ({"origin": "https://evil.example"}, 403), ({"origin": "null"}, 403),
        ({"origin": "http://localhost:3000"}, 403), ({"origin": "http://localhost"}, 403),
        ({"origin": "file://localhost:8000"}, 403),
        ({"origin": "http://localhost:8000.evil.example"}, 403), ({"origin": "http://[evil"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403), ({"sec_fetch_site": "same-site"}, 403),
        ({"sec_fetch_site": "none"}, None),
    ],
)  # fmt: skip
def test_origins(headers, status):
    sites = Sites("127.0.0.1", (), ())
    assert refused(sites, "localhost:8000", **headers) == status
    assert refused(sites, "localhost:8000", "GET", **headers) is None
    allowed = Sites("127.0.0.1", (), ("https://evil.example/", "null"))
    fine = headers.get("origin") in ("https://evil.example", "null")
    assert refused(allowed, "localhost:8000", **headers) == (None if fine else status)


def test_pages_of_other_sites_are_refused_unless_there_are_keys_or_they_are_allowed():
    foreign = {"origin": "https://evil.example"}
    with serving() as server:
        for headers in (foreign, {"host": "evil.example"}):
            answer = server.client.post(CHAT, json=chat(), headers=headers)
            assert answer.status_code == 403
            assert "evil.example" in answer.json()["error"]["message"]
            assert "access-control-allow-origin" not in answer.headers
        assert server.client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert server.client.get("/", headers={"host": "evil.example"}).status_code == 403
        assert server.client.get("/health", headers={"host": "evil.example"}).status_code == 200
        assert server.client.post(CHAT, json=chat()).status_code == 200
    key = "a key for the tests"
    with serving(api_key=key) as server:
        sent = foreign | {"authorization": f"Bearer {key}", "host": "evil.example"}
        assert server.client.post(CHAT, json=chat(), headers=sent).status_code == 200
    with serving(allowed_origins=("https://evil.example",)) as server:
        answer = server.client.post(CHAT, json=chat(), headers=foreign)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://evil.example"
        asked = foreign | {"access-control-request-method": "POST",
                           "access-control-request-headers": "content-type"}  # fmt: skip
        assert server.client.options(CHAT, headers=asked).status_code == 200
