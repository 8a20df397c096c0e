"""Documents and the real server: made, asked, restarted, asked again, deleted."""

import signal

import httpx
import pytest

from tests.e2e.valora_serve.serving import HEADERS, SECRET, Process, write_golden
from tests.support.context_bundles import ContextSpec, make_context_bundle
from tests.support.serve_helpers import LANGUAGE
from valora_data.contract.contexts import MEMORY_TOKENS, PREFIX

pytestmark = pytest.mark.slow

DOCUMENT = "The red key opens the old green door. Nobody but Ann knows where it lies. " * 6


def test_documents(tmp_path):
    root = tmp_path / "adapters"
    root.mkdir()
    bundle = make_context_bundle(
        tmp_path / "documents",
        "tiny",
        {"learnt": ContextSpec(PREFIX, 21), "read": ContextSpec(MEMORY_TOKENS, 6, "reader")},
        {"reader": {"rank": 4, "alpha": 8, "targets": LANGUAGE, "decode_only": True}},
        encoder=6,
    )
    arguments = (
        bundle, "--allow-runtime-loading", "--adapter-folder", root, "--api-key", SECRET,
        "--state-file", tmp_path / "state/served.json",
    )  # fmt: skip
    server = Process(*arguments, cwd=tmp_path).ready()
    client = httpx.Client(headers=HEADERS, timeout=60)

    def ask(model, question="Who knows?", **more):
        turns = [{"role": "user", "content": question}]
        if "document" in more:
            turns.insert(0, {"role": "system", "content": more["document"]})
        body = {"model": model, "messages": turns, "max_tokens": 8}
        answer = client.post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def make(**body):
        return client.post(f"{server.url}/v1/contexts", json={"document": DOCUMENT} | body)

    try:
        whole = make(name="whole")
        assert whole.status_code == 200, whole.text
        assert whole.json()["tokens"] == whole.json()["source_tokens"] > 100
        text = ask("whole")["choices"][0]["message"]["content"]
        long = ask("tiny", document=DOCUMENT)
        assert text == long["choices"][0]["message"]["content"]
        # The prefix counts as prompt that was not computed.
        used = ask("whole")["usage"]
        assert used["prompt_tokens"] == long["usage"]["prompt_tokens"]
        assert used["prompt_tokens_details"]["cached_tokens"] >= whole.json()["tokens"]

        made = make(name="compressed", form="memory_tokens", adapter="documents/reader").json()
        assert (made["tokens"], made["adapter"]) == (6, "documents/reader")
        assert made["decode_only"]
        short = make(name="short", tokens=40).json()
        assert (short["tokens"], short["source_tokens"]) == (40, whole.json()["tokens"])
        names = ["learnt", "read", "whole", "compressed", "short"]
        listed = client.get(f"{server.url}/v1/contexts").json()["data"]
        assert [one["id"] for one in listed] == names
        before = {name: ask(name)["choices"][0]["message"]["content"] for name in names}
        status = client.get(f"{server.url}/v1/status").json()
        assert (status["contexts_known"], status["contexts_resident"]) == (5, 3)
        assert status["pages_contexts"] > 0
        metrics = client.get(f"{server.url}/metrics").text
        assert "valora_contexts_known 5.0" in metrics and "valora_context_loads_total 3" in metrics

        assert "fewer than" in make(name="big", document="a " * 5000).json()["error"]["message"]
        server.end(signal.SIGKILL)
        write_golden(bundle, [
            {"domain": name, "prompt": "Who knows?", "expected": before[name], "max_tokens": 8}
            for name in ("learnt", "read")
        ])  # fmt: skip
        server = Process(*arguments, cwd=tmp_path).ready()
        assert server.said("2 golden examples reproduced")
        assert {name: ask(name)["choices"][0]["message"]["content"] for name in names} == before

        assert client.delete(f"{server.url}/v1/contexts/learnt").status_code == 409
        for name in ("whole", "compressed", "short"):
            assert client.delete(f"{server.url}/v1/contexts/{name}").status_code == 200
        assert not list((root / "contexts").iterdir())
        gone = {"model": "whole", "messages": [{"role": "user", "content": "Hi"}]}
        answer = client.post(f"{server.url}/v1/chat/completions", json=gone)
        assert answer.status_code == 404
    finally:
        server.end()
