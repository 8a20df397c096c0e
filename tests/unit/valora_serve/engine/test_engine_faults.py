"""What goes wrong hits its own request, says so, and leaves nothing behind."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.support.engine_reference import (
    Got,
    Reference,
    ask,
    assert_empty,
    collect,
    finish,
    make_engine,
    noise,
    run,
)
from tests.support.lmm_checkpoints import save_llava, save_qwen2_vl
from tests.support.serve_helpers import LANGUAGE, MLP, DomainSpec, make_adapter, make_bundle
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.engine.engine import Engine
from valora_serve.errors import (
    AdapterError,
    CancelledRequestError,
    DeadlineError,
    ImageError,
    RequestError,
    ServeError,
    StoppedError,
    TooLongError,
    UnknownModelError,
)
from valora_serve.orchestrator.registry import POLICIES
from valora_serve.types import Finish, Mode, Output, Request, SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_llava(tmp_path_factory.mktemp("llava"), seed=2))


@pytest.fixture(scope="module")
def adapters(base: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(
            folder / name, base, seed=seed, rank=2 + seed, alpha=5 + seed, strength=0.3,
            targets=LANGUAGE if seed % 2 else MLP,
        )
        for seed, name in enumerate("abcdef")
    }  # fmt: skip


@pytest.fixture(scope="module")
def reference(base: str, adapters: dict[str, Path]) -> Reference:
    return Reference(base, adapters)


@pytest.fixture(scope="module")
def scene(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one domain, which a head answers."""
    spec = {"scene": DomainSpec("adapter-1", "classification", ["x", "y", "z"])}
    folder = tmp_path_factory.mktemp("bundle") / "scene"
    return make_bundle(folder, base, domains=spec, adapters={"adapter-1": {}})


def question(name: str, model: str | None = None, *, tokens: int = 6, **more: Any) -> Request:
    """A text request; its words follow from its name, so that no two have the same prefix."""
    ids = np.random.default_rng(sum(map(ord, name))).integers(10, 2000, 12).tolist()
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(name, model=model, token_ids=ids, **{"sampling": sampling, **more})


