"""Replicas on Ray Serve as users run them: fronts, and real engines in processes of their own."""

import contextlib
import itertools
import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.valora_serve.serving import HEADERS, SECRET, Process
from tests.support import http_helpers
from tests.support.http_helpers import encoded
from tests.support.serve_helpers import make_adapter

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

TARGET = 8  # requests of a replica from which on another one is started


class Replicated(Process):
    """A server with replicas."""

    def metrics(self, name):
        """Values of a metric by replica, or the one value of a metric without replicas."""
        found = {}
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"valora_{name}":
                    found[sample.labels.get("replica")] = sample.value
        return found

    def workers(self, of="ServeReplica"):
        """Processes of the replicas, of the fronts or of the board."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [one] if of in " ".join(one.cmdline()[:3]) else []
        return found


@contextlib.contextmanager
def paused(engines):
    """Stop engines, which keep their requests: the cores are for a replica that starts."""
    for one in engines:
        one.suspend()
    try:
        yield
    finally:
        for one in engines:
            one.resume()


until = partial(http_helpers.until, pause=0.25)  # a page of metrics takes time, too


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    make_adapter(folder / "new", "tiny", seed=7, rank=4)
    make_adapter(folder / "found", "tiny", seed=8, rank=4)
    (folder / "bad").mkdir()
    (folder / "bad" / "adapter_config.json").write_text("{}")
    (folder / "bad" / "adapter_model.safetensors").write_bytes(b"none")
    return folder


@pytest.fixture(scope="module")
def replicated(sample_bundle, store, tmp_path_factory):
    process = Replicated(
        sample_bundle, "--replicas", 2, "--max-replicas", 3, "--target-requests", TARGET,
        "--scale-out-seconds", 1, "--scale-in-seconds", 2, "--pages", 1000, "--api-key", SECRET,
        "--allow-runtime-loading", "--adapter-folder", store,
        "--adapter-sources", store, "--adapter-allow", "found",
        cwd=tmp_path_factory.mktemp("replicas"),
    )  # fmt: skip
    try:
        yield process.ready(240)
    finally:
        status = process.end()
    assert status == 0
    lines = process.log.read_text().splitlines()
    assert not [line for line in lines if line.startswith("Traceback")]  # others are Ray's


def same(found, expected):
    """Whether two answers are equal, numbers as far as the inference mode changes them."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, float):
        return found == pytest.approx(expected, abs=1e-2, rel=1e-4)
    return found == expected


def test_answers_are_those_of_one_engine(replicated, served):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    bodies = [
        {"model": model, "max_tokens": 10, "messages": [{"role": "user", "content": text}], **more}
        for model, text, more in (
            ("tiny", "a dog", {}),
            ("tiny", "a cat", {"temperature": 1.0, "seed": 3, "n": 2}),
            ("sample/adapter-1", "a dog", {"logprobs": True, "top_logprobs": 2}),
            ("sample/adapter-2", "a dog", {"stop": ["e"]}),
            ("sample/adapter-2", "a number", {"response_format": form, "max_tokens": 40}),
        )
    ]
    for body in bodies:
        both = [one.post("chat/completions", **body) for one in (replicated, served)]
        assert [answer.status_code for answer in both] == [200, 200], both[0].text
        first, second = (answer.json() for answer in both)
        assert same(first["choices"], second["choices"])
        assert first["usage"]["completion_tokens"] == second["usage"]["completion_tokens"]
    image = encoded(Image.radial_gradient("L").resize((140, 90)).convert("RGB"))
    for domain in ("plates", "traffic", "scene", "crowd", "caption"):
        assert same(*(one.look(domain, image) for one in (replicated, served))), domain
    wrong = replicated.chat("nobody")
    assert wrong.status_code == 404
    assert "traffic" in wrong.json()["error"]["message"]


def test_replicas_do_not_yield_to_all_else_of_the_machine(replicated):
    """As batch jobs of Ray do: one that starts would have a tenth of a core on a busy machine."""
    assert [one.nice() for one in replicated.workers()] == 2 * [os.nice(0)]


