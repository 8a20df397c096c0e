"""The other operators of the benchmark: what they compute, and what is said of missing ones."""

import pytest
import torch

from tests.bench.valora_kernels import bench_atmm
from tests.bench.valora_kernels.others import registry
from valora_kernels.timing import KernelWorkload, spread


def workload(outs=(48,)):
    return KernelWorkload(
        spread(11, 3, "zipf"), [8, 8, 8], 64, outs, dtype=torch.float32, device="cpu", cold=1,
    )  # fmt: skip


@pytest.mark.parametrize("outs", [(48,), (48, 16)])
def test_constructions_from_torch_add_lora_without_scalings(outs):
    work = workload(outs)
    work.scalings = [1.0] * 3
    found = registry.import_module(registry.MODULES["torch"]).operators(work)
    assert {"dense_mask", "loop", "peft", "bmm", "einsum"} <= set(found)
    for name, call in found.items():
        first = work.sets[0]
        before = [y.clone() for y in first.ys]
        scale = 0.5 if name == "peft" else 1.0  # as its LoraLayer multiplies by a number
        zero = [torch.zeros_like(y) for y in before]
        added = bench_atmm.exact(work, first, zero)
        call(first)
        for y, old, more in zip(first.ys, before, added, strict=True):
            torch.testing.assert_close(y, old + scale * more, rtol=1e-4, atol=1e-4)
            y.copy_(old)


def test_operators_that_cannot_be_had_are_named_once(tmp_path, monkeypatch):
    (tmp_path / "broken_operators.py").write_text("raise ImportError('no driver\\nfor this')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "missing", {})
    modules = {"torch": registry.MODULES["torch"], "broken": "broken_operators"}
    monkeypatch.setattr(registry, "MODULES", modules)
    assert "loop" in registry.operators(workload())
    assert registry.missing == {"broken": "ImportError: no driver"}
    said = registry.versions()
    assert f"torch {torch.__version__.partition('+')[0]}" in said
    assert "broken ImportError: no driver" in said


def test_a_wrong_result_of_another_operator_is_refused():
    work = workload()
    total = bench_atmm.exact(work, work.sets[0], [torch.zeros_like(work.sets[0].ys[0])])[0]

    def right(s):
        return s.ys[0].add_(total)

    def wrong(s):
        return s.ys[0].add_(1.1 * total)

    bench_atmm.check("right", work, right)
    bench_atmm.check("silent", work, lambda s: None)
    with pytest.raises(RuntimeError, match=r"wrong differs from fp32 by 1\.0e-01"):
        bench_atmm.check("wrong", work, wrong)
