"""An engine that needs no model: deterministic answers, real bookkeeping of what runs.

It answers a generating model with words derived from the request, one token a step, and a domain
with a head with results derived from the image's size, so that a test can tell whose answer it
sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from valora_data.contract.results import BoxesResult, Detection, LabelResult
from valora_serve import errors
from valora_serve.types import (
    EngineStats,
    Finish,
    Logprob,
    Mode,
    Output,
    PromptLogprobs,
    ServedModel,
    Times,
    TokenLogprobs,
    Usage,
    joined,
)

BASE = ServedModel("tiny", "base", "tiny")
ADAPTER = ServedModel(
    "adapter-1", "adapter", "bundles/d", "tiny", "adapter-1", rank=8, bundle="d@1"
)
PERSON = ServedModel(
    "person", "domain", "bundles/d", "adapter-1", "adapter-1", head="detection", boxes=True,
    task="detection", labels=("person",), metric="f1@0.5", accuracy=0.87, required=0.8,
    prompt="detect person", bundle="d@1", rank=8,
)  # fmt: skip
SCENE = ServedModel(
    "scene", "domain", "bundles/d", "adapter-1", "adapter-1", head="classification",
    task="classification", labels=("street", "beach"), metric="top1", accuracy=0.9, required=0.8,
    prompt="what is this?", bundle="d@1", rank=8,
)  # fmt: skip
CAPTION = ServedModel(
    "caption", "domain", "bundles/d", "adapter-1", "adapter-1", task="caption", metric="cider",
    prompt="describe the image.", bundle="d@1", rank=8,
)  # fmt: skip
WORDS = ["a", "red", "star", "and", "a", "blue", "ring", "over", "the", "green", "key"]


class FakeEngine:
    """An `EngineClient` without a model.

    Args:
        slots: Most requests that run at a time; others wait.
        step: Seconds per token.
        tokenizer: Tokenizer for JSON constraints.
        last: Event (of `threading`) for which the last token of each written answer waits.

    Attributes:
        script: Text that constrained answers begin with, as far as their constraint allows.
    """

    def __init__(self, *, slots=1000, step=0.0, tokenizer=None, last=None):
        self._served = {m.name: m for m in (BASE, ADAPTER, PERSON, SCENE, CAPTION)}
        self._slots = asyncio.Semaphore(slots)
        self._step = step
        self._last = last
        self._tokenizer = tokenizer
        self._finished = {}
        self._texts = None
        self.script, self._scripts = "", {}
        self.running = {}
        self.waiting = set()
        self.asked = []
        self.cancelled = []
        self.healthy, self.peers = True, None
        self.closed = False
        self.refuse = None
        self.base = "tiny"
        self.context_length, self.dtype = 2048, "float32"

    @property
    def tokenizer(self):
        return self._tokenizer

    async def generate(self, request):
        for one in (request, *request.also):
            async with contextlib.aclosing(self._generate(one)) as outputs:
                if not one.stream:
                    yield joined([output async for output in outputs])
                async for output in outputs:
                    yield output

    async def _generate(self, request):
        arrival = time.monotonic()
        self.asked.append(request)
        ended = False
        try:
            error = self.refuse or self._problem(request)
            if error is not None:
                ended = True
                yield Output(request.id, finish=Finish.ERROR, error=error)
                return
            self.waiting.add(request.id)
            try:
                async with asyncio.timeout(request.deadline):
                    await self._slots.acquire()
            except TimeoutError:
                ended = True
                late = errors.DeadlineError("The deadline passed while waiting")
                yield Output(request.id, finish=Finish.ERROR, error=late)
                return
            finally:
                self.waiting.discard(request.id)
            try:
                self.running[request.id] = request
                async for output in self._answer(request, arrival):
                    if output.finish is not None:
                        ended = True
                        self.running.pop(request.id, None)
                    yield output
            finally:
                self.running.pop(request.id, None)
                self._slots.release()
        finally:
            if not ended:
                self.cancelled.append(request.id)

    def _problem(self, request):
        if request.model is not None and request.model not in self._served:
            return errors.UnknownModelError(f"There is no {request.model}")
        size = len(request.text or "") + len(request.token_ids or ())
        if size > self.context_length:
            return errors.TooLongError(
                f"The prompt has {size} tokens, more than {self.context_length}"
            )
        if request.token_ids is not None and max(request.token_ids, default=0) >= 2048:
            return errors.RequestError("token_ids holds a token that is none")
        return None

    async def _answer(self, request, arrival):
        started = time.monotonic()
        model = self._served[request.model or "tiny"]
        images = [*request.images, *(video[0] for video in request.videos)]
        prompt = 5 + 64 * len(images)
        if request.embed:
            text = request.text or repr(request.token_ids or request.messages)
            logits = np.array([[len(text), len(images), sum(map(ord, text)) % 97]], np.float32)
            now = time.monotonic()
            head = LabelResult(kind="embedding", label="", logits=logits)
            times, usage = Times(arrival, started, now, now), Usage(len(text), 0)
            yield Output(request.id, finish=Finish.HEAD, head=head, usage=usage, times=times)
            return
        if model.head is not None and request.head:
            await asyncio.sleep(self._step)
            now = time.monotonic()
            head = self._head(model, images, request.min_score)
            times, usage = Times(arrival, started, now, now), Usage(prompt, 0, 64 * len(images))
            yield Output(request.id, finish=Finish.HEAD, head=head, usage=usage, times=times,
                         mode=Mode.MERGED)  # fmt: skip
            return
        count = request.sampling.max_tokens or 16
        first = None
        finish = Finish.LENGTH
        made = chars = 0
        for index in range(count):
            await asyncio.sleep(self._step)
            while index + 1 == count and self._last is not None and not self._last.is_set():
                await asyncio.sleep(0.005)
            first = first or time.monotonic()
            word, sampling = self._word(request, index), request.sampling
            over = index >= len(WORDS) and not sampling.ignore_eos and sampling.constraint is None
            if word is None or over or any(stop in word for stop in sampling.stop):
                finish = Finish.STOP
                break
            made += 1
            yield Output(
                request.id, word, (index,), self._logprobs(request, word, index, chars),
                self._prompt(request) if index == 0 else None, mode=Mode.UNMERGED,
            )  # fmt: skip
            chars += len(word)
        usage = Usage(prompt, made, 64 * len(images), cached=1)
        times = Times(arrival, started, first, time.monotonic())
        yield Output(request.id, finish=finish, usage=usage, times=times, mode=Mode.UNMERGED)

    def _word(self, request, index):
        constraint = request.sampling.constraint
        if constraint is None:
            seed = request.sampling.seed or 0
            return ("" if index == 0 else " ") + WORDS[(index + seed) % len(WORDS)]
        allowed = np.ones(len(self._tokenizer), dtype=bool)
        constraint.mask(allowed)
        choices = np.flatnonzero(allowed)
        end = self._tokenizer.eos_token_id
        token = end if end in choices else int(choices[index % 7 % len(choices)])
        if self._texts is None:
            self._texts = [self._tokenizer.decode([one]) for one in range(len(self._tokenizer))]
        left = self.script if index == 0 else self._scripts[request.id]
        fitting = [one for one in choices if self._texts[one] and left.startswith(self._texts[one])]
        if fitting:
            token = int(max(fitting, key=lambda one: len(self._texts[one])))
        self._scripts[request.id] = left.removeprefix(self._texts[token]) if fitting else ""
        constraint.advance(token)
        return None if token == end else self._texts[token]

    @staticmethod
    def _logprobs(request, word, index, chars):
        wanted = request.sampling.logprobs
        if wanted is None:
            return ()
        chosen = Logprob(index, word, math.log(0.5), word.encode())
        top = (chosen, Logprob(99, "?", -math.inf), Logprob(98, "!", -2.0))[:wanted]
        return (TokenLogprobs(chosen, top, chars),)

    def _prompt(self, request):
        """Log probability −i/8 for token i; the alternatives are tokens 65 on."""
        count = request.sampling.prompt_logprobs
        if count is None:
            return None
        ids = request.token_ids or self._tokenizer(request.text)["input_ids"]
        logprobs = -np.arange(1, len(ids), dtype=np.float32) / 8
        logprobs[1:2] = -math.inf
        top = np.tile(np.arange(65, 65 + count), (len(ids) - 1, 1))
        return PromptLogprobs(np.array(ids), logprobs, top, -top.astype(np.float32))

    @staticmethod
    def _head(model, images, min_score):
        if model.head == "detection":
            found = []
            for image in images:
                w, h = image.size
                both = (
                    Detection(model.labels[0], 0.9, (0.0, 0.0, w / 2, h / 2)),
                    Detection(model.labels[0], 0.4, (w / 4, h / 4, w, h)),
                )
                least = 0.5 if min_score is None else min_score
                found.append(tuple(d for d in both if d.confidence >= least))
            return BoxesResult(kind="detection", detections=tuple(found))
        wide = images[0].width >= images[0].height if images else True
        scores = (0.75, 0.25) if wide else (0.125, 0.875)
        confidences = dict(zip(model.labels, scores, strict=True))
        label = max(confidences, key=confidences.get)
        return LabelResult(kind=model.head, label=label, confidences=confidences)

    def models(self):
        return list(self._served.values())

    def stats(self):
        return EngineStats(
            running=len(self.running), waiting=len(self.waiting), mode=Mode.MIXTURE,
            merged_adapter="adapter-1", switches=3, steps=17, pages_total=100, pages_free=70,
            pages_kv=20, pages_adapters=10, adapters_resident=("adapter-1",), adapters_known=1,
            prefix_hits=5, prefix_queries=10, image_hits=1, image_queries=4, prompt_tokens=1000,
            generated_tokens=100,
        )  # fmt: skip

    async def load(self, kind, folder, name="", *, decode_only=False):
        if kind == "bundle":
            return self._load_bundle(folder)
        if kind == "context":
            return [self._load_context(name, folder)]
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            if not (folder / file).is_file():  # as the catalogue, which opens no pipe either
                raise errors.AdapterError(f"{folder} is no adapter, as it holds no {file}")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config.get("base_model_name_or_path", "tiny") != "tiny":
            raise errors.AdapterError(
                f"adapter {name} is for {config['base_model_name_or_path']}, not for tiny"
            )
        if (folder / "adapter_model.safetensors").read_bytes()[:4] == b"nope":
            raise errors.AdapterError(f"adapter {name} is damaged: export it again")
        if name in self._served and self._served[name].bundle:
            raise errors.AdapterError(f"{name} is a name that something else has")
        made = replace(ADAPTER, name=name, adapter=name, root=str(folder), bundle=None)
        made = replace(made, decode_only=decode_only)
        self._served[name] = made
        return [made]

    async def make_context(self, wanted, folder):
        if not wanted.document.strip():
            raise errors.RequestError(
                f"context {wanted.name}: the document is empty: send its text"
            )
        folder.mkdir(parents=True)
        facts = [wanted.document, wanted.form, wanted.adapter]
        (folder / "context.json").write_text(json.dumps(facts))
        (folder / "memory.safetensors").write_bytes(wanted.document.encode())

    def _load_context(self, name, folder):
        try:
            document, form, adapter = json.loads((folder / "context.json").read_text())
        except OSError as error:
            raise errors.AdapterError(f"{folder} holds no context: make it again") from error
        if adapter is not None and adapter not in self._served:
            raise errors.MissingAdapterError(f"{name} needs {adapter}: load it first", adapter)
        made = ServedModel(
            name, "domain", str(folder), "tiny", adapter=adapter, task="context", prompt="{}",
            prompted=True, form=form, memory_tokens=4, memory_bytes=64,
            source_tokens=len(document.split()),
        )  # fmt: skip
        self._served[name] = made
        return made

    async def unload(self, kind, name):
        if kind == "bundle":
            every = self._served.items()
            kept = {k: m for k, m in every if not f"{m.bundle}@".startswith(f"{name}@")}
            if len(kept) == len(self._served):
                raise errors.UnknownModelError(f"no bundle is named {name}: known are none")
            self._served = kept
            return
        found = self._served.get(name)
        if found is None or (found.form is None if kind == "context" else found.kind != "adapter"):
            raise errors.UnknownModelError(f"no {kind} is named {name}: known are none")
        if found.bundle:
            raise errors.BusyError(f"{kind} {name} belongs to bundle {found.bundle}")
        del self._served[name]

    def _load_bundle(self, folder):
        if not (file := Path(folder) / "bundle.json").is_file():
            raise errors.AdapterError(f"{folder} is no bundle, as it holds no {file.name}")
        manifest = json.loads(file.read_text())
        if manifest.get("base") not in ("tiny", {"id": "tiny", "sha256": "0"}):
            raise errors.AdapterError("bundle is for another base model")
        name = f"{manifest['name']}@1"
        made = [
            replace(PERSON, name=domain, bundle=name, root=str(folder), media=facts.get("media"))
            for domain, facts in manifest["domains"].items()
        ]
        kept = {key: model for key, model in self._served.items() if model.bundle != name}
        if taken := kept.keys() & {model.name for model in made}:
            raise errors.AdapterError(f"{taken} are names that something else has")
        self._served = kept | {model.name: model for model in made}
        return made

    def count_tokens(self, text):
        return len(text.split())

    async def warm_up(self):
        pass

    async def close(self, drain=0.0):
        self.closed = True
        self.healthy = False
