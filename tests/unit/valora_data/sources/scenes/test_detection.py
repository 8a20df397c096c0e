"""The six built-in detection domains, and the pen that draws them."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou, masks_to_boxes

from valora_data.images import encoded_file
from valora_data.schema import Split, Task
from valora_data.sources.scenes.boards import scene_rng
from valora_data.sources.scenes.builtin import builtin_samples
from valora_data.sources.scenes.detection import MAX_IOU, draw_scene

COUNT = 40
DOMAINS = ("license_plate", "traffic_sign", "vehicle", "vegetation", "bicycle", "person")


def samples(domain, split, count):
    return list(builtin_samples(Task.DETECTION, domain, split, count))


@pytest.mark.parametrize("domain", DOMAINS)
def test_boxes_are_tight_around_targets_that_stand_out_and_can_be_told_apart(domain):
    for index, sample in enumerate(samples(domain, Split.TEST, COUNT)):
        image, masks = draw_scene(domain, scene_rng(domain, Split.TEST, index, 0), Split.TEST)
        boxes = sample.answer.boxes
        assert sample.image.tobytes() == image.tobytes()
        assert all((box.label, box.confidence) == (domain, 1.0) for box in boxes)
        assert len(boxes) == len(masks) <= 4
        if not boxes:
            continue
        found = torch.tensor([box.xyxy for box in boxes])
        expected = masks_to_boxes(torch.from_numpy(np.stack(masks)))
        expected[:, 2:] += 1  # torchvision's edges are the last pixels, ours lie behind them
        assert found.tolist() == expected.tolist()
        assert found.min() >= 0
        assert found.max() <= 96
        assert (found[:, 2:] - found[:, :2]).min() >= 8
        cells = (found[:, :2] + found[:, 2:]) // 24  # a detector says one box per cell
        assert len(cells.unique(dim=0)) == len(boxes)
        assert box_iou(expected, expected).fill_diagonal_(0).max() <= MAX_IOU
        pixels = np.asarray(image, dtype=float)
        around = pixels[~np.any(masks, axis=0)].mean(0)
        for mask in masks:
            inside = pixels[mask]
            assert max(np.abs(inside.mean(0) - around).max(), inside.std()) > 10


def test_an_image_keeps_the_file_that_the_camera_wrote():
    image = samples("bicycle", Split.VAL, 3)[2].image
    file = encoded_file(image)
    assert file is not None
    assert file.content.startswith(b"\xff\xd8\xff")
    with Image.open(BytesIO(file.content)) as opened:
        assert opened.convert("RGB").tobytes() == image.tobytes()
