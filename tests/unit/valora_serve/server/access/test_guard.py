"""Who is let in before the body is read: keys, rates, and hosts and origins without keys."""

import httpx
import pytest
from starlette.datastructures import Headers

from tests.support.http_helpers import CHAT, ask, chat, head, refused, serving, talk
from valora_serve.errors import ForbiddenError, RequestError
from valora_serve.server.access import keys
from valora_serve.server.access.guard import Sites
from valora_serve.server.access.keys import hashed, read_keys
from valora_serve.server.settings import ServerSettings
from valora_serve.server.telemetry import logs


def test_every_route_under_v1_asks_for_a_key(keys_file):
    with serving(keys_file=str(keys_file[0])) as server:
        for path in ("/v1/models", "/v1/models/tiny", "/v1/status"):
            assert server.client.get(path).status_code == 401, path
        for path in (CHAT, "/v1/completions", "/v1/vision/person"):
            assert server.client.post(path, json={}).status_code == 401, path
        for path in ("/health", "/ready", "/version", "/metrics", "/", "/openapi.json", "/docs",
                     "/console/app.js", "/console/docs/swagger-ui.css"):  # fmt: skip
            assert server.client.get(path).status_code == 200, path
        # No spelling of a path leads around.
        for path in ("//v1/models", "/v1//models", "/v1/models/", "/V1/models", "/%76%31/models",
                     "/console/../v1/models"):  # fmt: skip
            raw = httpx.Request("GET", server.url + path)
            raw.url = raw.url.copy_with(raw_path=path.encode())
            assert server.client.send(raw).status_code in (401, 404), path


def test_metrics_can_be_protected_and_a_stranger_costs_no_body(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), protect_metrics=True) as server:
        for headers, status in (({}, 401), ({"authorization": f"Bearer {secrets['app']}"}, 200)):
            assert server.client.get("/metrics", headers=headers).status_code == status
        assert b" 401 " in talk(server, head(1000000) + b"{")


def test_each_key_has_its_rate(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file), rate=6, burst=2) as server:
        assert [ask(server, secrets["app"]).status_code for _ in range(3)] == [200, 200, 429]
        answer = ask(server, secrets["app"])
        assert 1 <= int(answer.headers["retry-after"]) <= 10
        assert refused(answer, 429) == "rate_limit_exceeded"
        assert ask(server, secrets["ops"]).status_code == 200
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("trusted", "forwarded", "counted"),
    [
        ([], ["203.0.113.9"], "127.0.0.1"), (["192.0.2.1"], ["203.0.113.9"], "127.0.0.1"),
        (["127.0.0.1"], ["198.51.100.7, 203.0.113.9"], "203.0.113.9"),
        (["127.0.0.1"], ["198.51.100.7", "203.0.113.9"], "203.0.113.9"),
        (["127.0.0.0/8", "10.0.0.0/8"], ["198.51.100.7, 203.0.113.9:80, 10.1.2.3"], "203.0.113.9"),
    ],
)  # fmt: skip
def test_the_address_that_counts_is_the_last_one_that_is_no_trusted_proxy(
    monkeypatch, trusted, forwarded, counted
):
    logged = []
    monkeypatch.setattr(logs.ACCESS, "info", lambda _, extra: logged.append(extra["facts"]))
    with serving(rate=1, burst=1, trusted_proxies=tuple(trusted)) as server:

        def status(*more):
            headers = [("x-forwarded-for", value) for value in [*more, *forwarded]]
            headers += [("forwarded", "for=192.0.2.60"), ("x-real-ip", "192.0.2.61")]
            return server.client.get("/v1/models", headers=headers).status_code

        assert status() == 200
        assert status("192.0.2.77") == 429 or not forwarded  # of the client's own making
    assert logged[0]["client"] == counted


def test_addresses_of_a_network_share_a_rate():
    with serving(rate=1, burst=1, trusted_proxies=("127.0.0.1",)) as server:
        found = [
            server.client.get("/v1/models", headers={"x-forwarded-for": address}).status_code
            for address in ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1",
                            "::ffff:192.0.2.1", "::ffff:192.0.2.2", "192.0.2.2")  # IPv4, in IPv6
        ]  # fmt: skip
        assert found == [200, 429, 200, 200, 200, 429]


def test_every_known_key_is_let_in_and_no_other(keys_file):
    file, secrets = keys_file
    with serving(keys_file=str(file)) as server:
        for secret in secrets.values():
            assert ask(server, secret).status_code == 200
        stored = hashed(secrets["app"])
        wrong = ("x", secrets["app"][:-1], secrets["app"] + "x", stored, "é", "\udc80")
        for header in (
            *(f"Bearer {one}" for one in wrong), "", "Bearer", f"Basic {secrets['app']}",
            secrets["app"],
        ):  # fmt: skip
            headers = {"authorization": header.encode("utf-8", "surrogateescape")}
            answer = server.client.post(CHAT, json=chat(), headers=headers)
            assert refused(answer, 401) == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"