def test_an_adapter_stays_at_one_replica_and_keys_hold(replicated):
    until(lambda: len(replicated.metrics("adapter_loads_total")) == 2, 60)  # the other may be later
    before = sum(replicated.metrics("adapter_loads_total").values())
    for number in range(4):
        for name in ("sample/adapter-1", "sample/adapter-2"):
            assert replicated.chat(name, f"say {number}", max_tokens=2).status_code == 200
    time.sleep(1.5)  # reports of the replicas
    loads = replicated.metrics("adapter_loads_total")
    assert len(loads) == replicated.metrics("replicas")[None] == 2
    # Each of the two adapters was loaded once, into one of the replicas, before or now.
    assert sum(loads.values()) <= max(before, 2)
    assert httpx.get(f"{replicated.url}/v1/models").status_code == 401
    assert replicated.post("unload_bundle", bundle_name="nothing").status_code == 404


def test_adapters_are_loaded_and_unloaded_everywhere(replicated):
    assert replicated.chat("new").status_code == 404
    made = replicated.post("load_lora_adapter", lora_name="new", lora_path="new")
    assert made.status_code == 200, made.text
    refused = replicated.post("load_lora_adapter", lora_name="bad", lora_path="bad")
    assert refused.status_code == 400, refused.text
    assert {"new", "bad"} & replicated.names() == {"new"}
    until(lambda: set(replicated.metrics("adapters_known").values()) == {3.0}, 60)
    assert replicated.chat("new", max_tokens=4).status_code == 200
    busy = replicated.post("unload_lora_adapter", lora_name="sample/adapter-1")
    assert busy.status_code == 409, busy.text
    assert replicated.post("unload_lora_adapter", lora_name="new").status_code == 200
    until(lambda: set(replicated.metrics("adapters_known").values()) == {2.0}, 60)
    assert replicated.chat("new").status_code == 404
    made = replicated.post("load_lora_adapter", lora_name="new", lora_path="new")
    assert made.status_code == 200  # for the replicas that start in later tests


def test_an_adapter_that_requests_load_is_listed_and_unloaded_wherever_it_is(replicated):
    def ask(number):  # the header sends it to this replica or that one
        headers = HEADERS | {"x-valora-model": f"any-{number}"}
        body = {"model": "found", "prompt": "x", "max_tokens": 1}
        url = f"{replicated.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200

    def states():
        url = f"{replicated.url}/v1/models"
        cards = httpx.get(url, headers=HEADERS, timeout=60).json()["data"]
        return {card["id"]: card["state"] for card in cards}

    asked = itertools.count()
    assert "found" not in states()
    ask(next(asked))
    until(lambda: set(replicated.metrics("adapters_known").values()) == {3.0, 4.0}, 60)
    assert {states()["found"] for _ in range(8)} <= {"host", "device"}
    until(
        lambda: ask(next(asked)) or set(replicated.metrics("adapters_known").values()) == {4.0}, 60
    )
    for status in (200, 404):
        gone = replicated.post("unload_lora_adapter", lora_name="found")
        assert gone.status_code == status, gone.text
    assert set(replicated.metrics("adapters_known").values()) == {3.0}
    assert states()["found"] == "disk", "a request would load it again"


def test_deadlines_and_clients_that_leave(replicated):
    """What nobody waits for any more is not generated to its end, in whatever time that takes."""

    def generated():
        time.sleep(1.5)  # reports of the replicas
        return sum(replicated.metrics("generation_tokens_total").values())

    options = {"max_tokens": 1500, "ignore_eos": True, "n": 4}
    before = generated()
    late = replicated.chat(**options, valora={"deadline": 0.2})
    assert late.status_code == 504, late.text
    body = {"model": "tiny", "stream": True, **options,
            "messages": [{"role": "user", "content": "go on"}]}  # fmt: skip
    url = f"{replicated.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=60) as answer:
        next(answer.iter_lines())
    until(lambda: sum(replicated.metrics("num_requests_running").values()) == 0, 60)
    assert before < generated() < before + 4 * 1500


