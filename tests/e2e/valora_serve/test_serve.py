"""The server as users run it: the real engine, the tiny base model, unmodified clients."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.e2e.valora_serve.serving import ROOT, SECRET, Process, bundle_with_golden, write_golden
from tests.support.http_helpers import data_url, encoded, until
from tests.support.serve_helpers import DOMAINS, DomainSpec, make_adapter, make_bundle
from valora_data.contract.bundle import GOLDEN, read_bundle
from valora_serve.server.access.keys import new_key

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


PICTURE = encoded(Image.radial_gradient("L").resize((160, 90)).convert("RGB"))
IMAGE = {"type": "image_url", "image_url": {"url": data_url(PICTURE)}}


def test_the_start_says_what_is_served(served, sample_bundle):
    log = served.log.read_text()
    for name, facts in read_bundle(sample_bundle).domains.items():
        assert re.search(rf"{name} .*{facts['metric']} {facts['accuracy']['test']:.3f}", log)
    assert served.said(r"2 golden examples reproduced; ready after \d+\.\d s")


def test_every_kind_of_domain_answers(served):
    for item in served.look("traffic", PICTURE)["detections"]:
        x0, y0, x1, y1 = item["box"]
        assert 0 <= x0 <= x1 <= 160
        assert 0 <= y0 <= y1 <= 90
        assert item["label"] in {"car", "bus", "bike"}
    sure = served.look("scene", PICTURE)["confidences"]
    assert sum(sure.values()) == pytest.approx(1, abs=1e-4)
    assert served.look("crowd", PICTURE)["label"].isdigit()
    assert served.look("caption", PICTURE)["text"]


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


def test_head_and_text_in_one_client(client):
    message = {"role": "user", "content": [IMAGE]}
    answer = client.chat.completions.create(model="scene", messages=[message])
    assert answer.choices[0].message.content in {"forest", "street", "beach"}
    assert answer.valora["adapter"] == "sample/adapter-2"
    text = [{"type": "text", "text": "describe the image."}, IMAGE]
    options = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 24}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content
    assert whole.usage.prompt_tokens > 64
    logprobs = whole.choices[0].logprobs.content
    assert len(logprobs) == whole.usage.completion_tokens
    assert all(item.logprob == item.top_logprobs[0].logprob for item in logprobs)  # greedy
    streamed = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(streamed)
    joined = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert joined == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_seeds_and_several_answers(client):
    def ask(**more):
        answer = client.chat.completions.create(
            model="sample/adapter-1", messages=[{"role": "user", "content": "describe"}],
            max_tokens=12, temperature=1.5, **more,
        )  # fmt: skip
        return [choice.message.content for choice in answer.choices]

    assert ask(seed=5, n=3) == ask(seed=5, n=3)
    assert len(set(ask(seed=5, n=4))) > 1
    assert ask(seed=5, n=2)[:1] == ask(seed=5)
    assert ask(seed=5, n=2)[1] != ask(seed=6)[0]


def test_json_schema(client):
    schema = {
        "type": "object",
        "properties": {"things": {"type": "array", "items": {"enum": ["star", "ring"]},
                                  "minItems": 1, "maxItems": 3},
                       "count": {"type": "integer", "minimum": 0, "maximum": 20}},
        "required": ["things", "count"], "additionalProperties": False,
    }  # fmt: skip
    for temperature in (0, 1.3):
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "how many things?"}], seed=1,
            temperature=temperature, max_tokens=200, n=2,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )  # fmt: skip
        for choice in answer.choices:
            found = json.loads(choice.message.content)
            assert set(found["things"]) <= {"star", "ring"}
            assert 0 <= found["count"] <= 20


def test_completions(client):
    answer = client.completions.create(model="tiny", prompt=["a red", "a blue"], max_tokens=4)
    assert len(answer.choices) == 2
    assert answer.usage.completion_tokens <= 8


def test_errors_of_the_real_engine(client, served):
    with pytest.raises(openai.NotFoundError, match="traffic"):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="tiny", prompt="word " * 6000)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[10**6])
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="<image> what is this?")  # not text there
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=2000,
            extra_body={"ignore_eos": True, "valora": {"deadline": 0.05}},
        )  # fmt: skip
    assert caught.value.status_code in (429, 504)


def test_a_client_that_goes_away_frees_everything(served):
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": "describe"}],
        "max_tokens": 1500, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    before = httpx.get(f"{served.url}/v1/status").json()
    with httpx.stream("POST", f"{served.url}/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()  # kept, as dropping it hangs up
        next(lines)
        until(lambda: httpx.get(f"{served.url}/v1/status").json()["running"] == 1)

    def all_free():
        after = httpx.get(f"{served.url}/v1/status").json()
        return after["running"] == 0 and after["pages_free"] == before["pages_free"]

    until(all_free)


def test_metrics_after_requests(served, client):
    for model, content in (("tiny", "a dog"), ("scene", [IMAGE])):
        message = {"role": "user", "content": content}
        client.chat.completions.create(model=model, messages=[message], max_tokens=3)
    text = httpx.get(f"{served.url}/metrics").text
    for name in (
        "valora_num_requests_running", "valora_num_requests_waiting",
        "valora_kv_cache_usage_ratio", "valora_time_to_first_token_seconds_bucket",
        "valora_inter_token_latency_seconds_bucket", "valora_e2e_request_latency_seconds_bucket",
        "valora_request_queue_time_seconds_bucket", "valora_request_success_total",
        "valora_mode{", "valora_mode_switches_total", "valora_merged_adapter_info",
        "valora_adapters_resident", "valora_prefix_cache_hits_total",
        "valora_image_cache_hits_total", "process_resident_memory_bytes",
    ):  # fmt: skip
        assert name in text, name
    assert 'valora_e2e_request_latency_seconds_count{model_name="scene"}' in text


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


@pytest.fixture(scope="module")
def guarded(sample_bundle, tmp_path_factory):
    """A server with keys of two users, which loads adapters from a store; and the store."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("\n".join(line for _, line in KEYS.values()))
    (folder / "store").mkdir()
    with Process(
        sample_bundle, "--no-golden", "--keys-file", folder / "keys", "--api-key", SECRET,
        "--allow-runtime-loading", "--adapter-folder", folder / "store",
        "--state-file", folder / "state.json", cwd=folder,
    ) as process:  # fmt: skip
        yield process, folder / "store"


