"""Fronts: where requests go, what is passed on, and what clients see when replicas die."""

import asyncio
import contextlib
import json
from dataclasses import replace

import httpx
import pytest
from starlette.requests import Request

from tests.support.replicas import awaited, report
from valora_serve.replicas.front import Front, merge, named
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.server.app import make_server
from valora_serve.server.listen import bind
from valora_serve.server.middleware import Middleware
from valora_serve.server.settings import ServerSettings

KEY = "a-key-of-these-tests"


class Replica:
    """HTTP that answers with what a test wants, `None` for a connection that breaks."""

    def __init__(self, *answers):
        self.answers, self.heads, self.bodies = list(answers), [], []

    async def connected(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(line.split(": ", 1) for line in head.splitlines()[1:-1])
                lines = {name.lower(): value for name, value in lines.items()}
                self.heads.append((head.splitlines()[0], lines))
                self.bodies.append(await reader.readexactly(int(lines.get("content-length", 0))))
                answer = self.answers.pop(0) if self.answers else None
                if callable(answer):
                    answer = answer()
                if isinstance(answer, bytes):
                    writer.write(answer)
                    await writer.drain()
                if answer is None or b"chunked" in answer:
                    break
        writer.transport.abort()


def answer(body=b'{"fine":1}', *headers):
    lines = [b"HTTP/1.1 200 OK", b"content-length: %d" % len(body), *headers, b"", body]
    return b"\r\n".join(lines)


@contextlib.asynccontextmanager
async def fronted(*replicas, **settings):
    servers, reports = [], []
    for number, one in enumerate(replicas):
        url = "http://127.0.0.1:1"  # nobody listens
        if one is not None:
            servers.append(await asyncio.start_server(one.connected, "127.0.0.1", 0))
            url = f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}"
        reports.append(report(f"r{number}", url, adapters={"tiny": None, "car": "a"}))
    made = ServerSettings(port=0, api_key=KEY, **settings)
    front = Front(made, ReplicaSettings(replicas=2, router="affinity"), 4)
    front.update(reports)
    server, sockets = make_server(Middleware(front, made), made), bind(made)
    server.config.lifespan = "off"
    serving = asyncio.create_task(server.serve(sockets))
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        while not server.started:
            await asyncio.sleep(0.01)
        yield client, front
    server.should_exit = True
    await serving
    await front._client.close()
    for one in servers:
        one.close()


async def idle(front):
    while sum(one.load for one in front._replicas.values()):
        await asyncio.sleep(0.01)


@awaited
async def test_requests_and_answers_are_passed_on_as_they_are():
    one = Replica(answer(b"{ }", b"x-request-id: its", b'x-valora-front: [0, {"key": "me"}]'))
    async with fronted(one) as (client, _):
        sent = {"authorization": f"Bearer {KEY}", "x-valora-front": "mine", "te": "x",
                "content-type": "application/json", "host": "valora.example",
                "x-request-id": "abc"}  # fmt: skip
        got = await client.post("/v1/a%20b?c=%2F", content=b'{"model":"x"}', headers=sent)
        assert (got.status_code, got.content) == (200, b"{ }")
        assert got.headers["x-request-id"] == "abc" and "x-valora-front" not in got.headers
    ((line, headers),) = one.heads
    assert line == "POST /v1/a%20b?c=%2F HTTP/1.1"
    assert one.bodies == [b'{"model":"x"}']
    for name in ("host", "authorization", "x-request-id"):
        assert headers[name] == sent[name]
    assert "te" not in headers
    secret, told = headers["x-valora-front"].split("secret ")
    told = json.loads(told)
    assert (secret, told["scheme"]) == ("its ", "http")
    assert told["client"][0] == told["server"][0] == "127.0.0.1"
    assert told["state"] == {"counts": True, "facts": {}}


@awaited
async def test_what_a_client_asks_for_names_no_other_host():
    one, other = Replica(*[answer()] * 5), Replica()
    async with fronted(one) as (client, _), fronted(other) as (elsewhere, _):
        there = f"@127.0.0.1:{elsewhere.base_url.port}/"
        for target in (there, "*", "http://a/b", "?c", "//d"):
            got = await client.get("/", extensions={"target": target.encode()})
            assert got.status_code == 200, target
    asked = [line.split()[1] for line, _ in one.heads]
    assert (asked, other.heads) == ([f"/{there}", "/*", "/http://a/b", "/?c", "//d"], [])