def test_a_replica_that_is_killed_under_load(replicated):
    """Every request has its answer or a clear error, none has a wrong one, and a new one comes."""
    models = ("tiny", "sample/adapter-1", "sample/adapter-2", "new")
    options = {"max_tokens": 40, "ignore_eos": True}
    right = {model: replicated.chat(model, **options).json()["choices"] for model in models}
    assert len({json.dumps(choices) for choices in right.values()}) == 4
    victims, answers, stop = replicated.workers(), [], threading.Event()
    assert len(victims) == 2
    names = set(replicated.metrics("num_requests_running"))

    def ask(model):
        while not stop.is_set():
            answer = replicated.chat(model, **options)
            answers.append((model, answer))

    with ThreadPoolExecutor(4) as pool:
        for model in models:
            pool.submit(ask, model)
        until(lambda: len(answers) >= 4, 90)
        victims[0].send_signal(signal.SIGKILL)
        killed = len(answers)
        try:
            until(lambda: len(answers) >= killed + 4, 90)
            with paused(victims[1].children()):
                until(
                    lambda: (
                        len(set(replicated.metrics("num_requests_running")) - names) == 1
                        and len(replicated.workers()) == 2
                    ),
                    60,
                )
            again = len(answers)
            until(lambda: len(answers) >= again + 4, 90)
        finally:
            stop.set()
    for model, answer in answers:
        if answer.status_code == 200:
            assert answer.json()["choices"] == right[model]
        else:
            assert answer.status_code == 503, answer.text
            assert "ask again" in answer.json()["error"]["message"]
    # Nothing had been passed on, so that all of them were asked once more.
    assert all(answer.status_code == 200 for _, answer in answers)
    # The new replica serves what was loaded at run time, too.
    until(lambda: list(replicated.metrics("adapters_known").values()) == [3.0, 3.0], 60)


@pytest.mark.parametrize("what", ["replicas.front", "ray::Board"])
def test_a_front_or_the_board_that_is_killed(replicated, what):
    """Clients of a front lose their connection, and ask again; nobody else notices anything."""
    fronts, answers, stop = len(replicated.workers("replicas.front")), [], threading.Event()

    def ask():
        while not stop.is_set():
            try:
                answers.append(replicated.chat("tiny", max_tokens=8, ignore_eos=True).status_code)
            except httpx.TransportError as error:
                answers.append(error)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(ask)
        until(lambda: len(answers) >= 8, 60)
        (victim, *_) = replicated.workers(what)
        victim.send_signal(signal.SIGKILL)
        try:
            until(lambda: victim.pid not in [one.pid for one in replicated.workers(what)], 30)
            until(lambda: len(replicated.workers("replicas.front")) == fronts, 30)
            until(lambda: len(replicated.workers("ray::Board")) == 1, 60)
            again = len(answers)
            until(lambda: len(answers) >= again + 8, 60)
        finally:
            stop.set()
    lost = [one for one in answers if one != 200]
    assert len(lost) <= (4 if what == "replicas.front" else 0), lost
    assert all(isinstance(one, httpx.TransportError) for one in lost)
    # What was loaded is known as before, and can be changed.
    unloaded = replicated.post("unload_lora_adapter", lora_name="new")
    assert unloaded.status_code == 200, unloaded.text
    made = replicated.post("load_lora_adapter", lora_name="new", lora_path="new")
    assert made.status_code == 200, made.text
    until(lambda: list(replicated.metrics("adapters_known").values()) == [3.0, 3.0], 60)


def test_replicas_follow_the_queue_and_drain(replicated):
    answers, enough = [], threading.Event()

    def ask(number):
        while not enough.is_set():
            answers.append((96, replicated.chat(text=f"go {number}", **options)))

    options = {"max_tokens": 96, "ignore_eos": True, "seconds": 120}
    with ThreadPoolExecutor(4 * TARGET) as pool:
        for number in range(4 * TARGET):
            pool.submit(ask, number)
        try:
            until(lambda: sum(replicated.metrics("num_requests_running").values()) > 2 * TARGET, 30)
            with paused(replicated.workers("valora_serve.engine.process")):
                until(lambda: replicated.metrics("replicas")[None] == 3, 90)
        finally:
            enough.set()
    # Requests that are longer than it takes until one replica too many is drained.
    options = {"max_tokens": 400, "ignore_eos": True, "seconds": 120}
    with ThreadPoolExecutor(3) as pool:
        last = [pool.submit(replicated.chat, "tiny", f"stay {n}", **options) for n in range(3)]
        until(lambda: replicated.metrics("replicas")[None] == 2, 90)
        answers += [(400, one.result()) for one in last]
    assert {answer.status_code for _, answer in answers} == {200}
    for count, answer in answers:
        assert answer.json()["usage"]["completion_tokens"] == count


def test_another_server_on_the_same_cluster(replicated, sample_bundle, tmp_path):
    other = Process(sample_bundle, "--replicas", 1, "--ray-address", "auto", cwd=tmp_path)
    assert other.end(0, 120) == 1
    assert other.said("error: .*another server serves application valora")
    assert replicated.chat(max_tokens=2).status_code == 200