def test_a_stranger_learns_nothing_of_cached_prompts(guarded):
    """Of the base model, an adapter, a context and an image: each key finds what it sent itself."""
    process, _ = guarded

    def cached(name, model, parts, **more):
        answer = process.chat(model, parts, key=KEYS[name][0], max_tokens=1, **more)
        used = answer.raise_for_status().json()["usage"]
        return used["prompt_tokens_details"]["cached_tokens"]

    text = {"type": "text", "text": "my account is four seven one two and my pin nine three " * 3}
    made = process.post("contexts", name="rules", document="No dogs after eight. " * 20)
    made.raise_for_status()
    asked = [(model, [text]) for model in ("tiny", "sample/adapter-1", "rules")]
    for model, parts in (*asked, ("tiny", [IMAGE, text])):
        for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
            first, again = (cached("alice", model, parts, **salt) for _ in range(2))
            assert (first > 0) == (model == "rules")  # the document, which is the operator's
            assert again > first + 32
            assert cached("bob", model, parts, **salt) == first
            assert cached("bob", model, parts, **salt) == again


def test_adapters_that_do_not_fit_are_refused(guarded, random_llava):
    process, store = guarded
    make_adapter(store / "foreign", str(random_llava), seed=1)
    good = make_adapter(store / "good", "tiny", seed=1)
    for name, change in (
        ("nan", lambda tensors: {k: v * float("nan") for k, v in tensors.items()}),
        ("strange", lambda tensors: {f"x.{k}": v for k, v in tensors.items()}),
        ("narrow", lambda tensors: {k: v[:, :-1].contiguous() for k, v in tensors.items()}),
    ):
        folder = shutil.copytree(good, store / name)
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)
    cut = shutil.copytree(good, store / "cut") / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    archive = shutil.copytree(good, store / "tar") / "adapter_model.safetensors"
    subprocess.run(["tar", "cf", archive, "-C", store, "good"], check=True)
    refused = ("foreign", "nan", "strange", "narrow", "cut", "tar")
    for name in refused:
        answer = process.post("load_lora_adapter", lora_name=name, lora_path=name)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["code"] == "invalid_adapter"
    assert not process.names() & {*refused}
    assert httpx.get(f"{process.url}/health").status_code == 200


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
