"""The comparison with other servers, on stubs of their packages that check how they are called."""

import json
import sys
from pathlib import Path

import pytest

from tests.bench.valora_serve import bench_peers
from tests.bench.valora_serve.bench_peers import CASES, Case
from tests.bench.valora_serve.peers import worker
from tests.bench.valora_serve.peers.base import Ask, Job
from valora_data.contract.base_model import base_folder

VLLM = """
import os

STREAMS = os.environ.get("VLLM_LORA_ENABLE_DUAL_STREAM")


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0.0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class Answered:
    def __init__(self, count):
        self.outputs = [self]
        self.token_ids = list(range(count))


class LLM:
    def __init__(self, model, *, seed, max_num_seqs, max_num_batched_tokens, max_model_len,
                 enable_prefix_caching, dtype, limit_mm_per_prompt, mm_processor_cache_gb,
                 enable_lora=False, max_loras=1, max_cpu_loras=None, max_lora_rank=16,
                 lora_target_modules=None, specialize_active_lora=False):
        if specialize_active_lora:
            raise ValueError("not on this GPU")
        self.images = limit_mm_per_prompt["image"]
        self.lora = enable_lora and (max_loras, max_cpu_loras, max_lora_rank, lora_target_modules)

    def generate(self, prompts, sampling_params, use_tqdm, lora_request):
        names = [request and request.lora_name for request in lora_request or []]
        keys = [sorted(prompt) for prompt in prompts]
        print("CALL", self.lora, self.images, names, keys, STREAMS)
        return [Answered(each.max_tokens - LOST) for each in sampling_params]
"""
REQUEST = """
class LoRARequest:
    def __init__(self, lora_name, lora_int_id, lora_path):
        assert lora_int_id > 0 and lora_path
        self.lora_name = lora_name
"""


def package(folder, files):
    """A folder of packages, as pip leaves it."""
    for name, source in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        (place.parent / "__init__.py").touch()
        place.write_text(source)
    return folder


@pytest.fixture
def vllm(tmp_path):
    folder = package(
        tmp_path / "vllm-site",
        {"vllm/__init__.py": "LOST = 0\n" + VLLM, "vllm/lora/request.py": REQUEST},
    )
    metadata = folder / "vllm-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.8.7\n")
    return folder


class Folders:
    """Stands for the checkpoints: nothing reads them."""

    def base(self, text_only):
        return Path(base_folder("tiny"))

    def adapters(self, case):
        return {f"adapter-{i}": f"/adapters/{i}" for i in range(case.adapters)}


@pytest.fixture
def measure(tmp_path):
    """Measures a case of a peer with a folder of packages; the logs are in `out`."""

    def measured(case, name, folder, *arguments):
        given = bench_peers.parser().parse_args(
            ["--out", str(tmp_path / "out"), "--requests", "6", "--repeats", "2", *arguments]
        )
        (row,) = bench_peers.measure(given, Folders(), [case], name, folder, None)
        return row

    return measured


def test_a_peer_gets_the_requests_with_its_documented_settings(vllm, measure, tmp_path):
    row = measure(CASES["language-5"], "vllm", vllm)
    assert row.answer.error is None
    assert row.answer.version == "9.8.7"
    assert set(row.found) == {"requests/s", "output tokens/s"}
    asks = CASES["language-5"].rounds(6, 2048)["all"]
    lengths = sum(ask.tokens for ask in asks)
    assert row.found["output tokens/s"] / row.found["requests/s"] == pytest.approx(lengths / 6)
    calls = [
        line for log in (tmp_path / "out").glob("vllm-*-0.log")
        for line in log.read_text().splitlines() if line.startswith("CALL")
    ]  # fmt: skip
    assert len(calls) == 3  # the warm-up and two repeats
    names = str([ask.adapter for ask in asks])
    assert all("(5, 5, 64, ['q_proj'" in call and f"0 {names}" in call for call in calls)
    tried = [json.loads(line) for line in (tmp_path / "out/bench_peers.jsonl").open()]
    assert [line["error"] for line in tried] == [None, "ValueError: not on this GPU", None]
    assert tried[2]["flags"]["VLLM_LORA_ENABLE_DUAL_STREAM"] == "1"
    for number, streams in ((0, None), (2, "1")):  # a process of its own each
        (log,) = (tmp_path / "out").glob(f"vllm-*-{number}.log")
        last = [line for line in log.read_text().splitlines() if line.startswith("CALL")][-1]
        assert last.endswith(f" {streams}")
    assert row.answer.flags["max_loras"] == 5
    assert "specialize_active_lora" not in row.answer.flags


