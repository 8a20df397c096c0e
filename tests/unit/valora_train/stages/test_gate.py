"""What the export gate allows a bundle to be off by, after it was loaded again."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from valora_data.errors import ValoraError
from valora_train.stages import gate


@pytest.mark.parametrize(
    ("dtype", "reached", "refused"),
    [
        ("float32", 0.6005, False),
        ("float32", 0.5985, True),
        ("bfloat16", 0.5971, False),
        ("bfloat16", 0.5895, True),
        ("float16", 0.6105, True),
    ],
)
def test_accuracy_may_differ_by_what_the_base_model_rounds(monkeypatch, dtype, reached, refused):
    monkeypatch.setattr(gate.shards, "read", lambda _: [])
    model = SimpleNamespace(accuracy=lambda _, __: reached)
    bundle = SimpleNamespace(
        manifest={"base": {"dtype": dtype}}, domains={"car": {"accuracy": {"test": 0.6}}}
    )
    said = f"car reaches {reached:.4f} on test after reloading, but 0.6000 was measured"
    with pytest.raises(ValoraError, match=said) if refused else nullcontext():
        gate.check_accuracy(model, bundle, {"car": gate.Path("data")})