def add(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.add(engine.prepare(request))


def check(found: dict[str, Got], reference: Reference, *requests: Request) -> None:
    """They were answered, as if nothing had happened."""
    for request in requests:
        assert found[request.id].error is None
        assert found[request.id].tokens == reference(request).tokens


# ---------------------------------------------------------------------- names and adapters


def test_unknown_names_list_the_known(base: str, adapters: dict[str, Path]) -> None:
    engine = make_engine(base, {"a": adapters["a"], "b": adapters["b"]})
    with pytest.raises(UnknownModelError, match=r"nobody.*a, b"):
        engine.prepare(question("x", "nobody"))
    assert_empty(engine)


def _rewrite(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name] = change(name, tensors[name]).contiguous()
    save_file(tensors, file)


def _truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _configure(folder: Path, **options: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shape": (lambda f: _rewrite(f, lambda _, t: t[:, :-1]), "expected shape"),
    "nan": (lambda f: _rewrite(f, lambda _, t: t + torch.eye(*t.shape) * torch.nan), "NaN"),
    "truncated": (_truncate, "truncated or damaged"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "holds no adapter_model"),
    "no config": (lambda f: (f / "adapter_config.json").write_text("{"), "no readable"),
    "rank": (lambda f: _configure(f, r=3), "expected shape"),
    "kind": (lambda f: _configure(f, peft_type="IA3"), "only LORA"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_adapter_is_refused_and_nothing_changes(
    base: str, adapters: dict[str, Path], reference: Reference, tmp_path: Path, damage: str
) -> None:
    folder = Path(shutil.copytree(adapters["c"], tmp_path / "c"))
    engine = make_engine(base, {"a": adapters["a"]})
    add(engine, running := question("running", "a"))
    found: dict[str, Got] = {}
    collect(engine.step(), found)
    before = engine.stats()
    change, message = DAMAGES[damage]
    change(folder)
    with pytest.raises(AdapterError, match=message):
        engine.load(folder, "a")
    with pytest.raises(UnknownModelError):
        engine.prepare(question("x", "c"))
    after = engine.stats()
    assert (before.pages_free, before.adapters_known) == (after.pages_free, after.adapters_known)
    check(finish(engine, found), reference, running)
    assert_empty(engine)


def test_an_adapter_of_another_base_model(
    base: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = str(save_qwen2_vl(tmp_path_factory.mktemp("qwen")))
    folder = tmp_path_factory.mktemp("other")
    foreign = make_adapter(folder / "qwen", other, seed=1, targets=r".*visual.*\.qkv")
    engine = make_engine(base)
    with pytest.raises(AdapterError, match="base model that it was trained on"):
        engine.load(foreign, "foreign")
    larger = make_adapter(folder / "tiny", "tiny", seed=1, targets=LANGUAGE)
    with pytest.raises(AdapterError, match="base model that it was trained on"):
        engine.load(larger, "larger")
    bundle = make_bundle(folder / "bundle", base)
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["base"]["sha256"] = "0" * 64
    (bundle / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(AdapterError):
        engine.load(bundle)
    assert [model.kind for model in engine.store.models()] == ["base"]
    assert_empty(engine)


def test_a_rank_or_size_that_there_is_no_room_for(base: str, adapters: dict[str, Path]) -> None:
    engine = make_engine(base, max_rank=4)
    with pytest.raises(AdapterError, match=r"rank 7.*larger max_rank"):
        engine.load(adapters["f"], "f")
    engine = make_engine(base, pages=3)
    with pytest.raises(AdapterError, match=r"needs \d+ pages.*more memory"):
        engine.load(adapters["f"], "f")


def test_a_changed_file_of_a_bundle(base: str, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle", base)
    engine = make_engine(base)
    head = bundle / "heads" / "scene.safetensors"
    tensors = load_file(head)
    tensors["bias"] += 1e-3
    save_file(tensors, head, {"kind": "classification"})
    with pytest.raises(AdapterError, match="scene"):
        engine.load(bundle)
    assert [model.kind for model in engine.store.models()] == ["base"]


@pytest.mark.parametrize("change", ["truncated", "changed", "gone"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_file_that_was_changed_when_it_is_needed_again(
    base: str,
    adapters: dict[str, Path],
    reference: Reference,
    tmp_path: Path,
    change: str,
    overlap: bool,
) -> None:
    """The host holds one adapter, the device two: others are read from their files again."""
    folder = Path(shutil.copytree(adapters["a"], tmp_path / "a"))
    engine = make_engine(
        base, {"a": folder, "b": adapters["b"], "c": adapters["c"]},
        host_bytes=1, slots=2, overlap=overlap,
    )  # fmt: skip
    if change == "truncated":
        _truncate(folder)
    elif change == "changed":
        _rewrite(folder, lambda _, tensor: tensor * 1.01)
    else:
        shutil.rmtree(folder)
    requests = [question(name, name) for name in "abc"] + [question("base")]
    lost = question("lost", "a")
    found = run(engine, [*requests, lost])
    for name in ("a", "lost"):
        assert found[name].finish is Finish.ERROR
        assert isinstance(found[name].error, AdapterError)
    check(found, reference, *requests[1:])
    assert_empty(engine)
    # The file is put right: the adapter comes back without a restart.
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapters["a"], folder)
    again = question("again", "a")
    check(run(engine, [again]), reference, again)


def test_an_adapter_is_read_again_from_where_it_came_last(
    base: str, adapters: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapters["a"], tmp_path / "a"))
    engine = make_engine(base, {"a": folder}, host_bytes=1, slots=1)
    engine.load(adapters["a"], "a")
    shutil.rmtree(folder)
    for name in "aba":
        if name == "b":
            engine.load(adapters["b"], "b")
        one = question(name, name)
        check(run(engine, [one]), reference, one)


@pytest.mark.parametrize("policy", POLICIES)
def test_more_adapters_than_fit_and_a_base_request(
    base: str, adapters: dict[str, Path], reference: Reference, policy: str
) -> None:
    engine = make_engine(base, adapters, policy=policy, slots=2, max_adapters=2, overlap=True)
    requests = [question(f"{name}{n}", name) for n in range(2) for name in "abcdef"]
    requests.insert(5, question("base"))
    check(run(engine, requests, together=8), reference, *requests)
    assert_empty(engine)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_place_for_adapters(
    base: str, adapters: dict[str, Path], reference: Reference, policy: str
) -> None:
    """The merged one must leave when another is asked for, although it is pinned."""
    engine = make_engine(base, adapters, policy=policy, slots=1, max_adapters=1)
    for name in "aba":
        requests = [question(f"{name}{n}", name, tokens=12) for n in range(4)]
        check(run(engine, requests), reference, *requests)
    requests = [question("x", "c"), question("y"), question("z", "d")]
    check(run(engine, requests), reference, *requests)
    assert_empty(engine)


def test_pages_for_one_adapter_at_a_time(
    base: str, adapters: dict[str, Path], reference: Reference
) -> None:
    whole = make_engine(base, adapters)
    most = max(whole.adapters.pages(key) for key in whole.named.known())
    engine = make_engine(base, adapters, pages=most + 4, policy="valora")
    requests = [question(f"{name}{n}", name, tokens=12) for name in "fe" for n in range(3)]
    for one in requests:
        check(run(engine, [one]), reference, one)
    check(run(engine, requests), reference, *requests)
    assert_empty(engine)


def test_folders_of_the_same_content(
    base: str, adapters: dict[str, Path], reference: Reference, tmp_path: Path
) -> None:
    copied = Path(shutil.copytree(adapters["a"], tmp_path / "copy"))
    engine = make_engine(base, {"a": adapters["a"], "again": copied})
    assert len(engine.adapters) == 1
    first, second = question("first", "a"), question("second", "a")
    found = run(engine, [first, replace(second, model="again")])
    check(found, reference, first, second)
    engine.named.unregister("a", bundle=False)
    third = question("third", "a")
    check(run(engine, [replace(third, model="again")]), reference, third)
    engine.named.unregister("again", bundle=False)
    assert len(engine.adapters) == 0
    assert_empty(engine)


def test_the_same_name_with_other_content(
    base: str, adapters: dict[str, Path], reference: Reference
) -> None:
    engine = make_engine(base, {"x": adapters["a"]}, block_size=4)
    same = question("same")
    assert (
        run(engine, [replace(same, model="x")])["same"].tokens
        == reference(replace(same, model="a")).tokens
    )
    add(engine, replace(same, id="old", model="x"))
    late = engine.prepare(replace(same, id="late", model="x"))
    engine.load(adapters["b"], "x")
    engine.add(late)  # it was prepared for the old one, which still has a request
    add(engine, replace(same, id="new", model="x"))
    later = engine.prepare(replace(same, id="later", model="x"))
    found = finish(engine)
    assert found["old"].tokens == reference(replace(same, model="a")).tokens
    assert found["new"].tokens == reference(replace(same, model="b")).tokens
    assert found["late"].tokens == found["old"].tokens
    assert len(engine.adapters) == 1
    engine.load(adapters["c"], "x")
    with pytest.raises(RequestError, match="ask again"):
        engine.add(later)
    assert_empty(engine)


# ---------------------------------------------------------------------- requests


def test_prompts_that_do_not_fit(base: str, reference: Reference) -> None:
    engine = make_engine(base, context_length=40, pages=5, block_size=8)
    long = replace(question("long"), token_ids=list(range(10, 50)))
    with pytest.raises(TooLongError, match="40 tokens, the context length is 40"):
        add(engine, long)
    with pytest.raises(TooLongError, match=r"pages.*fewer tokens"):
        add(engine, question("large", tokens=28))
    with pytest.raises(RequestError, match="max_tokens: expected at least 1"):
        add(engine, question("none", tokens=0))
    with pytest.raises(RequestError, match="at least one token"):
        engine.prepare(replace(question("empty"), token_ids=[]))
    with pytest.raises(RequestError, match="expected 0 to"):
        engine.prepare(replace(question("wrong"), token_ids=[10**6]))
    with pytest.raises(RequestError, match="nothing is asked"):
        engine.prepare(Request("nothing"))
    with pytest.raises(RequestError, match="names 1 images, but 0 were sent"):
        engine.prepare(Request("x", messages=ask("Look", images=1)))
    with pytest.raises(RequestError):
        engine.prepare(Request("x", messages=ask("Look"), images=[noise(9, 9, 1)]))
    with pytest.raises(RequestError):
        engine.prepare(Request("x", messages=ask("Look", images=1), images=[noise(9, 9, 1)] * 2))
    assert_empty(engine)
    fits = question("fits")
    check(run(engine, [fits]), reference, fits)


@pytest.mark.parametrize("policy", POLICIES)
def test_few_pages(base: str, adapters: dict[str, Path], reference: Reference, policy: str) -> None:
    """Far fewer than all together need."""
    whole = make_engine(base, {"a": adapters["a"], "b": adapters["b"]})
    needed = [whole.adapters.pages(key) for key in whole.named.known()]
    engine = make_engine(
        base, {"a": adapters["a"], "b": adapters["b"]}, policy=policy, overlap=True,
        pages=max(needed) + 7, block_size=16,
    )  # fmt: skip
    requests = [
        question(f"{n}", [None, "a", "b"][n % 3], tokens=[5, 40, 60][n % 3]) for n in range(6)
    ]
    check(run(engine, requests), reference, *requests)
    assert_empty(engine)


def test_an_id_that_is_in_use(base: str, reference: Reference) -> None:
    engine = make_engine(base)
    add(engine, one := question("one"))
    again = engine.prepare(question("one"))
    with pytest.raises(RequestError, match="in use"):
        engine.add(again)
    found: dict[str, Got] = {}
    collect(engine.step(), found)
    with pytest.raises(RequestError, match="in use"):
        engine.add(again)
    check(finish(engine, found), reference, one)
    engine.add(again)
    check(finish(engine), reference, one)
    assert_empty(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("when", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["text", "image", "head"])
def test_cancelled(
    base: str, reference: Reference, scene: Path, overlap: bool, when: int, kind: str
) -> None:
    """Before it starts, between two chunks of its prompt, while it generates; the id is free."""
    engine = make_engine(base, chunk=10, overlap=overlap, policy="valora")
    one = question("one")
    if kind == "image":
        one = replace(one, token_ids=None, messages=ask("Look", images=1), images=[noise(9, 9, 1)])
    if kind == "head":
        engine.load(scene)
        one = replace(one, model="scene")
    beside = question("beside", tokens=9)
    add(engine, one, beside)
    found: dict[str, Got] = {}
    for _ in range(when):
        collect(engine.step(), found)
    over = one.id in found and found[one.id].finish is not None
    assert engine.cancel("one") is not over
    assert engine.cancel("one") is False
    assert engine.cancel("nobody") is False
    other = question("two")
    again = replace(other, id="one")
    add(engine, again)
    seen: dict[str, Got] = {}
    collect(engine.step(), seen)
    if not over:
        first = seen.pop("one")
        assert first.finish is Finish.CANCELLED
        assert isinstance(first.error, CancelledRequestError)
    finish(engine, seen)
    assert seen["one"].tokens == reference(other).tokens
    assert found.get("beside", Got()).tokens + seen["beside"].tokens == reference(beside).tokens
    assert_empty(engine)


def test_deadlines(base: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    engine = make_engine(base, policy="unmerge_only")
    soon, later, never = (
        question("soon", deadline=2.0), question("later", deadline=50.0), question("never")
    )  # fmt: skip
    add(engine, soon, later, never)
    found: dict[str, Got] = {}
    collect(engine.step(), found)
    now[0] += 3.0
    collect(engine.step(), found)
    assert found["soon"].finish is Finish.ERROR
    assert isinstance(found["soon"].error, DeadlineError)
    check(finish(engine, found), reference, later, never)
    # Another request of the same id has nothing to do with the old one's deadline.
    add(engine, replace(later, deadline=None))
    found = {}
    collect(engine.step(), found)
    now[0] += 100.0
    check(finish(engine, found), reference, later)
    add(engine, question("at once", deadline=0.0))
    assert isinstance(finish(engine)["at once"].error, DeadlineError)
    assert_empty(engine)


class Broken:
    """A constraint that fails at some token, in one of its two ways."""

    def __init__(self, place: int, way: str) -> None:
        self._left, self._way = place, way

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        if self._left == 0 and self._way == "mask":
            raise KeyError("no such state")
        if self._left == 0 and self._way == "nothing":
            allowed[:] = False

    def advance(self, _token: int) -> None:
        if self._left == 0 and self._way == "advance":
            raise KeyError("no such state")
        self._left -= 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["mask", "advance", "nothing"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_constraint_that_fails(
    base: str, reference: Reference, overlap: bool, way: str, place: int
) -> None:
    engine = make_engine(base, overlap=overlap)
    one, beside = question("one"), question("beside")
    bad = replace(one, sampling=replace(one.sampling, constraint=Broken(place, way)))
    found = run(engine, [bad, beside])
    assert found["one"].finish is Finish.ERROR
    assert "allows no token" in str(found["one"].error) or "no such state" in str(
        found["one"].error
    )
    assert found["one"].tokens == reference(one).tokens[:place]
    check(found, reference, beside)
    assert_empty(engine)


class Only:
    """A constraint to these tokens, in turn; the end must come after them."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def mask(self, allowed: NDArray[np.bool_]) -> None:
        allowed[:] = False
        allowed[self._tokens[0]] = True

    def advance(self, token: int) -> None:
        assert token == self._tokens.pop(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_constraints_and_min_tokens(base: str, reference: Reference, overlap: bool) -> None:
    engine = make_engine(base, overlap=overlap)
    end = min(engine.lmm.stop_ids)
    beside = question("beside")

    def constrained(name: str, tokens: list[int], **options: Any) -> Request:
        sampling = SamplingParams(max_tokens=9, constraint=Only(tokens), **options)
        return replace(question(name), sampling=sampling)

    asked = [
        constrained("greedy", [11, 12, end]),
        constrained("drawn", [13, end], temperature=1.0, seed=1),
        constrained("early", [14, end], min_tokens=5),  # nothing else is allowed
        beside,
    ]
    found = run(engine, asked)
    check(found, reference, beside)
    assert found["greedy"].tokens == [11, 12, end]
    assert found["drawn"].tokens == [13, end]
    assert found["early"].tokens == [14, end]
    assert found["greedy"].finish is Finish.STOP
    one = question("one", tokens=8)
    wanted = reference(one).tokens
    engine.lmm.stop_ids = frozenset(wanted[1:3])
    sampling = SamplingParams(max_tokens=8, min_tokens=4)
    found = run(engine, [replace(one, sampling=sampling)])
    assert len(found["one"].tokens) >= 5
    assert not set(found["one"].tokens[:4]) & engine.lmm.stop_ids
    assert_empty(engine)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, MemoryError])
def test_an_image_that_the_encoder_cannot_encode(
    base: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(base, policy="unmerge_only")
    reference = Reference(base, {})
    requests = [
        replace(
            question(f"{n}"), token_ids=None, messages=ask("Look", images=n % 3),
            images=[noise(20, 20, n + i) for i in range(n % 3)],
        )
        for n in range(5)
    ]  # fmt: skip
    bad = replace(
        requests[2], id="bad", images=[noise(20, 20, 2), noise(20, 20, 77)]
    )  # one of them is also another's
    prepared = engine.prepare(bad)
    wrong = prepared.prompt.visuals[1].tensors["pixel_values"]
    encode = engine.runner.encode

    def fails(visuals: Any, slots: Any) -> Any:
        if any(torch.equal(one.tensors["pixel_values"], wrong) for one in visuals):
            raise error("cannot")
        return encode(visuals, slots)

    monkeypatch.setattr(engine.runner, "encode", fails)
    add(engine, *requests[:3])
    engine.add(prepared)
    add(engine, *requests[3:])
    found = finish(engine)
    assert isinstance(found["bad"].error, ImageError)
    check(found, reference, *requests)
    assert engine.images.held_bytes == sum(
        one.embeddings.numel() * 4 for one in engine.images._kept.values()
    )
    assert_empty(engine)


def test_the_image_cache_keeps_its_bound(base: str) -> None:
    one = 16 * 64 * 4  # bytes of an encoded image
    engine = make_engine(base, image_cache_bytes=2 * one + 1, prefix_cache=False)
    for n in (1, 2, 1, 3, 1, 2):
        asked = Request(f"{n}", messages=ask("Look", images=1), images=[noise(20, 20, n)],
                        sampling=SamplingParams(max_tokens=1))  # fmt: skip
        run(engine, [asked])
        assert engine.images.held_bytes == len(engine.images) * one <= 2 * one
    assert engine.stats().image_hits == 2  # the least recently used one goes
    engine = make_engine(base, image_cache_bytes=one - 1)
    run(engine, [asked])
    assert not len(engine.images)


# ---------------------------------------------------------------------- behind an event loop


async def outputs_of(engine: AsyncEngine, request: Request) -> Got:
    found: dict[str, Got] = {}
    async for output in engine.generate(request):
        collect([output], found)
    return found[request.id]


def served(
    base: str,
    adapters: dict[str, Path],
    body: Callable[[AsyncEngine, Engine], Any],
    **settings: Any,
) -> Any:
    """Run a coroutine with an engine in its thread, and close that."""
    inner = make_engine(base, adapters, **settings)

    async def main() -> Any:
        engine = AsyncEngine(inner)
        try:
            return await asyncio.wait_for(body(engine, inner), 60)
        finally:
            await engine.close()

    result = asyncio.run(main())
    assert not inner.busy
    return result


def test_many_clients(base: str, adapters: dict[str, Path], reference: Reference) -> None:
    requests = [question(f"{n}", [None, "a", "b", "c"][n % 4]) for n in range(20)]

    async def body(engine: AsyncEngine, inner: Engine) -> list[Got]:
        found = await asyncio.gather(*(outputs_of(engine, one) for one in requests))
        assert engine.healthy
        assert_empty(inner)
        return list(found)

    found = served(base, adapters, body, overlap=True)
    check(dict(zip((one.id for one in requests), found, strict=True)), reference, *requests)


def test_errors_come_as_outputs(base: str, adapters: dict[str, Path]) -> None:
    async def body(engine: AsyncEngine, inner: Engine) -> None:
        got = await outputs_of(engine, question("x", "nobody"))
        assert isinstance(got.error, UnknownModelError)
        got = await outputs_of(engine, question("x", tokens=0))
        assert isinstance(got.error, RequestError)
        got = await outputs_of(engine, Request("x", messages=ask("y"), images=["no image"]))  # type: ignore[list-item]
        assert isinstance(got.error, ServeError)
        both = await asyncio.gather(*(outputs_of(engine, question("same")) for _ in range(2)))
        assert sorted(str(one.finish) for one in both) == ["error", "length"]
        with pytest.raises(UnknownModelError):
            await engine.unload_adapter("nobody")
        with pytest.raises(AdapterError):
            await engine.load_adapter("x", Path("/nowhere"))
        assert_empty(inner)

    served(base, adapters, body)


def test_closing_the_iterator_cancels(base: str, adapters: dict[str, Path]) -> None:
    async def body(engine: AsyncEngine, inner: Engine) -> None:
        long = question("long", "a", tokens=500)
        stream = engine.generate(long)
        first = await anext(stream)
        assert first.token_ids
        await stream.aclose()  # type: ignore[attr-defined]
        # Its id is taken until it has ended, and nothing of it reaches the next of this id.
        for _ in range(500):
            got = await outputs_of(engine, replace(question("other"), id="long"))
            if got.error is None:
                break
            assert "in use" in str(got.error)
            await asyncio.sleep(0.002)
        assert got.finish is Finish.LENGTH
        assert len(got.tokens) == 6
        assert inner.stats().finished["cancelled"] == 1
        task = asyncio.create_task(outputs_of(engine, replace(long, id="task")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(500):
            if inner.stats().finished["cancelled"] == 2:
                break
            await asyncio.sleep(0.002)
        assert not engine._queues
        assert await engine.cancel("task") is False
        assert_empty(inner)

    served(base, adapters, body, overlap=True)


def test_cancelling_by_id(base: str, adapters: dict[str, Path]) -> None:
    async def body(engine: AsyncEngine, inner: Engine) -> None:
        stream = engine.generate(question("long", tokens=500))
        await anext(stream)
        assert await engine.cancel("long") is True
        last = [output async for output in stream][-1]
        assert last.finish is Finish.CANCELLED
        assert isinstance(last.error, CancelledRequestError)
        assert_empty(inner)

    served(base, adapters, body)


@pytest.mark.parametrize("books", [False, True])
def test_a_failure_of_the_engine_fails_everybody(
    base: str, adapters: dict[str, Path], books: bool
) -> None:
    """Also if its books are so wrong that it cannot even end its requests."""

    async def body(engine: AsyncEngine, inner: Engine) -> None:
        streams = [engine.generate(question(f"{n}", tokens=400)) for n in range(3)]
        for stream in streams:
            await anext(stream)

        def fails(*_: object) -> None:
            raise RuntimeError("device lost")

        if books:
            inner._answers.end = fails  # type: ignore[method-assign, assignment]
        inner.runner.step = fails  # type: ignore[method-assign, assignment]
        for stream in streams:
            last = [output async for output in stream][-1]
            assert last.finish is Finish.ERROR
            assert isinstance(last.error, StoppedError)
            assert "device lost" in str(last.error)
        for _ in range(500):
            if not engine._thread.is_alive():
                break
            await asyncio.sleep(0.002)
        assert not engine.healthy
        got = await outputs_of(engine, question("late"))
        assert isinstance(got.error, StoppedError)
        with pytest.raises(StoppedError):
            await engine.load_adapter("x", adapters["a"])
        with pytest.raises(StoppedError):
            await engine.cancel("x")
        inner.requests.waiting.clear()
        inner.requests.running.clear()
        inner._answers.take()

    served(base, {}, body)


def test_closing_lets_running_requests_finish(base: str, reference: Reference) -> None:
    async def main() -> None:
        engine = AsyncEngine(make_engine(base))
        task = asyncio.create_task(outputs_of(engine, one := question("one", tokens=30)))
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(engine.close(drain=20.0))
        await asyncio.sleep(0)
        got = await outputs_of(engine, question("late"))
        assert isinstance(got.error, StoppedError)
        assert (await task).tokens == reference(one).tokens
        await closing
        assert not engine.healthy
        engine = AsyncEngine(make_engine(base))
        task = asyncio.create_task(outputs_of(engine, question("one", tokens=800)))
        await asyncio.sleep(0.05)
        await engine.close()
        assert isinstance((await task).error, StoppedError)

    asyncio.run(main())


def test_loading_and_unloading_behind_the_event_loop(
    base: str, adapters: dict[str, Path], reference: Reference
) -> None:
    async def body(engine: AsyncEngine, inner: Engine) -> None:
        async def clients() -> None:
            for n in range(15):
                one = question(f"client {n}", [None, "a"][n % 2])
                assert (await outputs_of(engine, one)).tokens == reference(one).tokens

        running = asyncio.create_task(clients())
        for name in "bcd":
            model = await engine.load_adapter(name, adapters[name])
            assert (model.name, model.kind) == (name, "adapter")
            one = question(f"of {name}", name)
            assert (await outputs_of(engine, one)).tokens == reference(one).tokens
            await engine.unload_adapter(name)
            assert isinstance((await outputs_of(engine, one)).error, UnknownModelError)
        await running
        assert [model.name for model in engine.models()] == [base, "a"]
        assert_empty(inner)

    served(base, {"a": adapters["a"]}, body, overlap=True)


def test_what_is_said_of_a_step(base: str, adapters: dict[str, Path]) -> None:
    engine = make_engine(base, {"a": adapters["a"]}, policy="merge_only")
    found = run(engine, [question("one", "a"), question("two", "a")])
    last: Output | None = found["one"].last
    assert last is not None
    assert last.mode is Mode.MERGED
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.completion) == (12, 6)
    times = last.times
    assert times is not None
    assert times.arrival <= (times.started or 0) <= (times.first_token or 0) <= times.finished  # type: ignore[operator]
    stats = engine.stats()
    assert (stats.mode, stats.finished) == (Mode.MERGED, {"length": 2})
    assert stats.merged_adapter is not None
    assert_empty(engine)
