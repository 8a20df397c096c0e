"""The factory on another device than the CPU: nothing stays behind there."""

import subprocess
import sys
from pathlib import Path

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

ROOT = Path(__file__).parents[3]
FEW = "{train:24,unlabelled:12,val:12,test:12}"
SHORT = [
    "processes=1", "fusion.processes=1", "train.steps=4", "train.steps_per_held=2",
    "train.probe_steps=4", "train.batch_size=4", "fusion.unreachable=keep", "model.device=far",
]  # fmt: skip
SHELF = [
    "task=shelf", *(f"domains.{name}.source.counts={FEW}" for name in (
        "digits", "person", "coin_count", "ball_path", "place_reference", "vehicle_color",
        "count_caption")),
    "domains.person.teacher=labels", "domains.coin_count.teacher=labels",
    "domains.ball_path.teacher=labels", "domains.digits.teacher=labels", *SHORT,
]  # fmt: skip


@pytest.fixture
def train(tmp_path):
    """Runs the command on the device `far`, in the same empty folder; gives its output."""

    def run(*arguments):
        new_store(tmp_path)
        return finish(Forked("tests.support.far_device", arguments, tmp_path), None)

    return run


def test_a_tensor_left_on_the_cpu_is_found():
    """Else the other tests of this file say nothing."""
    code = (
        "import torch\n"
        "from tests.support.far_device import far_device\n"
        "with far_device():\n"
        "    layer = torch.nn.Linear(3, 2).to('far')\n"
        "    layer(torch.ones(1, 3).to('far')).sum().backward()\n"
        "    torch.optim.AdamW(layer.parameters()).step()\n"
        "    assert layer.weight.grad.device.type == 'far'\n"
        "    layer(torch.ones(1, 3))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "expected all tensors on the same device" in done.stderr


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
    some = [*SHELF, "task.only=[digits,place_reference]", "train.lora.vision_tower=true"]
    assert "of 2 domains at their requirement" in train(*some, "fusion.of_dedicated=0.95")


@pytest.mark.parametrize("form", ["prefix", "memory_tokens"])
def test_documents_are_learnt(train, form):
    out = train(
        "task=context", "task.only=[ledger_1]", "domains.ledger_1.source.entries=2",
        "context.tokens=12", f"context.form={form}", "heads.max_tokens=4", *SHORT,
    )  # fmt: skip
    assert "of 1 domain" in out
