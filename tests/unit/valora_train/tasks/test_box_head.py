"""The box head: losses in closed form, targets by hand, calibration, round trip on disk."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou, generalized_box_iou

from valora_data.contract import boxes as box_code
from valora_data.contract.heads import read_head, write_head
from valora_data.errors import BundleError
from valora_data.schema import Answer, Box, Domain, Sample, Task
from valora_train.metrics.evaluate import Matches
from valora_train.settings import HeadSettings
from valora_train.tasks.box_head import VOTE_SIGMA, BoxHeadModule, DetectionTargets
from valora_train.tasks.detection import DetectionTask

GRID = (4, 4)
LABELS = ("cat", "dog", "eel")


def targets(*images, labels=LABELS):
    image = Image.new("RGB", (40, 80))
    samples = [Sample(str(n), image, Answer(tuple(found))) for n, found in enumerate(images)]
    return DetectionTargets.of(samples, labels, GRID)


def target(*found):
    """Of a single image."""
    return targets(found)[torch.tensor(0)]


def test_a_box_belongs_to_the_cell_of_its_centre_and_near_cells_inside():
    # 40 × 80 pixels, cells of 10 × 20. Centre (15, 30) is the centre of cell (1, 1).
    small = target(Box(11, 22, 19, 38, "dog", 0.7))
    assert torch.nonzero(small.positive).flatten().tolist() == [1 * 4 + 1]
    assert small.weight[5] == pytest.approx(0.7)
    assert small.classes[5] == 1
    assert small.boxes[5].tolist() == pytest.approx([11 / 40, 22 / 80, 19 / 40, 38 / 80])
    # Centre (20, 40) is a corner of four cells, whose centres are half a cell away.
    large = target(Box(8, 16, 32, 64, "cat"))
    assert torch.nonzero(large.positive).flatten().tolist() == [5, 6, 9, 10]


def test_the_smaller_box_wins_a_cell():
    both = target(Box(11, 22, 19, 38, "dog"), Box(2, 4, 28, 56, "cat"))
    assert both.classes[5] == 1


def test_targets_of_many_images_are_those_of_each(monkeypatch):
    monkeypatch.setattr("valora_train.tasks.box_head.CLAIMED_AT_ONCE", 3)
    random = np.random.default_rng(0)
    images = []
    for count in (2, 0, 4, 1, 3, 0, 2):
        corners = random.uniform((0, 0), (30, 60), (count, 2))
        sides = random.uniform(2, (10, 20), (count, 2))
        images.append([
            Box(*corner, *(corner + side), LABELS[n % 3], 0.5 + n / 10)
            for n, (corner, side) in enumerate(zip(corners.tolist(), sides, strict=True))
        ])  # fmt: skip
    together = targets(*images)
    for row, found in enumerate(images):
        alone, here = target(*found), together[torch.tensor(row)]
        for part in ("positive", "weight", "boxes", "classes"):
            assert torch.equal(getattr(alone, part), getattr(here, part))


def test_mirrored_targets_are_mirrored():
    box = Box(1, 22, 9, 38, "eel")
    left = target(box)
    domain = Domain("sea", Task.DETECTION, ("eel",), "detect eel", 0.8)
    task = DetectionTask(domain, HeadSettings())
    mirrored = task.mirrored(Sample("a", Image.new("RGB", (40, 80)), Answer((box,))))
    assert mirrored.answer.boxes == (Box(31, 22, 39, 38, "eel"),)
    right = DetectionTargets.of([mirrored], ("cat", "dog", "eel"), GRID)[torch.tensor(0)]
    assert torch.nonzero(left.positive).flatten().tolist() == [4]
    assert torch.nonzero(right.positive).flatten().tolist() == [7]
    assert right.boxes[7].tolist() == pytest.approx([31 / 40, 22 / 80, 39 / 40, 38 / 80])


def test_loss_in_closed_form():
    torch.manual_seed(3)
    head = BoxHeadModule(6, LABELS, GRID)
    raw = torch.randn(2, 16, 8)
    both = targets([Box(11, 22, 19, 38, "dog", 0.7), Box(21, 42, 29, 58, "eel", 0.4)], [])
    loss = head.loss(raw, both, HeadSettings(2.0, 3.0, 0.5))
    cells = [(0, 5, 0.7, 1), (0, 10, 0.4, 2)]
    objectness = 0.0
    for image in range(2):
        for cell in range(16):
            weight = next((w for i, c, w, _ in cells if (i, c) == (image, cell)), None)
            p = 1 / (1 + math.exp(-float(raw[image, cell, 0])))
            objectness -= math.log(1 - p) if weight is None else weight * math.log(p)
    box = classes = 0.0
    for image, cell, weight, label in cells:
        found = box_code.decode(raw[image, :, 1:5], GRID)[cell]
        giou = generalized_box_iou(found[None], both.boxes[image, cell][None])[0, 0]
        box += weight * (1 - float(giou))
        classes -= weight * float(raw[image, cell, 5:].log_softmax(0)[label])
    expected = (2.0 * objectness + 3.0 * box + 0.5 * classes) / (0.7 + 0.4)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_objectness_learns_the_iou_where_that_is_asked_for():
    """Against torchvision's IoU and the definition of cross entropy; gradients reach no box."""
    torch.manual_seed(4)
    head = BoxHeadModule(6, ("cat",), GRID)
    raw = head(torch.randn(2, 16, 6)).detach().requires_grad_()
    wanted = targets(
        (Box(11, 22, 19, 38, "cat", 0.7),), (Box(8, 16, 32, 64, "cat", 0.9),), labels=("cat",)
    )
    settings = {"box_weight": 0.0, "class_weight": 0.0, "objectness_weight": 2.0}
    loss = head.loss(raw, wanted, HeadSettings(objectness="iou", **settings))
    found = box_code.decode(raw[..., 1:5], GRID)
    expected = objects = 0.0
    for image in range(2):
        for token in range(16):
            confidence = torch.sigmoid(raw[image, token, 0])
            if wanted.positive[image, token]:
                iou = box_iou(found[image, token][None], wanted.boxes[image, token][None])[0, 0]
                weight = wanted.weight[image, token]
                objects += weight
            else:
                iou, weight = torch.tensor(0.0), 1.0
            iou = iou.detach()
            expected -= weight * (iou * confidence.log() + (1 - iou) * (1 - confidence).log())
    assert float(loss) == pytest.approx(float(2.0 * expected / objects), rel=1e-5)
    loss.backward()
    assert raw.grad[..., 1:].abs().max() == 0.0
    plain = head.loss(raw, wanted, HeadSettings(**settings))
    assert float(plain.detach()) != pytest.approx(float(loss.detach()), rel=1e-3)