@awaited
async def test_a_request_goes_to_another_replica_if_its_own_has_died():
    dies, lives = Replica(), Replica(answer(), answer())
    async with fronted(dies, lives, None) as (client, front):
        known = [one.report for one in front._replicas.values()]
        dies.answers = 2 * [lambda: front.update([replace(one, taken={"x": 1}) for one in known])]
        for model in "ab":
            front._replicas["r0"].recent[model] = None  # it is asked first
            assert (await client.post("/v1/x", json={"model": model})).status_code == 200
        await idle(front)
    assert [len(one.heads) for one in (dies, lives)] == [2, 2], "though reports came meanwhile"
    async with fronted(Replica(None, None)) as (client, _):
        lost = await client.get("/v1/models")
        assert lost.status_code == 503 and "ask again" in lost.text
    async with fronted(None, None) as (client, front):
        front._ask = lambda *a, ask=front._ask, **more: front.update([]) or ask(*a, **more)
        assert "No replica answers" in (await client.get("/metrics")).text
        assert (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
@awaited
async def test_an_answer_that_breaks_off_ends_with_an_error(kind):
    begun = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
    begun += f"content-type: {kind}\r\n\r\n".encode()
    one, other = Replica(begun + b"6\r\ndata: \r\n"), Replica(answer())
    async with fronted(one) as (client, front):
        text = b""
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with client.stream("GET", "/v1/x") as got:
                async for piece in got.aiter_raw():
                    text += piece
        if kind == "text/event-stream":
            *_, event, done = [part for part in text.split(b"\n\n") if part]
            assert done == b"data: [DONE]"
            assert "ask again" in json.loads(event[6:])["error"]["message"]
        else:
            assert text == b"data: ", "and the connection is closed"
        assert not other.heads
        await idle(front)


@awaited
async def test_large_bodies_are_read_for_known_keys_only():
    one = Replica(answer(), answer())
    async with fronted(one, max_body_bytes=200_000) as (client, _):
        large = b"x" * 100_000
        assert (await client.post("/v1/x", content=large)).status_code == 401
        key = {"authorization": f"Bearer {KEY}"}
        assert (await client.post("/v1/x", content=large, headers=key)).status_code == 200
        assert (await client.post("/v1/x", content=3 * large, headers=key)).status_code == 413
        assert (await client.post("/v1/x", content=b"small")).status_code == 200
    assert [len(body) for body in one.bodies] == [100_000, 5]


@awaited
async def test_an_adapter_has_its_replicas_and_load_counts():
    front = Front(ServerSettings(), ReplicaSettings(replicas=2), 4)
    names = {"tiny": None, "car": "a"}
    front.update([report("x", adapters=names, adapters_resident=("a",)),
                  report("y", adapters=names, load=3, adapters_resident=("b",)),
                  ])  # fmt: skip
    for model, adapter, replica in (("car", "a", "x"), ("a", "a", "x"), ("b", "b", "y")):
        assert front._ranked(model)[0].id == replica
        assert adapter in front._replicas[replica].recent
    assert front._ranked("tiny")[0].id == "x", "it has the least load"
    assert front._ranked(None)[0].id == "x"
    front._replicas["x"].load += 9  # since the last report
    assert [one.id for one in front._ranked(None)] == ["y", "x"]
    await front._client.close()


@awaited
async def test_answers_tell_a_newer_load_than_reports():
    one = Replica(answer(b"{}", b"x-valora-front: [7, {}]"), answer())
    async with fronted(one) as (client, front):
        known = front._replicas["r0"]
        reports = [replace(known.report, load=2)]
        assert "x-valora-front" not in (await client.get("/ready")).headers
        while known.load == 7:
            await asyncio.sleep(0.01)
        for load in (6, 2):  # without this request, which has ended; then the report's
            front.update(reports)
            assert known.load == load
        await client.get("/ready")  # an answer that does not tell it
        front.update(reports)
        assert known.load == 2


@pytest.mark.parametrize(
    ("path", "headers", "body", "name"),
    [
        ("/v1/chat/completions", {}, b'{"model": "a"}', "a"),
        ("/v1/x", {}, rb'{"messages": [{"content": "\"model\": \"b\""}], "model":"\u00e9"}', "é"),
        ("/v1/x", {"X-Valora-Model": "c"}, b'{"model": "a"}', "c"),
        ("/v1/vision/plates", {}, b"--form", "plates"), ("/v1/vision", {}, b"--form", None),
        ("/valora/v1/vision/plates", {}, b"", "plates"), ("/v1/vision/a/b", {}, b"", "a/b"),
        ("/v1/vision", {}, b' {"domains": ["d", "e"]}', "d"),
        ("/v1/x", {}, b'{"model": 3}', None), ("/v1/x", {}, b"", None),
        ("/v1/x", {}, rb'{"model": "\q"}', None),
        pytest.param("/v1/x", {}, b'{"model": ' + b" " * 10**6 + b"3}", None, id="for hours once"),
    ],
)  # fmt: skip
def test_where_the_model_is_named(path, headers, body, name):
    raw = [(key.lower().encode(), value.encode()) for key, value in headers.items()]
    request = Request({"type": "http", "path": path, "headers": raw, "server": ("h", 1),
                       "scheme": "http", "query_string": b""})  # fmt: skip
    assert named(request, body) == name


@pytest.mark.parametrize(
    ("method", "path", "one", "two", "found"),
    [
        ("GET", "/v1/models", [("t", None), ("a", "host"), ("b", "disk")],
         [("t", None), ("a", "device"), ("c", "host")],
         {"t": None, "a": "device", "b": "disk", "c": "host"}),
        ("GET", "/v1/models/c", 404, 200, 200), ("GET", "/v1/models/c", 404, 404, 404),
        ("POST", "/v1/unload_lora_adapter", 404, 200, 200),
        ("POST", "/v1/unload_lora_adapter", 200, 500, 500),
        ("POST", "/v1/unload_lora_adapter", 429, 200, 429),
    ],
)  # fmt: skip
@awaited
async def test_what_each_replica_has_loaded_on_request(method, path, one, two, found):
    def page(said):
        if isinstance(said, int):
            return answer().replace(b"200 OK", b"%d So" % said)
        data = [{"id": name, "state": state} for name, state in said]
        return answer(json.dumps({"object": "list", "data": data}).encode())

    replicas = Replica(page(one)), Replica(page(two))
    async with fronted(*replicas, None) as (client, _):
        got = await client.request(method, path, content=b"x" * (method == "POST"))
    if isinstance(found, int):
        assert got.status_code == found
    else:
        assert {model["id"]: model["state"] for model in got.json()["data"]} == found
    assert [one.bodies for one in replicas] == [[b"x" * (method == "POST")]] * 2
    told = [one.heads[0][1]["x-valora-front"].split("secret ")[1] for one in replicas]
    assert [json.loads(one)["state"]["counts"] for one in told] == [True, False], "counted once"


@awaited
async def test_a_replica_that_hangs_is_left_out_of_pages_of_all(monkeypatch):
    monkeypatch.setattr("valora_serve.replicas.front.JOIN_SECONDS", 0.2)
    page = answer(b"# HELP a A.\n# TYPE a counter\na 1\n")
    async with fronted(Replica(page), Replica(b"")) as (client, _):
        said = await client.get("/metrics")
    assert said.status_code == 200 and 'a{replica="r0",} 1' in said.text


def test_metrics_of_all_replicas_are_one_page():
    lines = [
        "# HELP a A.", "# TYPE a counter", 'a{{x="1"}} {0}', "a {0}", "# HELP valora_replicas R.",
        "valora_replicas 2", "",
    ]  # fmt: skip
    page = "\n".join(lines)
    pages = {"x": page.format(1).encode(), "y": page.format(2).encode()}
    assert merge(pages).decode().splitlines() == [
        "# HELP a A.", "# TYPE a counter", 'a{replica="x",x="1"} 1', 'a{replica="x",} 1',
        'a{replica="y",x="1"} 2', 'a{replica="y",} 2', "# HELP valora_replicas R.",
        "valora_replicas 2",
    ]  # fmt: skip
