"""Heads on a real GPU: `launch_heads` does not wait for the device."""

import pytest
import torch

from valora_data.contract.boxes import BoxHead
from valora_data.contract.label_head import LabelHead, Pooling
from valora_data.contract.results import LabelResult
from valora_serve.model.heads import HeadRequest, launch_heads

pytestmark = pytest.mark.gpu


def test_heads_launch_without_waiting():
    generator = torch.Generator().manual_seed(1)

    def label_head(kind, count, pooling):
        return LabelHead(
            kind=kind,
            labels=tuple(map(str, range(count))),
            weight=torch.randn(count, 64, generator=generator),
            bias=torch.randn(count, generator=generator),
            pooling=pooling,
        )

    heads = [
        label_head("classification", 3, Pooling.LAST),
        label_head("action", 101, Pooling.VISUAL_MEAN),
        BoxHead(
            kind="detection",
            labels=("x",),
            weight=torch.randn(5, 64, generator=generator) / 8,
            bias=torch.randn(5, generator=generator),
            grid=(2, 3),
            calibration=torch.tensor([1.0, 0.0]),
            threshold=0.0,
            nms_iou=0.5,
            most=32,
        ),
    ]
    inputs = []
    for number in range(6):
        head = heads[number % 3]
        states = torch.randn(6 if head.reads_visual else 9 + number, 64, generator=generator)
        inputs.append(HeadRequest(head, states, [(30, 40)]))
    on_gpu = {id(head): head.to("cuda") for head in heads}
    there = [HeadRequest(on_gpu[id(item.head)], item.hidden.cuda(), item.sizes) for item in inputs]
    launch_heads(there).read()  # the first call of a library may wait
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = launch_heads(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not pending.copied.query()
    for mine, expected in zip(pending.read(), launch_heads(inputs).read(), strict=True):
        torch.testing.assert_close(
            torch.from_numpy(mine.logits), torch.from_numpy(expected.logits), rtol=1e-4, atol=1e-4
        )
        if isinstance(mine, LabelResult):
            assert mine.label == expected.label