def test_ours_says_what_it_counted_in_the_last_repeat():
    rounds = {"all": [Ask(f"<image>what is {i}?", 3, None, i) for i in range(5)]}
    job = Job(
        "valora", str(base_folder("tiny")), {}, 8, ["q_proj"], {"policy": "slora"}, rounds,
        device="cpu", context=512, most_requests=8, most_tokens=512, repeats=2,
    )  # fmt: skip
    answers = []
    worker.measure(job, answers.append)
    (answer,) = answers
    assert answer.error is None
    assert len(answer.seconds["all"]) == 2
    counted = answer.counters["all"]
    assert counted["images looked up"] == 5
    assert counted["preemptions"] == 0
    assert 3 <= counted["steps"] <= 5 * 4  # at most one request at a time
    assert 0 < counted["seconds of preparing"] < answer.seconds["all"][1]


def test_one_engine_answers_all_cases_of_the_same_adapters(vllm, tmp_path):
    cases = [CASES[name] for name in ("base", "attention-5", "pictures", "decode", "decode-16")]
    groups = bench_peers.grouped(cases)
    assert [[case.title for case in group] for group in groups] == [
        ["no LoRA", "pictures, no LoRA", "decode, no LoRA"], ["5 on q, k, v, o"],
        ["decode, 16 on q, k, v, o"],
    ]  # fmt: skip
    given = bench_peers.parser().parse_args(["--out", str(tmp_path / "out"), "--requests", "6"])
    rows = bench_peers.measure(given, Folders(), groups[0], "vllm", vllm, None)
    assert [row.case for row in rows] == groups[0]
    assert [len(row.found) for row in rows] == [2, 2, 4]
    (log,) = (tmp_path / "out").glob("*.log")
    assert log.read_text().count("CALL") == 10 * (1 + given.repeats)  # rounds, warm-up and repeats


def test_rows_say_why_a_peer_has_no_figures(vllm, measure, tmp_path):
    source = vllm / "vllm/__init__.py"
    source.write_text(source.read_text().replace("LOST = 0", "LOST = 1"))
    short = measure(CASES["base"], "vllm", vllm)
    tokens = CASES["base"].rounds(6, 2048)["all"][0].tokens
    want = f"RuntimeError: request 0 got {tokens - 1} tokens, expected {tokens}"
    assert short.answer.error == want
    source.write_text("import os; os._exit(7)")
    killed = measure(CASES["base"], "vllm", vllm)
    assert killed.answer.error.startswith("ended with status 7; see ")
    (tmp_path / "empty").mkdir()
    absent = measure(CASES["attention-5"], "sglang", tmp_path / "empty")
    assert absent.answer.error == "ModuleNotFoundError: No module named 'sglang'"
    assert len((tmp_path / "out/bench_peers.jsonl").read_text().splitlines()) == 3
    lines = bench_peers.table([short, killed, absent])
    assert [line.split(" | ")[4] for line in lines[2:]] == [
        row.answer.error for row in (short, killed, absent)
    ]


def test_the_fastest_settings_are_reported_beside_ours():
    case = Case("case")
    measured = (("valora", 0, 30.0), ("vllm", 1, 10.0), ("vllm", 2, 20.0))
    ours, slow, fast = (
        bench_peers.Row(
            case, peer, bench_peers.Answer(version="1", flags={"n": n}), {"requests/s": value}
        )
        for peer, n, value in measured
    )
    failed = bench_peers.Row(case, "vllm", bench_peers.Answer("no"), {})
    assert bench_peers.fastest([slow, failed, fast]) is fast
    assert bench_peers.fastest([failed]) is failed
    line = bench_peers.table([ours, fast])[-1]
    assert "| 20 | 1.50 |" in line
    assert "n=2" in line
    steps = [bench_peers.Row(case, "vllm", slow.answer, {"ms a step, batch 1": v}) for v in (3, 2)]
    assert bench_peers.fastest(steps) is steps[1]


def test_unknown_names_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bench_peers", "base", "--peer", "tgi"])
    with pytest.raises(SystemExit, match="--peer: expected one of valora, vllm, sglang, got tgi"):
        bench_peers.main()
    monkeypatch.setattr(bench_peers, "install", None)  # which is not reached
    for given, said in (
        ("--repeats 0", "--repeats 0: expected 1 or more"),
        ("--variants 0", "--variants 0: expected"), ("--requests -3", "--requests -3: expected"),
        ("--width 64", "--width 64: expected a multiple of 128"),
        ("--device cuda", "no GPU: see"),
    ):  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["bench_peers", "base", "--device", "cpu", *given.split()])
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(SystemExit, match=said):
            bench_peers.main()
    monkeypatch.setattr(sys, "argv", ["bench_peers", "sparse"])
    with pytest.raises(SystemExit, match=r"expected cases of base, .* got sparse"):
        bench_peers.main()
