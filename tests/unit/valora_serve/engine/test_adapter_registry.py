"""Adapters that are refused, replaced or read again; merges that are refused or fail."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine_reference import (
    add_requests,
    assert_empty,
    check_answers,
    finish,
    fix_buffers,
    make_engine,
    question,
    run,
    tokens,
)
from tests.support.serve_helpers import make_adapter, rewrite
from valora_kernels.merge import MergeableWeights
from valora_serve.errors import AdapterError, QuarantinedError, UnknownModelError
from valora_serve.types import Mode


@pytest.mark.parametrize(
    ("change", "overlap"), [("truncated", True), ("changed", False), ("gone", True)]
)
def test_a_file_that_was_changed_when_it_is_needed_again(
    base, adapters, reference, tmp_path, change, overlap
):
    """Host memory has room for one adapter and the device for two; files are read again."""
    folder = Path(shutil.copytree(adapters["a"], tmp_path / "a"))
    three = {"a": folder, "b": adapters["b"], "c": adapters["c"]}
    engine = make_engine(base, three, host_bytes=1, slots=2, overlap=overlap)
    file = folder / "adapter_model.safetensors"
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "changed":
        rewrite(folder, lambda _, tensor: tensor * 1.01)
    else:
        shutil.rmtree(folder)
    requests = [question(name, name) for name in "abc"] + [question("base")]
    lost = question("lost", "a")
    found = run(engine, [*requests, lost])
    assert all(isinstance(found[name].error, AdapterError) for name in ("a", "lost"))
    check_answers(found, reference, *requests[1:])
    # The file is put right: the adapter comes back without a restart.
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapters["a"], folder)
    again = question("again", "a")
    check_answers(run(engine, [again]), reference, again)


def test_an_adapter_is_read_again_from_where_it_came_last(base, adapters, reference, tmp_path):
    folder = Path(shutil.copytree(adapters["a"], tmp_path / "a"))
    engine = make_engine(base, {"a": folder}, host_bytes=1, slots=1)
    engine.load("adapter", adapters["a"], "a")
    shutil.rmtree(folder)
    for name in "aba":
        if name == "b":
            engine.load("adapter", adapters["b"], "b")
        one = question(name, name)
        check_answers(run(engine, [one]), reference, one)
        stats = engine.stats()
        assert stats.on_device == (name,)
        assert set(stats.on_disk) <= {"a", "b"} - {name}
    assert engine.stats().on_disk == ("b",)


def test_the_same_name_with_other_content(base, adapters, reference):
    engine = make_engine(base, {"x": adapters["a"]}, block_size=4)
    same = question("same", "x")
    a, b = (reference(replace(same, model=name)).tokens for name in "ab")
    assert run(engine, [same])["same"].tokens == a
    add_requests(engine, replace(same, id="old"))
    late = engine.prepare(replace(same, id="late"))
    engine.load("adapter", adapters["b"], "x")
    engine.add(late)  # it was prepared for the old one, which still has a request
    add_requests(engine, replace(same, id="new"))
    later = engine.prepare(replace(same, id="later"))
    assert tokens(finish(engine)) == {"old": a, "late": a, "new": b}
    assert len(engine.adapters) == 1
    engine.load("adapter", adapters["c"], "x")
    with pytest.raises(UnknownModelError, match="ask again"):
        engine.add(later)
    assert_empty(engine)


def test_no_memory_for_the_copy_that_merging_needs(base, adapters, reference, monkeypatch):
    fix_buffers(monkeypatch)
    engine = make_engine(base, policy="merge_only", prompt_graphs=True, max_tokens=64, chunk=64)
    engine.warm_up()
    groups = engine.lmm.linears.groups
    before = {name: group.weights for name, group in groups.items()}

    def keep(self):
        raise torch.OutOfMemoryError("too little")

    with monkeypatch.context() as failing:
        failing.setattr(MergeableWeights, "keep", keep)
        for _ in range(2):
            with pytest.raises(AdapterError, match="too little memory for a copy of the weights"):
                engine.load("adapter", adapters["a"], "a")
    moved = [name for name, weights in before.items() if groups[name].weights is not weights]
    assert moved
    for weight in (weight for name in moved for weight in before[name]):
        weight.fill_(torch.nan)  # graphs that were captured before would read it
    assert [model.kind for model in engine.store.models()] == ["base"]
    assert (engine.stats().adapters_known, len(engine.adapters)) == (0, 0)
    asked = [question(f"base {n}", None, tokens=4) for n in range(2)]
    check_answers(run(engine, asked), reference, *asked)
    engine.load("adapter", adapters["a"], "a")
    asked = [question(f"a {n}", "a", tokens=4) for n in range(2)]
    check_answers(run(engine, asked), reference, *asked)
    assert engine.stats().merged_adapter == "a"


def digest(engine):
    found = hashlib.sha256()
    for group in engine.lmm.linears.groups.values():
        for weight in group.weights:
            found.update(weight.contiguous().numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def unchecked(monkeypatch):
    """Lets every adapter in, to see what stands behind the check at load."""
    monkeypatch.setattr("valora_serve.engine.adapter_registry.check_effect", lambda *_: None)


@pytest.fixture
def infinite(base, tmp_path):
    """An adapter that passes as finite in fp32, and whose B·A does not."""
    folder = make_adapter(tmp_path / "infinite", base, seed=99, rank=4, alpha=8, strength=0.3)
    return rewrite(folder, lambda name, tensor: tensor * (1e37 if "lora_B" in name else 1e7))


def key_of(engine, name):
    return engine.registry.key(engine.store.adapters()[name])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("before", [None, "a"])
def test_an_infinite_merge_is_taken_back(base, adapters, infinite, before):
    engine = make_engine(base, {"a": adapters["a"], "bad": infinite}, policy="valora")
    pristine = digest(engine)
    for name in ("a", "bad"):
        assert engine.adapters.load(key_of(engine, name))
    if before is not None:
        assert engine.merge_state.switch(Mode.MERGED, key_of(engine, before))
        assert digest(engine) != pristine
    assert not engine.merge_state.switch(Mode.MIXTURE, key_of(engine, "bad"))
    assert digest(engine) == pristine
    assert (engine.merge_state.adapter, engine.merge_state.mode) == (None, Mode.UNMERGED)
    assert list(engine.stats().quarantined) == ["bad"]
    assert_empty(engine)
    # Never tried again, until it is loaded again.
    switches = engine.merge_state.switches
    assert not engine.merge_state.switch(Mode.MIXTURE, key_of(engine, "bad"))
    assert engine.merge_state.switches == switches
    assert engine.merge_state.switch(Mode.MIXTURE, key_of(engine, "a"))


@pytest.mark.usefixtures("unchecked")
def test_loading_again_lifts_the_quarantine(base, adapters, reference, infinite):
    engine = make_engine(base, {"x": infinite}, policy="merge_only")
    found = run(engine, [question("one", "x")])
    error = found["one"].error
    assert isinstance(error, QuarantinedError) and error.code == "adapter_quarantined"
    with pytest.raises(QuarantinedError, match=r"x is quarantined.*loading.*again lifts"):
        engine.add(engine.prepare(question("later", "x")))
    # The same content is found out again, other content is served.
    engine.load("adapter", infinite, "x")
    assert engine.stats().quarantined == {}
    assert isinstance(run(engine, [question("two", "x")])["two"].error, QuarantinedError)
    engine.load("adapter", adapters["a"], "x")
    assert engine.stats().quarantined == {}
    assert (engine.adapters.unmergeable, engine.adapters.proven) == ({}, set())
    found = run(engine, [question("three", "x")])
    assert found["three"].tokens == reference(question("three", "a")).tokens
    engine.load("adapter", infinite, "bad")
    run(engine, [question("four", "bad")])
    assert set(engine.stats().quarantined) == {"bad"}
    engine.registry.unregister("adapter", "bad")
    assert engine.stats().quarantined == engine.adapters.unmergeable == {}


def test_a_merge_that_fails_is_taken_back(base, adapters, reference, monkeypatch):
    engine = make_engine(base, {"a": adapters["a"], "b": adapters["b"]}, policy="merge_only")
    pristine = digest(engine)
    merge = MergeableWeights.merge
    slots = []

    def fails_for_the_first(self, slot, *rest):
        slots.append(slot)
        merge(self, slot, *rest)
        if slot == slots[0]:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(MergeableWeights, "merge", fails_for_the_first)
    asked = [question("one", "a"), question("two", "b"), question("three")]
    check_answers(run(engine, asked), reference, *asked)
    assert slots.count(slots[0]) == 1 and len(set(slots)) == 2
    (reason,) = engine.adapters.unmergeable.values()
    assert "no memory" in reason
    assert engine.stats().quarantined == {}  # it is served unmerged
    engine.merge_state.switch(Mode.UNMERGED, None)
    assert digest(engine) == pristine
    assert_empty(engine)


def test_a_merged_adapter_is_barred_when_the_base_model_breaks_beside_it(
    base, adapters, reference, monkeypatch
):
    """What no bound foresaw: the first answer is an error, and everything after it is right."""
    engine = make_engine(base, {"a": adapters["a"]}, policy="valora", block_size=4)
    key = key_of(engine, "a")
    assert engine.adapters.load(key)
    assert engine.merge_state.switch(Mode.MIXTURE, key)
    asked = question("base")
    with monkeypatch.context() as patch:
        decide, mixture = engine.policy.decide, {"mode": Mode.MIXTURE, "merged": key}
        patch.setattr(engine.policy, "decide", lambda view: replace(decide(view), **mixture))
        for weights in engine.lmm.linears.merged:
            weights.live.fill_(torch.inf)
        found = run(engine, [asked])
    error = found["base"].error
    assert (error.status, error.code) == (500, "non_finite_output")
    assert list(engine.adapters.unmergeable) == [key]
    # Neither the weights nor the prefix cache hold any of it.
    again = [question("base"), question("a", "a")]
    check_answers(run(engine, again), reference, *again)
    assert engine.stats().merged_adapter is None
