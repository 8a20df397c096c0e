"""The engine in a process of its own: the same answers and errors, and what ends with what."""

import asyncio
import contextlib
import io
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.engine_reference import all_of, noise, outputs_of, until
from tests.support.forked import forked_workers
from tests.support.serve_helpers import make_bundle
from valora_data.contract.files import UnreadableError
from valora_serve import errors
from valora_serve.engine.async_engine import start_engine
from valora_serve.engine.process import EngineProcess, _EngineServer, _Pickler
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import (
    AdapterError,
    DeadlineError,
    SettingsError,
    StoppedError,
    UnknownModelError,
)
from valora_serve.server.constrain import Grammar, GrammarConstraint, Grammars, read_tokenizer
from valora_serve.types import Finish, NewContext, Request, SamplingParams

SETTINGS = EngineSettings(profile=False, pages=400)


@pytest.fixture(autouse=True)
def _forked():
    with forked_workers():
        yield


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("bundles") / "sample", "tiny")


def with_process(use, settings=SETTINGS, loop=None):
    """Run a coroutine with an engine in a process, which has ended afterwards."""

    async def main():
        engine = await EngineProcess.start(settings)
        try:
            return await asyncio.wait_for(use(engine), 120)
        finally:
            await engine.close()
            assert engine._process.poll() is not None and not engine.healthy

    with asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(main())


def words(name, tokens=6, **options):
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, text="a red star and", sampling=sampling, **options)


def told(got):
    """What does not depend on time."""
    boxes = None if got.last.head is None else got.last.head.golden()
    return got.text, got.tokens, got.finish, boxes, got.last.usage, str(got.error)


def test_answers_are_those_of_an_engine_in_this_process(bundle):
    large = noise(1500, 1100, 1)
    asked = [
        words("stream"), words("whole", stream=False), words("unknown", model="nothing"),
        Request("large", model="scene", images=[large]),
        Request("one", model="scene", images=[large], stream=False,
                also=(Request("two", model="scene", images=[large], stream=False),)),
    ]  # fmt: skip

    async def answers(engine):
        await engine.load("bundle", bundle)
        await engine.warm_up()
        facts = engine.base, engine.dtype, engine.context_length, engine.count_tokens("a red star")
        models = [replace(one, loaded_at=0) for one in engine.models()]
        found = [got for one in asked for got in (await all_of(engine, one)).values()]
        return facts, models, [told(got) for got in found]

    async def here():
        engine = await start_engine(SETTINGS)
        try:
            return await answers(engine)
        finally:
            await engine.close()

    assert with_process(answers) == asyncio.run(here())


def test_large_images_pass_in_uvloop(bundle):
    """Ray Serve runs replicas in it; it makes what it waits for non-blocking."""
    uvloop = pytest.importorskip("uvloop")

    async def body(engine):
        await engine.load("bundle", bundle)
        large = Request("large", model="scene", images=[noise(2000, 1700, 1)])
        return await outputs_of(engine, large)

    assert with_process(body, loop=uvloop.new_event_loop).error is None


def test_models_come_and_go(bundle, tmp_path):
    def names(models):
        return {one.name for one in models}

    async def body(engine):
        before = names(engine.models())
        made = names(await engine.load("bundle", bundle))
        assert made and names(engine.models()) == before | made
        with pytest.raises(AdapterError, match="is no adapter"):
            await engine.load("adapter", tmp_path, "sample/adapter-1")
        with pytest.raises(UnknownModelError, match="no bundle is named nothing"):
            await engine.unload("bundle", "nothing")
        await engine.make_context(NewContext("story", "a red star " * 20), tmp_path / "c")
        assert names(await engine.load("context", tmp_path / "c", "story")) == {"story"}
        assert (await outputs_of(engine, words("about", tokens=1, model="story"))).error is None
        await engine.unload("context", "story")
        await engine.load("context", tmp_path / "c", "again")
        await engine.unload("context", "again")
        await engine.unload("bundle", "sample")
        assert names(engine.models()) == before
        await until(lambda: engine.stats().adapters_known == 0)

    with_process(body)


def test_what_is_left_or_late_ends_and_so_does_a_process_that_hangs(monkeypatch):
    monkeypatch.setattr("valora_serve.engine.process.CLOSE_SECONDS", 0.5)

    async def body(engine):
        stream = engine.generate(words("left", tokens=1000))
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.stats().finished.get("cancelled") == 1)
        await until(lambda: not engine.stats().running)
        assert (await outputs_of(engine, words("left"))).finish is Finish.LENGTH  # the id is free
        late = await outputs_of(engine, words("late", tokens=1000, deadline=0.05))
        assert isinstance(late.error, DeadlineError)
        os.kill(engine._process.pid, signal.SIGSTOP)

    with_process(body)


def test_a_setting_that_cannot_be_kept_is_told_in_the_same_words():
    with pytest.raises(SettingsError, match=r"decision trace /nowhere/trace cannot be written"):
        with_process(None, replace(SETTINGS, decision_trace="/nowhere/trace"))


