"""Two GPUs with NCCL and CUDA graphs against one GPU, in bf16, in every mode."""

import os
import signal
import time

import pytest
import torch

from tests.bench.valora_serve.split_models import ATTENTION, MLP, save_adapters, save_base
from tests.gpu.valora_serve.engine.test_engine_gpu import Forced
from tests.support.engine_reference import run
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.errors import StoppedError
from valora_serve.types import Mode, Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TOLERANCE = 0.06
"""Of a log probability: twice the tolerance of one GPU against fp32, as both sides round."""

LAYERS, WIDTH, RANKS = 2, 1024, [64, 8, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("split")
    save_base(place / "base", "cuda", LAYERS, WIDTH)
    save_adapters(place, LAYERS, WIDTH, RANKS, (*ATTENTION, *MLP))
    return place


def make(folder, size, way="replicate_a"):
    engine = Engine(
        EngineSettings(
            base=str(folder / "base"), device="cuda", tensor_parallel=size, lora_parallel=way,
            policy="valora", pages=800, max_requests=16, max_tokens=256, chunk=64, max_rank=64,
            slots=4,
        )
    )  # fmt: skip
    for place in sorted(folder.glob("adapter-*")):
        engine.load("adapter", place, place.name)
    engine.warm_up()
    return engine


def scores(engine, mode):
    """Log probabilities of fixed prompts, and of the tokens that follow them."""
    engine.policy = Forced(engine.policy, (mode,))
    asked, generator = [], torch.Generator().manual_seed(2)
    for number in range(12):
        length = [5, 90, 200, 33][number % 4]
        name = [None, "adapter-0", "adapter-1", "adapter-2"][(number * number + number // 4) % 4]
        ids = torch.randint(3, 2000, (length,), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1
        )
        asked.append(Request(str(number), name, token_ids=ids, sampling=params))
    found = run(engine, asked)
    engine.merge_state.switch(Mode.UNMERGED, None)
    prompts = {key: torch.tensor(got.prompt.logprobs) for key, got in found.items()}
    steps = {
        key: [(p.chosen.token, p.chosen.logprob) for p in got.logprobs]
        for key, got in found.items()
    }
    return prompts, steps


@pytest.mark.parametrize("way", ["slora", "replicate_a"])
def test_two_gpus_answer_as_one(folder, way):
    one = make(folder, 1)
    wanted = {mode: scores(one, mode) for mode in (Mode.UNMERGED, Mode.MIXTURE)}
    one.close()
    one.lmm.linears.release()
    two = make(folder, 2, way)
    try:
        for mode, (prompts, steps) in wanted.items():
            found, told = scores(two, mode)
            for key, want in prompts.items():
                worst = (found[key] - want).abs().max().item()
                assert worst <= TOLERANCE, (way, mode, key, worst)
                # Decode steps: as long as both have chosen the same tokens.
                for (token, value), (other, close) in zip(steps[key], told[key], strict=True):
                    if token != other:
                        break
                    assert abs(value - close) <= TOLERANCE
    finally:
        two.close()


def test_a_killed_process_ends_the_engine_with_one_message(folder):
    engine = make(folder, 2)
    try:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        engine.add(engine.prepare(Request("r", token_ids=[5, 6, 7], sampling=params)))
        for _ in range(5):
            engine.step()
        os.kill(engine.workers.processes[0].pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(StoppedError, match="was killed by SIGKILL: restart the server"):
            while engine.busy:
                engine.step()
        assert time.monotonic() - began < 30
    finally:
        engine.close()


def test_more_gpus_than_there_are_are_refused(folder):
    with pytest.raises(Exception, match="GPUs are asked for, and this machine has"):
        make(folder, torch.cuda.device_count() + 1)