def test_a_single_class_needs_no_class_logits():
    head = BoxHeadModule(6, ["cat"], GRID)
    raw = head(torch.randn(3, 16, 6))
    assert raw.shape == (3, 16, 5)
    loss = head.loss(raw, targets([], [], [], labels=["cat"]), HeadSettings())
    assert torch.isfinite(loss)


def test_logits_are_fp32_also_from_half_precision():
    head = BoxHeadModule(6, LABELS, GRID)
    assert head(torch.randn(1, 16, 6, dtype=torch.bfloat16)).dtype is torch.float32


def test_calibration_recovers_a_known_distortion():
    rng = np.random.default_rng(0)
    logit = rng.normal(0, 2, 20_000)
    hit = rng.uniform(size=20_000) < 1 / (1 + np.exp(-(0.5 * logit - 0.8)))
    score = 1 / (1 + np.exp(-logit))
    matches = Matches(score, hit, np.zeros(20_000, np.int64), np.array([1]), 0.0)
    head = BoxHeadModule(6, LABELS, GRID)
    head.calibrate(matches)
    assert head.calibration.tolist() == pytest.approx([0.5, -0.8], abs=0.06)
    # Scores made with that calibration lead to the same one again.
    again = 1 / (1 + np.exp(-(0.5 * logit - 0.8)))
    head.calibration.copy_(torch.tensor([0.5, -0.8]))
    head.calibrate(Matches(again, hit, matches.image, matches.truths, 0.0))
    assert head.calibration.tolist() == pytest.approx([0.5, -0.8], abs=0.06)


def test_calibration_never_reverses_an_order():
    score = np.linspace(0.01, 0.99, 200)
    head = BoxHeadModule(6, LABELS, GRID)
    head.calibrate(Matches(score, score < 0.5, np.zeros(200, np.int64), np.array([1]), 0.0))
    assert head.calibration.tolist() == [1.0, 0.0]


def test_boxes_come_in_pixels_of_the_image_that_was_sent():
    head = BoxHeadModule(6, ["cat"], GRID)
    raw = torch.full((16, 5), -9.0)
    edges = torch.tensor([[0.25, 0.5, 0.5, 0.75]])
    raw[9, 0] = 4.0
    raw[9, 1:5] = box_code.encode(edges, torch.tensor([9]), GRID)[0]
    for size in ((40, 80), (96, 96), (1920, 1080)):
        (box,) = head.predict(raw, size, HeadSettings(), 0.5)
        width, height = size
        expected = (0.25 * width, 0.5 * height, 0.5 * width, 0.75 * height)
        assert box.xyxy == pytest.approx(expected, rel=1e-5)
        assert box.confidence == pytest.approx(1 / (1 + math.exp(-4)), abs=1e-6)


def test_round_trip_on_disk(tmp_path):
    head = BoxHeadModule(6, LABELS, GRID)
    head.calibration.copy_(torch.tensor([1.7, -0.3]))
    head.threshold.fill_(0.37)
    write_head(tmp_path / "h.safetensors", head.stored(HeadSettings()))
    loaded = BoxHeadModule.of(read_head(tmp_path / "h.safetensors", 6))
    assert loaded.vote_sigma == head.vote_sigma == VOTE_SIGMA
    head.vote_sigma = None
    assert BoxHeadModule.of(head.stored(HeadSettings())).vote_sigma is None  # of earlier versions
    head.vote_sigma = VOTE_SIGMA
    assert (loaded.labels, loaded.grid) == (LABELS, GRID)
    for key, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


def test_a_damaged_head_is_refused(tmp_path):
    file = tmp_path / "h.safetensors"
    write_head(file, BoxHeadModule(6, LABELS, GRID).stored(HeadSettings()))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BundleError, match=r"head .*h\.safetensors is damaged"):
        read_head(file, 6)
