"""The factory on another device than the CPU: nothing stays behind there."""

import os

import pytest
from torch.utils import backend_registration

from tests.support.forked import Forked, finish
from tests.support.stores import new_store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no backends in Python",
    ),
]

FEW = "{train:8,unlabelled:4,val:6,test:6}"
SHORT = [
    "processes=1", "fusion.processes=1", "train.steps=2", "train.steps_per_held=1",
    "train.probe_steps=2", "train.batch_size=4", "fusion.unreachable=keep", "heads.max_tokens=4",
    "model.device=far",
]  # fmt: skip
SHELF = [
    "task=shelf", *(f"domains.{name}.source.counts={FEW}" for name in (
        "digits", "person", "coin_count", "ball_path", "place_reference", "vehicle_color",
        "count_caption")),
    "domains.person.teacher=labels", "domains.coin_count.teacher=labels",
    "domains.ball_path.teacher=labels", "domains.digits.teacher=labels", *SHORT,
]  # fmt: skip


@pytest.fixture
def train(tmp_path, random_llava):
    """Runs the command on the device `far`, in the same empty folder; gives its output."""
    base = f"model.id={random_llava}"

    def run(*arguments):
        new_store(tmp_path)
        return finish(Forked("tests.support.far_device", (base, *arguments), tmp_path), None)

    return run


LEFT = """
import torch
from tests.support.far_device import far_device
with far_device():
    layer = torch.nn.Linear(3, 2).to("far")
    layer(torch.ones(1, 3).to("far")).sum().backward()
    torch.optim.AdamW(layer.parameters()).step()
    assert layer.weight.grad.device.type == "far"
    layer(torch.ones(1, 3))
"""


def test_a_tensor_left_on_the_cpu_is_found(tmp_path):
    """Else the other tests of this file say nothing."""
    (tmp_path / "left.py").write_text(LEFT)
    process = Forked("left", [], tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert "expected all tensors on the same device" in process.communicate(60)[0]


def test_tasks_are_fused_exported_and_extended(train):
    """With an attempt that is rolled back, and a bundle that is loaded again by the gate."""
    easy = [f"domains.{name}.required=1e-6" for name in ("person", "coin_count", "ball_path")]
    everything = [*SHELF, *easy, "fusion=rehearsal", "fusion.margin=0", "fusion.head_only=false",
                  "fusion.of_dedicated=null", "domains.vehicle_color.required=1.0"]  # fmt: skip
    out = train(*everything, "task.only=[person,coin_count,ball_path,vehicle_color]")
    assert "rolled back" in out
    assert "of 4 domains at their requirement" in out
    out = train(*everything, "task.only=[person,count_caption]", "fusion.parent=bundles/shelf")
    assert "of 2 domains at their requirement" in out


def test_dedicated_adapters_are_taken(train):
    some = [*SHELF, "task.only=[coin_count,vehicle_color]", "train.lora.vision_tower=true"]
    out = train(*some, "fusion.of_dedicated=0.95")
    assert "of 2 domains at their requirement" in out and "the dedicated adapter's" in out


@pytest.mark.parametrize("form", ["prefix", "memory_tokens"])
def test_documents_are_learnt(train, form):
    out = train(
        "task=context", "task.only=[ledger_1]", "domains.ledger_1.source.entries=2",
        "domains.ledger_1.of_teacher=null", "domains.ledger_1.required=0.1",
        "context.tokens=12", f"context.form={form}", *SHORT,
    )  # fmt: skip
    assert "of 1 domain" in out
