"""A server over the fake engine, and OpenAI's client for it."""

import openai
import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import serving


@pytest.fixture(scope="package")
def server(tokenizer):
    with serving(FakeEngine(tokenizer=tokenizer), max_n=4) as running:
        yield running


@pytest.fixture(scope="package")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
