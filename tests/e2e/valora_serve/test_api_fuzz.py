"""Requests made from the OpenAPI schema, right and wrong ones: never a 500, never undeclared."""

import json
import random
import re

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import serving, until
from tests.support.random_tests import examples
from valora_data.contract.base_model import base_folder
from valora_serve.server.app import create_app
from valora_serve.server.settings import ServerSettings

pytestmark = pytest.mark.slow

MODELS = ("tiny", "person", "scene", "adapter-1")
SECRET = "an-admin-key-for-the-fuzzing"
CHECKS = [
    not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_headers_conformance, checks.response_schema_conformance,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    engine = FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny")))
    with serving(
        engine,
        api_key=SECRET,
        allow_runtime_loading=True,
        adapter_folder=str(folder),
        state_file=str(folder / "served.json"),
        media_folder=str(folder),
        log_level="error",
    ) as running:
        yield running


SCHEMA = schemathesis.openapi.from_dict(create_app(FakeEngine(), ServerSettings()).openapi())
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for operation in (found.ok() for found in SCHEMA.get_all_operations())
}


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation(name, mode, server):
    operation = OPERATIONS[name]
    has_input = operation.body or operation.path_parameters
    if mode is GenerationMode.NEGATIVE and not has_input:
        pytest.skip("takes nothing that could be wrong")

    @examples(8, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case):
        _steer(case, positive=mode is GenerationMode.POSITIVE)
        _give_time(case)
        response = case.call(
            base_url=server.url, headers={"authorization": f"Bearer {SECRET}"}, timeout=30
        )
        case.validate_response(response, checks=CHECKS)
        # Of a stream, only the first events are read: the server learns of it a moment later.
        until(lambda: server.inside == 0)

    ask()


def _steer(case, *, positive):
    """Let half of the requests name what is served, and half of the right ones hold little.

    Otherwise hardly any would get past the first check. The choice depends on the request alone.
    """
    body, rng = case.body, random.Random(str(case.body))
    if isinstance(body, dict):
        if positive and rng.random() < 0.5:
            needed = {"messages", "input", "prompt", "images"} & body.keys()
            kept = set(rng.sample(sorted(body.keys() - needed), min(2, len(body) - len(needed))))
            for field in body.keys() - needed - kept:
                del body[field]
            for turn in body.get("messages") or ():
                if isinstance(turn, dict) and turn.get("content") is None:
                    turn["content"] = "a red star"  # generators like null, which few turns may be
        if "model" in body and rng.random() < 0.5:
            body["model"] = rng.choice(MODELS)
    if "domain" in (case.path_parameters or {}) and rng.random() < 0.5:
        case.path_parameters["domain"] = "person"


def _give_time(case):
    """A deadline of milliseconds may pass, and 504 is then the right answer."""
    if not isinstance(case.body, dict):
        return
    for part in (case.body, case.body.get("valora")):
        deadline = part.get("deadline") if isinstance(part, dict) else None
        if isinstance(deadline, float) and 0.001 <= deadline < 10:
            part["deadline"] = deadline + 10


def test_the_schema_is_complete(server):
    content = server.client.get("/openapi.json").json()
    for path, operations in content["paths"].items():
        for operation in operations.values():
            assert operation["summary"]
            assert "422" not in operation["responses"]
            if path.startswith("/v1/"):
                assert {"200", "400", "401", "404", "413", "429", "503"} <= set(
                    operation["responses"]
                )
                assert operation["security"]
    text = json.dumps(content)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in content["components"]["schemas"]


def test_right_requests_were_among_them(server):
    """Runs last: what was made up has been answered, too, and not only refused."""
    text = server.client.get("/metrics").text
    for path in ("chat/completions", "completions", "models", "status"):
        line = rf'valora_http_requests_total\{{method="\w+",path="/v1/{path}",status="200"\}}'
        assert re.search(line, text), path