def test_a_killed_process_is_told_and_fails_what_it_had():
    async def body(engine):
        pair = replace(words("one", tokens=1000), also=(words("two", tokens=1000),))
        stream, ended = engine.generate(pair), {}
        await anext(stream)
        engine._process.kill()
        async for output in stream:
            if output.finish is not None:
                ended[output.id] = output.error
        assert ended.keys() == {"one", "two"} and not engine.healthy
        assert engine.lost == "the process of the engine was killed by SIGKILL: restart the server"
        late = await outputs_of(engine, words("late"))
        assert late.finish is Finish.ERROR
        for error in (*ended.values(), late.error):
            assert isinstance(error, StoppedError) and str(error) == engine.lost
        with pytest.raises(StoppedError, match="killed by SIGKILL"):
            await engine.unload("adapter", "one")

    with_process(body)


def test_a_process_that_is_killed_while_it_starts_is_told(monkeypatch):
    init = EngineProcess.__init__
    monkeypatch.setattr(EngineProcess, "__init__", lambda one: init(one) or one._process.kill())
    with pytest.raises(StoppedError, match="killed by SIGKILL"):
        with_process(None)


def test_what_nobody_expected_is_raised_and_logged_here(caplog):
    caplog.set_level(logging.INFO, "valora_serve")

    async def body(engine):
        with pytest.raises(TypeError, match="arguments"):
            await engine._call("unload", "adapter", None, "too many")
        await until(lambda: any(one.exc_text for one in caplog.records))
        [record] = [one for one in caplog.records if one.exc_text]
        assert "TypeError" in record.exc_text and record.name == "valora_serve.engine.process"
        await engine._call("close")
        await until(lambda: not engine.healthy)  # as also if it has failed
        assert isinstance((await outputs_of(engine, words("late"))).error, StoppedError)

    with_process(body)


SERVER = """
import asyncio, os, sys
from valora_serve.engine.settings import EngineSettings
from valora_serve.engine.process import EngineProcess

async def main():
    engine = await EngineProcess.start(EngineSettings(profile=False, pages=400))
    print(engine._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_the_server(how, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit")  # of a user: it is not meant
    command = [sys.executable, "-P", "-c", SERVER]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        pid = int(server.stdout.readline())
        os.kill(pid, signal.SIGTERM)  # of a service manager, to all: the server says when to end
        time.sleep(0.2)
        assert Path(f"/proc/{pid}").exists()
        server.send_signal(how)
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(FileNotFoundError):
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def sent(one):
    """Something as the other process has it, and the number of bytes that were sent apart."""
    file, apart = io.BytesIO(), []
    _Pickler(file, 5, buffer_callback=apart.append).dump(one)
    parts = [bytes(part.raw()) for part in apart]
    return pickle.loads(file.getvalue(), buffers=parts), sum(map(len, parts))


@pytest.mark.parametrize("size", [(96, 96), (1, 1), (2000, 1700), (1, 1_000_000), (1_000_000, 1)])
def test_pixels_arrive_and_are_sent_once_and_apart(size):
    image = noise(*size, 1)
    (first, second), apart = sent((image, image))
    assert first is second and first.mode == "RGB" and first.tobytes() == image.tobytes()
    assert apart == 3 * size[0] * size[1]


def test_constraints_go_on_in_the_other_process(tokenizer):
    grammars = Grammars(SimpleNamespace(tokenizer=tokenizer))
    grammars.read()
    try:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        grammar = Grammar.json(schema)
        [here] = asyncio.run(grammars.constraints(grammar))
    finally:
        grammars.close()
    read_tokenizer(tokenizer)
    (there, _), (again, _) = sent(here), sent(here)
    assert isinstance(there, GrammarConstraint) and there.grammar == grammar
    assert there._known is again._known
    for token in tokenizer('{"a":2}', add_special_tokens=False)["input_ids"]:
        assert np.array_equal(here.may(), there.may())
        assert here.advance(token) == there.advance(token)
    there._known.worn = True
    anew, _ = sent(here)
    assert anew._known is not there._known


TWO_WORDS = {errors.FieldError: "messages.0", errors.MissingAdapterError: "cats"}
ERRORS = [
    UnreadableError("is no file", Path("head.json")),
    errors.OverloadedError("full", 7.5),
    errors.NonFiniteError("NaN", blame_adapter=False),
    *(
        kind("so it is", TWO_WORDS[kind]) if kind in TWO_WORDS else kind("so it is")
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.ServeError)
    ),
]


@pytest.mark.parametrize("wrong", ERRORS, ids=repr)
def test_errors_keep_what_they_say(wrong):
    for error in (sent(wrong)[0], pickle.loads(pickle.dumps(wrong))):
        assert type(error) is type(wrong) and str(error) == str(wrong)
        assert vars(error) == vars(wrong)


def test_what_cannot_be_sent_is_an_error_of_its_request_alone():
    async def body():
        ours, theirs = Pipe()
        server = _EngineServer(theirs)
        server.send(1, False, lambda: None)
        server.send(2, False, "fine")
        await asyncio.sleep(0)
        messages, _ = pickle.loads(ours.recv_bytes())
        return [(number, last, pickle.loads(content)) for number, last, content in messages]

    (number, last, error), other = asyncio.run(body())
    assert (number, last) == (1, True) and "cannot leave the engine's process" in str(error)
    assert other == (2, False, "fine")
