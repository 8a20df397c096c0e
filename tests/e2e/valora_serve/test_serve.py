"""The server as users run it: the real engine, the tiny base model, unmodified clients."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image

from tests.e2e.valora_serve.serving import (
    ROOT,
    SECRET,
    Process,
    bundle_with_golden,
    processes_of,
    whole,
    write_golden,
)
from tests.support.http_helpers import data_url, encoded, until
from tests.support.serve_helpers import DOMAINS, DomainSpec, make_adapter, make_bundle
from valora_data.contract.bundle import GOLDEN, read_bundle
from valora_serve.server.access.keys import new_key

pytestmark = pytest.mark.slow


PICTURE = encoded(Image.radial_gradient("L").resize((160, 90)).convert("RGB"))
IMAGE = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}


def test_the_start_says_what_is_served(served, sample_bundle):
    log = served.log.read_text()
    for name, facts in read_bundle(sample_bundle).domains.items():
        assert re.search(rf"{name} .*{facts['metric']} {facts['accuracy']['test']:.3f}", log)
    assert served.said(r"2 golden examples reproduced; ready after \d+\.\d s")


def test_a_bundle_without_any_adapter_answers(tmp_path):
    domains = {name: replace(spec, adapter=None) for name, spec in DOMAINS.items()}
    bare = bundle_with_golden(tmp_path / "bare", name="bare", domains=domains, adapters={})
    with Process(bare, cwd=tmp_path) as served:
        assert served.said(r"2 golden examples reproduced; ready after \d+\.\d s")
        for name, spec in domains.items():
            result = served.look(name, PICTURE)
            if spec.kind == "detection":
                assert {item["label"] for item in result["detections"]} <= set(spec.labels)
            else:
                assert result["text"] if spec.kind is None else result["label"] in spec.labels
        assert served.names() == {"tiny", *domains}
        assert served.end() == 0


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("word " * 6000, "context"), ([10**6], "token"), ("<image> what is this?", "image")],
)
def test_prompts_that_the_real_engine_refuses(served, prompt, said):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match=said):
        client.completions.create(model="tiny", prompt=prompt)


# Starting, stopping, loading


def test_a_changed_bundle_is_not_served(tmp_path):
    folder = make_bundle(tmp_path / "b", "tiny")
    file = next((folder / "heads").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    process = Process(folder, cwd=tmp_path)
    assert process.end(0, 60) == 1
    assert process.said(r"error: .*changed")


def test_a_bundle_that_answers_differently_is_not_served(sample_bundle, tmp_path):
    folder = shutil.copytree(sample_bundle, tmp_path / "b")
    examples = json.loads((folder / GOLDEN).read_text())
    examples[0]["expected"][0]["box"][0] += 3
    write_golden(folder, examples)
    process = Process(folder, cwd=tmp_path)
    assert process.end(0, 60) == 1
    assert process.said("error: golden example plates-0.png of plates came out differently")


def test_sigterm_lets_running_requests_end(sample_bundle, tmp_path):
    process = Process(sample_bundle, "--no-golden", cwd=tmp_path).ready()
    answers = []

    def ask():
        answers.append(process.chat(max_tokens=300, ignore_eos=True))

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: httpx.get(f"{process.url}/v1/status").json()["running"] == 1)
    assert process.end() == 0
    thread.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert process.said("Shutting down")


def test_kill_and_restart_come_back_to_the_same_set(sample_bundle, tmp_path):
    store = tmp_path / "store"
    make_adapter(store / "one", "tiny", seed=1)
    make_adapter(store / "two", "tiny", seed=2, rank=16)
    make_bundle(store / "more", "tiny", name="more", seed=3,
                domains={"signs": DomainSpec("adapter-1", labels=["sign"])},
                adapters={"adapter-1": {"rank": 8, "alpha": 16}})  # fmt: skip
    arguments = (
        sample_bundle, "--no-golden", "--allow-runtime-loading", "--adapter-folder", store,
        "--api-key", SECRET, "--state-file", tmp_path / "state" / "served.json",
    )  # fmt: skip

    def ask(process, model):
        answer = process.post("completions", model=model, prompt="a red star and", max_tokens=8)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else None

    first = Process(*arguments, cwd=tmp_path).ready()
    for path, body in (
        ("load_lora_adapter", {"lora_name": "one", "lora_path": "one"}),
        ("load_lora_adapter", {"lora_name": "two", "lora_path": "two"}),
        ("load_bundle", {"bundle_path": "more"}),
        ("unload_lora_adapter", {"lora_name": "one"}),
        ("unload_bundle", {"bundle_name": "sample"}),
    ):
        assert first.post(path, **body).status_code == 200
    before, said = first.names(), ask(first, "two")
    assert {"two", "signs"} <= before
    assert not {"one", "scene"} & before
    first.end(signal.SIGKILL)
    with Process(*arguments, cwd=tmp_path) as second:
        assert second.names() == before
        assert ask(second, "two") == said
        assert ask(second, "one") is None


KEYS = {name: new_key(name, "user") for name in ("alice", "bob")}


def test_a_stranger_learns_nothing_of_cached_prompts(sample_bundle, tmp_path):
    """Of the base model, an adapter, a context and an image: each key finds what it sent itself."""
    (tmp_path / "keys").write_text("\n".join(line for _, line in KEYS.values()))
    (tmp_path / "store").mkdir()
    given = (
        sample_bundle, "--no-golden", "--keys-file", tmp_path / "keys", "--api-key", SECRET,
        "--allow-runtime-loading", "--adapter-folder", tmp_path / "store",
        "--state-file", tmp_path / "state.json",
    )  # fmt: skip

    def cached(name, model, parts, **more):
        answer = process.chat(model, parts, key=KEYS[name][0], max_tokens=1, **more)
        used = answer.raise_for_status().json()["usage"]
        return used["prompt_tokens_details"]["cached_tokens"]

    text = {"type": "text", "text": "my account is four seven one two and my pin nine three " * 3}
    asked = [(model, [text]) for model in ("tiny", "sample/adapter-1", "rules")]
    with Process(*given, cwd=tmp_path) as process:
        made = process.post("contexts", name="rules", document="No dogs after eight. " * 20)
        made.raise_for_status()
        for model, parts in (*asked, ("tiny", [IMAGE, text])):
            for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
                first, again = (cached("alice", model, parts, **salt) for _ in range(2))
                assert (first > 0) == (model == "rules")  # the document, which is the operator's
                assert again > first + 32
                assert cached("bob", model, parts, **salt) == first
                assert cached("bob", model, parts, **salt) == again


# Load generators


def test_bench_replays_a_trace(served, tmp_path):
    lines = [
        {"arrival": 0.0, "adapter": "scene", "prompt": 70, "output": 0, "images": 1},
        {"arrival": 0.05, "adapter": "sample/adapter-1", "prompt": 20, "output": 6,
         "latency_limit": 30},
        {"arrival": 0.1, "prompt": 12, "output": 5},
        {"arrival": 0.2, "adapter": "caption", "prompt": 90, "output": 4, "images": 1},
    ]  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.valora_serve.bench_load", "--url", served.url,
         "--trace", trace, "--json", tmp_path / "out.json", "--slo", "30"],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 of 4 requests answered" in done.stdout
    assert "100.0 % answered within their latency limit" in done.stdout
    requests = json.loads((tmp_path / "out.json").read_text())["requests"]
    assert [r["model"] for r in requests] == ["scene", "sample/adapter-1", "tiny", "caption"]
    assert [r["output"] for r in requests] == [0, 6, 5, 4]
    assert [r["prompt"] for r in requests[1:3]] == [20, 12]


def test_guidellm_runs_unmodified(served, tmp_path):
    command = shutil.which("guidellm", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("guidellm is not installed: pip install guidellm runs this test")
    done = subprocess.run(
        [command, "benchmark", "--target", served.url, "--rate-type", "throughput",
         "--max-requests", "6", "--processor", ROOT / "data" / "valora_data" / "tiny",
         "--data", "prompt_tokens=32,output_tokens=8", "--output-path", tmp_path / "out.json",
         "--disable-progress"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    (run,) = report["benchmarks"]
    assert len(run["requests"]["successful"]) == 6
    assert not run["requests"]["errored"]


@pytest.mark.parametrize(
    ("arguments", "process", "killed"),
    [
        ((), "process", "the process of the engine"),
        (("--device", "cpu", "--tensor-parallel", "2"), "workers",
         "process 1 of the tensor-parallel group of 2"),
    ],
)  # fmt: skip
def test_a_killed_process_of_the_engine_ends_the_server(tmp_path, arguments, process, killed):
    server = Process(*arguments, cwd=tmp_path, start=whole).ready(240)
    try:
        assert server.chat(max_tokens=3).status_code == 200
        with ThreadPoolExecutor() as threads:
            late = threads.submit(server.chat, max_tokens=1500, ignore_eos=True)
            time.sleep(1.0)
            (victim,) = processes_of(server.process.pid, process)
            os.kill(victim, signal.SIGKILL)
            answer = late.result(60)
        reason = f"{killed} was killed by SIGKILL: restart the server"
        assert answer.status_code == 503 and reason in answer.text
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert f"error: {reason}" in log and "Traceback" not in log
    finally:
        server.end(signal.SIGKILL)


def test_a_killed_server_ends_its_engine(tmp_path):
    server = Process(cwd=tmp_path, start=whole).ready()
    (engine,) = processes_of(server.process.pid, "process")
    server.end(signal.SIGKILL)
    status = Path(f"/proc/{engine}/status")
    until(lambda: not status.exists() or "State:\tZ" in status.read_text(), 30)