def test_keys_are_kept_as_hashes(keys_file):
    file, secrets = keys_file
    text = file.read_text()
    for key, secret in zip(read_keys(file), secrets.values(), strict=True):
        assert secret not in text
        assert key.sha256 == hashed(secret)
    assert "an-api-key-in-the-clear" not in repr(ServerSettings(api_key="an-api-key-in-the-clear"))


def test_keys_are_rotated_without_a_restart(keys_file, monkeypatch):
    monkeypatch.setattr(keys, "LOOK_SECONDS", 0.0)
    file, secrets = keys_file
    before = file.read_text()
    secret, line = keys.new_key("new", "user")
    with serving(keys_file=str(file)) as server:

        def statuses(content):
            """Of what is asked without a key, with the new and an old one, under this file."""
            file.write_text(content)
            return [ask(server, key).status_code for key in (None, secret, secrets["app"])]

        assert statuses(f"{before}\n{line}\n") == [401, 200, 200]
        assert statuses(f"{line}\n") == [401, 200, 401]  # the others are withdrawn
        for damage in ("", "# nothing\n", "name root x\n"):  # never open, and nobody locked out
            assert statuses(damage) == [401, 200, 401]
        file.unlink()
        assert ask(server, secret).status_code == 200
        assert statuses(before) == [401, 401, 200]


def checked(sites, host="localhost", method="POST", **headers):
    scope = {"method": method, "http_version": "1.1", "server": ("127.0.0.1", 8000)}
    sent = Headers({"host": host, **{n.replace("_", "-"): text for n, text in headers.items()}})
    try:
        sites.check(scope, sent, any_host=False)
    except (ForbiddenError, RequestError) as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("bound", "allowed", "host", "status"),
    [
        *(("127.0.0.1", (), host, None) for host in (
            "localhost", "LocalHost:8000", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9",
            "[::1]", "[::1]:80",
        )),
        *(("127.0.0.1", (), host, 403) for host in (
            "evil.example", "evil.example:8000", "localhost.evil.example", "10.1.2.3",
            "127.0.0.1.nip.io", "0x7f000001", "2130706433", "[::2]",
        )),
        *(("127.0.0.1", (), host, 400) for host in (
            "evil.example#localhost", "localhost@evil.example", "", "a b", "localhost/x", "[::1",
            "::1",
        )),
        ("0.0.0.0", (), "192.168.7.3:8000", None), ("0.0.0.0", (), "evil.example", 403),
        ("gpu.example", (), "gpu.example", None), ("0.0.0.0", ("*",), "evil.example", None),
        ("0.0.0.0", ("api.example",), "API.example:443", None),
    ],
)  # fmt: skip
def test_hosts(bound, allowed, host, status):
    for method in ("POST", "GET"):
        assert checked(Sites(bound, allowed, ()), host, method) == status


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
    assert checked(sites, "localhost:8000", **headers) == status
    assert checked(sites, "localhost:8000", "GET", **headers) is None
    allowed = Sites("127.0.0.1", (), ("https://evil.example/", "null"))
    fine = headers.get("origin") in ("https://evil.example", "null")
    assert checked(allowed, "localhost:8000", **headers) == (None if fine else status)


def test_pages_of_other_sites_are_refused_unless_there_are_keys_or_they_are_allowed():
    foreign = {"origin": "https://evil.example"}
    with serving() as server:
        for headers in (foreign, {"host": "evil.example"}):
            answer = server.client.post(CHAT, json=chat(), headers=headers)
            refused(answer, 403, "evil.example")
            assert "access-control-allow-origin" not in answer.headers
        for path, status in (("/v1/models", 403), ("/", 403), ("/health", 200)):
            answer = server.client.get(path, headers={"host": "evil.example"})
            assert answer.status_code == status
        assert server.client.post(CHAT, json=chat()).status_code == 200
    key = "a key for the tests"
    with serving(api_key=key) as server:
        sent = foreign | {"authorization": f"Bearer {key}", "host": "evil.example"}
        assert server.client.post(CHAT, json=chat(), headers=sent).status_code == 200
    with serving(allowed_origins=("https://Evil.example/",)) as server:
        answer = server.client.post(CHAT, json=chat(), headers=foreign)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://evil.example"
        asked = foreign | {"access-control-request-method": "POST",
                           "access-control-request-headers": "content-type"}  # fmt: skip
        assert server.client.options(CHAT, headers=asked).status_code == 200
