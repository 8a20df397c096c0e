"""Thousands of random requests, cancellations, loads and unloads; in the end nothing is left."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.engine_reference import (
    ask,
    assert_empty,
    collect,
    finish,
    make_engine,
    noise,
    run,
)
from tests.support.serve_helpers import DOMAINS, make_tenants
from valora_serve import errors
from valora_serve.orchestrator import batching
from valora_serve.orchestrator.decision import PolicySettings
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Finish, Request, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

NAMES = ("one", "two", "three")  # of adapters; what they stand for changes while requests run
GAP = 1e-3  # by how much a token must be likelier than the next one to be the same everywhere


@dataclass
class World:
    """What can be asked and loaded, and what a quiet engine answers."""

    base: str
    contents: list[Path]  # adapters that a name can stand for
    bundle: Path
    prompts: list[Request]  # without a model
    answers: dict = field(default_factory=dict)  # tokens by (prompt, content), if beyond doubt
    logits: dict = field(default_factory=dict)  # what heads say, by (prompt, domain)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    base, adapters, bundle = make_tenants(folder)
    contents = list(adapters.values())
    draw = random.Random(1)
    prompts = []
    for n in range(10):
        images = [noise(20 + n, 30, n + i) for i in range(n % 3)]
        words = " ".join(draw.choice(("what", "is", "this", "thing")) for _ in range(1 + 3 * n))
        messages = ask(words, images=len(images))
        sampling = SamplingParams(max_tokens=(2, 7, 24)[n % 3], logprobs=2)
        prompts.append(Request("", messages=messages, images=images, sampling=sampling))
    made = World(base, contents, bundle, prompts)
    engine = make_engine(base, adapters, policy="unmerge_only")
    engine.load(bundle)
    for name in (None, *adapters, "caption"):
        asked = [replace(one, id=f"{n}", model=name) for n, one in enumerate(prompts)]
        for key, got in run(engine, asked).items():
            gaps = [one.top[0].logprob - one.top[1].logprob for one in got.logprobs]
            if min(gaps) > GAP:
                made.answers[int(key), name] = got.tokens
    assert len(made.answers) > 50
    for domain in ("scene", "plates"):
        asked = [replace(one, id=f"{n}", model=domain) for n, one in enumerate(prompts)]
        asked = [one for one in asked if one.images or domain == "scene"]
        for key, got in run(engine, asked).items():
            made.logits[int(key), domain] = got.last.head.logits
    assert_empty(engine)
    return made


class Breaks:
    """A constraint that lets some tokens pass and then fails."""

    def __init__(self, after):
        self._left = after

    def mask(self, _allowed):
        if not self._left:
            raise IndexError("no state")

    def advance(self, _token):
        self._left -= 1


class Soak:
    """A crowd of clients."""

    def __init__(self, world, engine, seed):
        self.world, self.engine = world, engine
        self.draw = random.Random(seed)
        self.registry = {}
        self.bundled = False
        self.found = {}
        self.expected = {}
        self.live = []
        self.count = 0
        self.refused = Counter()

    def ask(self):
        """One client more."""
        draw, world = self.draw, self.world
        number = draw.randrange(len(world.prompts))
        prompt = world.prompts[number]
        name = draw.choice((None, *NAMES, *NAMES, "scene", "plates", "caption", "nobody"))
        content = self.registry.get(name or "", name if name in DOMAINS else None)
        kind = "answer"
        sampling = replace(prompt.sampling, logprobs=draw.choice((None, 0, 2)))
        deadline = None
        match draw.randrange(20):
            case 0 | 1 | 2:
                kind = "drawn"
                sampling = replace(
                    sampling, temperature=draw.uniform(0.1, 2), top_p=draw.uniform(0.1, 1),
                    top_k=draw.choice((0, 5)), seed=draw.choice((None, 3)),
                    stop=draw.choice(((), ("a",), ("e ", "th"))), min_tokens=draw.randrange(4),
                )  # fmt: skip
            case 3:
                kind = "breaks"
                sampling = replace(sampling, constraint=Breaks(draw.randrange(3)))
            case 4:
                kind, deadline = "late", draw.choice((0.0, 0.01))
            case 5:
                kind = "wrong"
                prompt = replace(prompt, images=[*prompt.images, noise(9, 9, 1)])
        head = draw.random() < 0.9
        if name in ("scene", "plates") and head and kind == "answer":
            kind = "head"
        self.count += 1
        request = replace(
            prompt, id=f"{self.count}", model=name, sampling=sampling, deadline=deadline, head=head
        )
        try:
            self.engine.add(self.engine.prepare(request))
        except errors.ServeError as error:
            self.refused[type(error).__name__] += 1
            known = name is None or name in self.registry or (self.bundled and name in DOMAINS)
            if known:
                assert isinstance(error, errors.RequestError), error
                assert kind == "wrong" or (name == "plates" and head), error
            else:
                assert isinstance(error, errors.UnknownModelError)
            return
        assert kind != "wrong"
        self.expected[request.id] = (number, content, kind)
        self.live.append(request.id)

    def change(self):
        """Load something, also under a name that has requests, or unload it."""
        draw, engine = self.draw, self.engine
        if draw.random() < 0.2:
            if self.bundled:
                engine.registry.unregister("bundle", "pack")
            else:
                engine.load(self.world.bundle)
            self.bundled = not self.bundled
            return
        name = draw.choice(NAMES)
        if name in self.registry and draw.random() < 0.4:
            engine.registry.unregister("adapter", name)
            del self.registry[name]
            return
        folder = draw.choice(self.world.contents)
        engine.load(folder, name)
        self.registry[name] = folder.name
        if self.bundled:
            with pytest.raises(errors.BusyError):
                engine.registry.unregister("adapter", "pack/adapter-1")
        with pytest.raises(errors.AdapterError):
            engine.load(folder / "none", name)

    def go(self, requests):
        """Until so many have been asked and answered."""
        draw, engine = self.draw, self.engine
        most = engine.settings.max_requests
        while self.count < requests:
            if len(self.live) < 2 * most:
                for _ in range(draw.choice((0, 1, 2, 12))):
                    self.ask()
            if draw.random() < 0.3 and self.live:
                engine.cancel(draw.choice(self.live))
            if draw.random() < 0.08 or not self.registry:
                self.change()
            collect(engine.step(), self.found)
            self.check()
        finish(engine, self.found)
        self.check()
        assert not self.live

    def check(self):
        """What has ended was answered rightly; the books agree."""
        for request_id in list(self.live):
            got = self.found.get(request_id)
            if got is not None and got.finish is not None:
                self.live.remove(request_id)
                self.judge(request_id, got)
        stats = self.engine.stats()
        assert stats.pages_free + stats.pages_kv + stats.pages_adapters == stats.pages_total
        assert stats.running + stats.waiting <= len(self.live)
        assert sum(self.engine.requests.wanted.values()) <= len(self.live)

    def judge(self, request_id, got):
        number, content, kind = self.expected[request_id]
        if got.finish is Finish.ERROR:
            wanted = {"breaks": errors.ServeError, "late": errors.DeadlineError}
            allowed = wanted.get(kind, errors.OverloadedError)
            assert isinstance(got.error, allowed), (kind, got.error)
            return
        if got.finish is Finish.CANCELLED:
            assert isinstance(got.error, errors.CancelledRequestError)
        tokens = self.world.answers.get((number, content))
        if kind == "head":
            if got.finish is Finish.HEAD:
                known = self.world.logits[number, content]
                assert np.allclose(got.last.head.logits, known, rtol=1e-3, atol=1e-3)
        elif kind == "answer" and tokens is not None:
            assert got.tokens == tokens[: len(got.tokens)]
            assert got.finish is Finish.CANCELLED or len(got.tokens) == len(tokens)

    def close(self):
        """Unload everything: not a page is taken any more."""
        engine = self.engine
        for name in self.registry:
            engine.registry.unregister("adapter", name)
        if self.bundled:
            engine.registry.unregister("bundle", "pack")
        assert_empty(engine)
        stats = engine.stats()
        assert (stats.pages_free, stats.pages_adapters) == (stats.pages_total, 0)
        assert (stats.adapters_known, stats.adapters_resident) == (0, ())
        assert stats.merged_adapter is None
        pristine = self.engine.lmm.linears.merged
        assert all(bool((held.live == held.pristine).all()) for held in pristine)
        # Once more from the start, on an engine that has seen it all.
        asked = [replace(one, id=f"{n}") for n, one in enumerate(self.world.prompts)]
        for n, got in run(engine, asked).items():
            tokens = self.world.answers.get((int(n), None))
            assert tokens is None or got.tokens == tokens
        assert_empty(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_soak(world, policy, overlap, monkeypatch):
    monkeypatch.setattr(batching, "HEADROOM", 0)  # else hardly any request is preempted
    # So few pages that running requests must give theirs back.
    engine = make_engine(world.base, {one.name: one for one in world.contents}, block_size=8)
    pages = max(engine.adapters.pages(key) for key in engine.registry.known()) + 60
    chosen = PolicySettings(clusters=2) if overlap else PolicySettings(theta=0.02, patience=0.5)
    engine = make_engine(
        world.base, policy=policy, policy_settings=chosen, overlap=overlap, pages=pages,
        max_requests=24, block_size=8, chunk=11, max_tokens=96, max_adapters=3, slots=4,
        host_bytes=1 << 17, image_cache_bytes=1 << 12,
    )  # fmt: skip
    crowd = Soak(world, engine, 3 + overlap)
    crowd.go(400 if overlap else 250)
    stats = engine.stats()
    assert stats.prefix_hits > 0
    assert stats.image_hits > 0
    assert stats.preemptions > 0 or (policy, overlap) != ("valora", True)
    assert stats.switches > 0 or policy != "merge_only"
    assert crowd.refused["UnknownModelError"] > 0
    assert {"stop", "length", "head", "cancelled", "error"} >= set(stats.finished)
    assert len(stats.finished) >= 4
    crowd.close()
