"""What tests of the runtime share: a tokenizer, loggers, commands that end early."""

import pytest
from transformers import AutoTokenizer

from tests.support.http_helpers import own_logging
from valora_data.contract.base_model import base_folder
from valora_serve import cli


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(base_folder("tiny"))


@pytest.fixture(autouse=True)
def _loggers():
    with own_logging():
        yield


@pytest.fixture
def early_error(monkeypatch, capsys):
    """Run `valora-serve`, which must fail before it loads a model; returns what it says."""

    async def never(*_):
        raise AssertionError("a model was loaded")

    def run(*arguments):
        assert cli.main(list(arguments)) == 1
        return capsys.readouterr().err

    monkeypatch.setattr("valora_serve.engine.process.EngineProcess.start", never)
    return run
