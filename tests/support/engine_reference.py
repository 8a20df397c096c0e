"""Engines to test, and the expected answers: `generate` on PEFT's model of each adapter."""

import asyncio
import copy
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from peft import PeftModel
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

from valora_data.contract.base_model import base_folder
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.engine.engine import Engine
from valora_serve.engine.settings import EngineSettings
from valora_serve.model.attention.torch_backend import TorchBackend, TorchPlan
from valora_serve.model.lmm import Lmm
from valora_serve.model.work import CROWDED, DECODE, KERNELS, PROMPT
from valora_serve.orchestrator.cost_model import load_or_estimate
from valora_serve.types import Output, PromptLogprobs, Request, SamplingParams, TokenLogprobs


def noise(width, height, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def ask(text, *, images=0, videos=0):
    """Return a chat turn: a text with images and videos between its halves."""
    half = len(text) // 2
    parts = [{"type": "text", "text": text[:half]}]
    parts += [{"type": "image"}] * images + [{"type": "video"}] * videos
    parts += [{"type": "text", "text": text[half:]}]
    return [{"role": "user", "content": parts}]


def auto_class(source):
    """Return the class of transformers that loads a model, of images or of text alone."""
    config = AutoConfig.from_pretrained(source)
    words = type(config) not in AutoModelForImageTextToText._model_mapping
    return AutoModelForCausalLM if words else AutoModelForImageTextToText


def load_processor(source):
    """Load the processor of a model of images, or the tokenizer of one of text alone."""
    words = auto_class(source) is AutoModelForCausalLM
    return (AutoTokenizer if words else AutoProcessor).from_pretrained(source)


@dataclass(frozen=True)
class Expected:
    tokens: list[int]  # including the stop token if there is one
    logits: torch.Tensor  # [tokens, vocabulary] float32, that each token was chosen from

    def logprobs(self):
        return self.logits.log_softmax(-1)


def key_of(request):
    """What a greedy answer depends on."""
    return (
        request.model, request.text, repr(request.messages), request.sampling.max_tokens,
        tuple(image.tobytes() for image in request.images),
        tuple(frame.tobytes() for video in request.videos for frame in video),
        tuple(request.token_ids or ()), request.sampling.ignore_eos,
    )  # fmt: skip


class Reference:
    """The base model, with every adapter (folders by name) loaded by PEFT."""

    def __init__(self, base, adapters, dtype=torch.float32, device="cpu"):
        source = base_folder(base)
        self.processor = load_processor(source)
        model = auto_class(source).from_pretrained(source, dtype=dtype)
        self.model = model.eval().requires_grad_(False).to(device)
        for name, folder in adapters.items():
            if isinstance(self.model, PeftModel):
                self.model.load_adapter(str(folder), name)
            else:
                self.model = PeftModel.from_pretrained(self.model, str(folder), name)
        self._known = {}

    def __call__(self, request):
        key = key_of(request)
        if key not in self._known:
            self._known[key] = self._answer(request)
        return self._known[key]

    def inputs(self, request):
        """Return the inputs that transformers' processor makes of a request."""
        if request.token_ids is not None:
            ids = torch.tensor([list(request.token_ids)])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        text = request.text
        if text is None:
            turns = list(request.messages or ())
            if not hasattr(self.processor, "image_processor"):
                turns = [
                    {**turn, "content": "".join(part["text"] for part in turn["content"])}
                    for turn in turns
                ]
            text = self.processor.apply_chat_template(
                turns, add_generation_prompt=True, tokenize=False
            )
        kwargs = {"images": list(request.images)} if request.images else {}
        if request.videos:
            kwargs["videos"] = [np.stack([np.asarray(one) for one in v]) for v in request.videos]
            kwargs["videos_kwargs"] = {"do_sample_frames": False}
        bos = getattr(self.processor, "tokenizer", self.processor).bos_token
        special = not (bos and text.startswith(bos))
        kwargs |= {"return_tensors": "pt", "add_special_tokens": special}
        return self.processor(text=[text], **kwargs)

    @contextmanager
    def _of(self, request):
        """Have a request's adapter, and yield its inputs where the model computes."""
        inputs = {name: value.to(self.model.device) for name, value in self.inputs(request).items()}
        if not isinstance(self.model, PeftModel):
            yield inputs
        elif request.model is None:
            with self.model.disable_adapter():
                yield inputs
        else:
            self.model.set_adapter(request.model)
            yield inputs

    def _answer(self, request):
        extra = {"eos_token_id": -1} if request.sampling.ignore_eos else {}
        extra |= {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
        with self._of(request) as inputs:
            most = request.sampling.max_tokens
            found = self.model.generate(**inputs, max_new_tokens=most, **extra)
        new = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Expected(new, torch.cat(found.logits).float())

    @torch.no_grad()
    def score(self, request, answer):
        """Return log probabilities of a prompt's tokens from the second on, and of an answer's."""
        with self._of(request) as inputs:
            more = {"input_ids": answer, "attention_mask": [1] * len(answer)}
            more["mm_token_type_ids"] = [0] * len(answer)
            for name in more.keys() & inputs.keys():
                inputs[name] = torch.cat([inputs[name], inputs[name].new_tensor([more[name]])], 1)
            logits = self.model(**inputs).logits[0, :-1].float()
            ids = inputs["input_ids"][0, 1:]
        return logits.log_softmax(-1).gather(1, ids[:, None])[:, 0].cpu()


@dataclass
class Got:
    """Collected outputs of a request, `last` the newest one."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: PromptLogprobs | None = None
    last: Output | None = None

    @property
    def finish(self):
        return None if self.last is None else self.last.finish

    @property
    def error(self):
        return None if self.last is None else self.last.error

    @property
    def top(self):
        """Log probabilities of the likeliest tokens, [tokens, as many as were wanted]."""
        return np.array([[top.logprob for top in one.top] for one in self.logprobs], np.float32)


@lru_cache(maxsize=2)
def _loaded(base, dtype):
    source = base_folder(base)
    model = auto_class(source).from_pretrained(source, dtype=getattr(torch, dtype))
    return model, load_processor(source)


def make_engine(base, adapters=None, *, fresh=False, **settings):
    """Return an engine with adapters, on the CPU in fp32, with the estimated cost model.

    A `fresh` one loads the base model itself, which takes longer.
    """
    chosen = {
        "pages": 512, "max_requests": 16, "max_tokens": 512, "chunk": 256, "max_adapters": 8,
        "slots": 8, "max_rank": 16, "profile": False, "dtype": "float32", "device": "cpu",
    } | settings  # fmt: skip
    cost = load_or_estimate(Path("/nowhere"), "a machine", "a model")
    lmm = None
    if not fresh:
        model, processor = _loaded(base, chosen["dtype"])
        lmm = Lmm(base, copy.deepcopy(model), processor, torch.device("cpu"))
    engine = Engine(EngineSettings(base=base, **chosen), lmm, cost)
    for name, folder in (adapters or {}).items():
        engine.load("adapter", folder, name)
    return engine


def fix_buffers(monkeypatch):
    """Let plain torch have fixed buffers for decode steps, too, as graphs want them."""
    monkeypatch.setattr(TorchBackend, "decode_plan", lambda self, _: TorchPlan(self._cache))


def capture(runner, terms=(0, 1, 2)):
    """Capture all graphs; returns how many graphs of steps there are."""
    for wanted in chain(*runner.preparations(terms)):
        if wanted.kind != KERNELS:
            runner.prepare(wanted)
    steps = (DECODE, PROMPT, CROWDED)
    return sum(len(runner._graphs[kind].held) for kind in steps)


def collect(outputs, into):
    """Add outputs to those that were collected before."""
    for output in outputs:
        got = into.setdefault(output.id, Got())
        assert got.finish is None, f"{output.id} goes on after its end"
        got.tokens += output.token_ids
        got.text += output.text
        got.logprobs += output.logprobs
        got.prompt = output.prompt or got.prompt
        got.last = output


def steps(engine, count=1, into=None):
    """Collect the outputs of some steps."""
    found = {} if into is None else into
    for _ in range(count):
        collect(engine.step(), found)
    return found


def finish(engine, into=None, *, most=3000):
    """Step until the engine has no requests and outputs left, nor anything that they held."""
    found = {} if into is None else into
    for _ in range(most):
        if not engine.busy:
            assert_empty(engine)
            return found
        collect(engine.step(), found)
    left = [one.id for one in engine.requests.all()]
    raise AssertionError(f"after {most} steps still unanswered: {left}; {engine.stats()}")


def run(engine, requests, *, together=None):
    """Add requests to an engine and step until they are answered.

    If so many are added `together`, the others come one by one in every other step.
    """
    found = {}
    waiting = [engine.prepare(request) for request in requests]
    for prepared in waiting[:together]:
        engine.add(prepared)
    for prepared in [] if together is None else waiting[together:]:
        steps(engine, 2, found)
        engine.add(prepared)
    return finish(engine, found)


def tokens(found):
    return {name: got.tokens for name, got in found.items()}


def question(name, model=None, *, tokens=6, **more):
    """Return a text request; its tokens depend on its name, so that prefixes differ."""
    ids = np.random.default_rng(sum(map(ord, name))).integers(10, 2000, 12).tolist()
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, model=model, token_ids=ids, **{"sampling": sampling, **more})


def add_requests(engine, *requests):
    for request in requests:
        engine.add(engine.prepare(request))


def check_answers(found, reference, *requests, within=None):
    """Check tokens, and to a relative error `within` the log probabilities of the likeliest."""
    for request in requests:
        got, expected = found[request.id], reference(request)
        assert got.error is None, request
        assert got.tokens == expected.tokens, request
        if within is not None:
            wanted = expected.logprobs().topk(request.sampling.logprobs).values.numpy()
            assert relative(got.top, wanted) < within, request


def assert_empty(engine):
    """Check that no request is left, only the merged adapter is pinned, and no page is lost."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_kv) == (0, 0, 0)
    assert len(engine.requests.free_slots) == engine.settings.max_requests
    assert not engine.adapters.wanted
    held = stats.pages_adapters + stats.pages_contexts
    assert stats.pages_free + held == stats.pages_total
    assert not engine.prefixes.wanted
    assert not any(entry.users for entry in engine.prefixes._entries.values())
    users = {key: entry.users for key, entry in engine.adapters._entries.items() if entry.users}
    assert users == {key: 1 for key in (engine.merge_state.adapter,) if key is not None}


async def until(done):
    for _ in range(2000):
        if done():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it has not come to that")


async def all_of(client, request):
    """Collect the outputs of a request, and of those beside it, by name."""
    found = {}
    async for output in client.generate(request):
        collect([output], found)
    return found


async def outputs_of(client, request):
    return (await all_of(client, request))[request.id]


def with_client(engine, use):
    """Use an engine behind an event loop, in a coroutine that ends in time, and close it."""

    async def main():
        client = AsyncEngine(engine)
        try:
            return await asyncio.wait_for(use(client), 300)
        finally:
            await client.close()

    return asyncio.run(main())


def serve(made, request, done=lambda: True):
    """Run an engine behind an event loop: warm it up, answer a request, and idle until `done`."""

    async def body(engine):
        await engine.warm_up()
        async for output in engine.generate(request):
            assert output.error is None
        end = time.monotonic() + 60
        while not done() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert engine.healthy

    with_client(made, body)


def relative(found, wanted):
    """Return the norm of the difference over the norm of `wanted`."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
