"""Endpoints of other packages: served, documented and closed unless declared open."""

import re
from pathlib import Path

from tests.support.http_helpers import refused, serving

LEVELS = """
from fastapi import APIRouter, Request

from valora_serve.server.access.guard import Access, allow


def extension(context):
    routes = APIRouter()

    @routes.get("/v1/count/{text}", summary="Count the tokens of a text")
    async def count(text: str) -> int:
        return context.service.engine.count_tokens(text)

    @routes.get("/v1/hello")
    @allow(Access.OPEN)
    async def hello() -> str:
        return "hello"

    @routes.post("/v1/hello")
    @allow(Access.ADMIN, max_body_bytes=10)
    async def set_hello(request: Request) -> int:
        return len(await request.body())

    @routes.get("/v1/off")
    @allow(Access.KEYED, disabled="Nobody may ask this today")
    async def off() -> str:
        return "off"

    @routes.get("/v1/models")
    @allow(Access.OPEN)
    async def models() -> str:
        return "taken over"

    return routes
"""
KEY = "a key for the tests"
HEADERS = {"authorization": f"Bearer {KEY}"}


def test_endpoints_of_other_packages_are_served_documented_and_closed_unless_declared(installed):
    installed("valora.endpoints", "levels", LEVELS)
    with serving(api_key=KEY) as server:
        assert server.client.get("/v1/count/abc").status_code == 401
        answer = server.client.get("/v1/count/a b c", headers=HEADERS)
        assert answer.json() == 3
        assert answer.headers["x-request-id"]
        assert server.client.get("/v1/hello").json() == "hello"
        assert server.client.post("/v1/hello", content=b"x").status_code == 401
        sent = server.client.post("/v1/hello", content=b"x" * 10, headers=HEADERS)
        assert sent.json() == 10
        too_large = server.client.post("/v1/hello", content=b"x" * 11, headers=HEADERS)
        refused(too_large, 413, "10 bytes")
        refused(server.client.get("/v1/off", headers=HEADERS), 403, "Nobody may ask this today")
        refused(server.client.request("BREW", "/v1/hello"), 405, "takes no BREW: /docs")
        assert 'path="/v1/count/{text}"' in server.client.get("/metrics").text
        # The paths of built-in endpoints cannot be taken over, nor opened.
        assert server.client.get("/v1/models").status_code == 401
        assert "data" in server.client.get("/v1/models", headers=HEADERS).json()
        paths = server.client.get("/openapi.json").json()["paths"]
        operation = paths["/v1/count/{text}"]["get"]
        assert operation["summary"] == "Count the tokens of a text"
        assert operation["security"] == [{"HTTPBearer": []}]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
        assert "security" not in paths["/v1/hello"]["get"]
        assert paths["/v1/hello"]["post"]["security"] == [{"HTTPBearer": []}]
    with serving() as server:  # without keys, nobody is an administrator
        refused(server.client.post("/v1/hello", content=b"x"), 403, "keys_file")
    page = (Path(__file__).parents[4] / "docs" / "reference" / "http.md").read_text()
    listed = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", page.partition("## Answers")[0]))
    there = {f"{verb.upper()} {path}" for path, found in paths.items() for verb in found}
    assert there - listed == {
        "GET /v1/count/{text}", "GET /v1/hello", "POST /v1/hello", "GET /v1/off",
    }  # fmt: skip
    assert listed <= there
