"""A server over the fake engine, and OpenAI's client for it."""

import openai
import pytest
from transformers import AutoTokenizer

from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import serving
from valora_data.contract.base_model import base_folder


@pytest.fixture(scope="module")
def server():
    engine = FakeEngine(tokenizer=AutoTokenizer.from_pretrained(base_folder("tiny")))
    with serving(engine, max_n=4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)
