"""Kernels that are compiled together at the start: those that graphs launch, and nothing runs."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.cases import others_slow
from tests.support.engine_reference import fix_buffers, make_engine, run
from tests.support.lmm_checkpoints import save_llava, save_qwen2_5_vl, save_qwen3_vl
from tests.support.lora_cases import make_case
from tests.support.serve_helpers import LANGUAGE, make_adapter
from valora_kernels import launching
from valora_kernels.atmm import launch
from valora_kernels.launching import compiling_together
from valora_kernels.tiling import Tiling
from valora_serve.types import Request, SamplingParams

LAUNCHING = ("launching", "project")


def test_the_kernels_of_graphs_are_those_that_are_compiled(tmp_path, monkeypatch):
    base = str(save_llava(tmp_path / "base", seed=2))
    adapter = make_adapter(tmp_path / "a", base, seed=1, rank=4, alpha=6, targets=LANGUAGE)
    fix_buffers(monkeypatch)
    engine = make_engine(
        base, {"a": adapter}, fresh=True, prompt_graphs=True, max_requests=8, max_tokens=256,
        chunk=64, policy="valora", capture="eager",
    )  # fmt: skip
    engine.warm_up()
    started = set()

    def noted(kernel, programs, *_, **options):
        started.add((kernel.__name__, *sorted(options.items())))

    for name in LAUNCHING:
        monkeypatch.setattr(f"valora_kernels.{name}.start", noted)
    for name in ("atmm", "project"):
        monkeypatch.setattr(f"valora_kernels.{name}.use_triton", lambda _: True)
    runner = engine.runner
    graphs = [graph for held in (runner._decode_graphs, runner._prompt_graphs)
              for graph in held.held.values()]  # fmt: skip
    with torch.inference_mode():
        for graph in graphs:
            graph.replay()
    launched = started.copy()
    started.clear()
    runner.forget_graphs()
    first, rest = runner.preparations((0, 1, 2))
    runner.run_linears([*first, *rest])
    assert started == launched
    assert len({name for name, *_ in started}) > 1


def test_kernels_are_compiled_and_not_launched(monkeypatch):
    """With a Triton that says what it is asked for."""
    events = []

    class Mode:
        def __init__(self, pool):
            self.pool = pool

        def __enter__(self):
            events.append("together")

        def __exit__(self, *_):
            events.append(f"ready, {self.pool._max_workers} threads")

    class Kernel:
        def warmup(self, *_, grid, **options):
            events.append(f"compiled {grid[0] > 0}")

    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=Mode))
    made = SimpleNamespace(shrink_kernel=Kernel(), expand_kernel=Kernel())
    monkeypatch.setattr("valora_kernels.launching.kernels", lambda: made)
    case = make_case(8, [4, 8], 32, (32,), dtype=torch.float32, device="cpu")
    before = [y.clone() for y in case.ys]
    with compiling_together(3):
        launch(Tiling("shrink_expand"), case.ys, case.x, case.weights, case.batch)
    assert events == ["together", "compiled True", "compiled True", "ready, 3 threads"]
    assert all(torch.equal(y, old) for y, old in zip(case.ys, before, strict=True))
    with pytest.raises(TypeError, match="not subscriptable"):  # a launch again
        launching.start(Kernel(), 1)


def test_without_it_kernels_are_compiled_one_after_the_other(tmp_path, monkeypatch, caplog):
    engine = make_engine(str(save_llava(tmp_path / "base", seed=2)), {}, fresh=True)
    runner = engine.runner
    monkeypatch.setattr(runner, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr("valora_serve.model.runner.usable_cores", lambda: 4)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    runner.compile_together([])
    assert "kernels are compiled one after the other" in caplog.text


@pytest.mark.parametrize(
    "save", others_slow([save_llava], [save_llava, save_qwen2_5_vl, save_qwen3_vl])
)
def test_widths_are_known_where_torch_compiles(save, tmp_path, monkeypatch):
    """Steps of other numbers of rows run the same code, which knows all but that number."""
    base = str(save(tmp_path / "base", seed=2))
    adapter = make_adapter(tmp_path / "a", base, seed=1, rank=4, alpha=40, targets=LANGUAGE)
    compile_, graphs, unknown = torch.compile, list[Any](), set[tuple[int, ...]]()

    def noted(graph, _):
        graphs.append(graph)
        for node in graph.graph.nodes:
            if node.target is torch.ops.valora.linears:
                value = node.meta["example_value"]
                sizes = enumerate((*value.shape, *value.stride()[1:]))
                unknown.add(tuple(at for at, size in sizes if isinstance(size, torch.SymInt)))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend=noted, dynamic=True))
    answers = []
    for compiled in (False, True):
        engine = make_engine(base, {"a": adapter}, fresh=True, compile=compiled, policy="slora")
        answers.append([])
        for number, (count, model) in enumerate(((9, None), (9, "a"), (4, None), (17, "a"))):
            asked = Request(str(number), model, token_ids=[*range(5, 5 + count)],
                            sampling=SamplingParams(max_tokens=3, ignore_eos=True))  # fmt: skip
            answers[-1].append(run(engine, [asked])[asked.id].tokens)
            if number == 0:
                first = len(graphs)
        engine.close()
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]  # of the adapter
    assert 0 < first == len(graphs)
    assert unknown == {(), (1,)}  # [1, rows, width], dense, of one row, and of several
