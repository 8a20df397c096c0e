"""Adapters and bundles that are refused, replaced, read again, or have several names."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine_reference import (
    add_requests,
    assert_empty,
    check_answers,
    finish,
    make_engine,
    question,
    run,
)
from valora_kernels.merge import MergeableWeights
from valora_serve.errors import AdapterError, RequestError
from valora_serve.model.attention.torch_backend import TorchBackend, TorchMixedPlan
from valora_serve.types import Finish

pytestmark = pytest.mark.usefixtures("one_thread")


def _rewrite(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name] = change(name, tensors[name]).contiguous()
    save_file(tensors, file)


def _truncate(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("change", "overlap"), [("truncated", True), ("changed", False), ("gone", True)]
)
def test_a_file_that_was_changed_when_it_is_needed_again(
    base, adapters, reference, tmp_path, change, overlap
):
    """Host memory has room for one adapter and the device for two; files are read again."""
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
    check_answers(found, reference, *requests[1:])
    assert_empty(engine)
    # The file is put right: the adapter comes back without a restart.
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapters["a"], folder)
    again = question("again", "a")
    check_answers(run(engine, [again]), reference, again)


def test_an_adapter_is_read_again_from_where_it_came_last(base, adapters, reference, tmp_path):
    folder = Path(shutil.copytree(adapters["a"], tmp_path / "a"))
    engine = make_engine(base, {"a": folder}, host_bytes=1, slots=1)
    engine.load(adapters["a"], "a")
    shutil.rmtree(folder)
    for name in "aba":
        if name == "b":
            engine.load(adapters["b"], "b")
        one = question(name, name)
        check_answers(run(engine, [one]), reference, one)
        stats = engine.stats()
        assert stats.on_device == (name,)
        assert set(stats.on_disk) <= {"a", "b"} - {name}
    assert engine.stats().on_disk == ("b",)


def test_the_same_name_with_other_content(base, adapters, reference):
    engine = make_engine(base, {"x": adapters["a"]}, block_size=4)
    same = question("same")
    assert (
        run(engine, [replace(same, model="x")])["same"].tokens
        == reference(replace(same, model="a")).tokens
    )
    add_requests(engine, replace(same, id="old", model="x"))
    late = engine.prepare(replace(same, id="late", model="x"))
    engine.load(adapters["b"], "x")
    engine.add(late)  # it was prepared for the old one, which still has a request
    add_requests(engine, replace(same, id="new", model="x"))
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


def test_no_memory_for_the_copy_that_merging_needs(base, adapters, reference, monkeypatch):
    plan = lambda self, sequences: TorchMixedPlan(self._cache)  # noqa: E731
    monkeypatch.setattr(TorchBackend, "decode_plan", plan)
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
                engine.load(adapters["a"], "a")
    moved = [name for name, weights in before.items() if groups[name].weights is not weights]
    assert moved
    for weight in (weight for name in moved for weight in before[name]):
        weight.fill_(torch.nan)  # graphs that were captured before would read it
    assert [model.kind for model in engine.store.models()] == ["base"]
    assert (engine.stats().adapters_known, len(engine.adapters)) == (0, 0)
    asked = [question(f"base {n}", None, tokens=4) for n in range(2)]
    check_answers(run(engine, asked), reference, *asked)
    engine.load(adapters["a"], "a")
    asked = [question(f"a {n}", "a", tokens=4) for n in range(2)]
    check_answers(run(engine, asked), reference, *asked)
    assert engine.stats().merged_adapter == "a"
