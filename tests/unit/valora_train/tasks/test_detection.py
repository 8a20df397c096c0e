"""Heads of labels and boxes: losses, targets, calibration, files; boxes written as text."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F
from torchvision.ops import box_iou, generalized_box_iou

from tests.support.random_tests import examples
from valora_data.contract import boxes as box_code
from valora_data.contract.heads import read_head, write_head
from valora_data.errors import BundleError
from valora_data.schema import Answer, Box, Domain, Sample, Task
from valora_serve.model.heads import HeadRequest, launch_heads
from valora_train.metrics.evaluate import Matches
from valora_train.model.prompts import HeadInputs
from valora_train.settings import HeadSettings
from valora_train.tasks.classification import POOLINGS, ChoiceTargets, LabelHeadModule
from valora_train.tasks.detection import VOTE_SIGMA, BoxHeadModule, DetectionTargets, DetectionTask
from valora_train.tasks.language import read_boxes, write_box

GRID = (4, 4)
LABELS = ("cat", "dog", "eel")
IMAGE = Image.new("RGB", (40, 80))


def targets(*images, labels=LABELS):
    samples = [Sample(str(n), IMAGE, Answer(tuple(found))) for n, found in enumerate(images)]
    return DetectionTargets.of(samples, labels, GRID)


def target(*found):
    """Of a single image."""
    return targets(found)[torch.tensor(0)]


def cells(found):
    return torch.nonzero(found.positive).flatten().tolist()


def test_a_box_belongs_to_the_cell_of_its_centre_and_near_cells_inside():
    # 40 × 80 pixels, cells of 10 × 20. Centre (15, 30) is the centre of cell (1, 1).
    small = target(Box(11, 22, 19, 38, "dog", 0.7))
    assert cells(small) == [1 * 4 + 1]
    assert small.weight[5] == pytest.approx(0.7)
    assert small.classes[5] == 1
    assert small.boxes[5].tolist() == pytest.approx([11 / 40, 22 / 80, 19 / 40, 38 / 80])
    # Centre (20, 40) is a corner of four cells, whose centres are half a cell away.
    assert cells(target(Box(8, 16, 32, 64, "cat"))) == [5, 6, 9, 10]
    # The smaller box wins a cell.
    assert target(Box(11, 22, 19, 38, "dog"), Box(2, 4, 28, 56, "cat")).classes[5] == 1


def test_mirrored_targets_are_mirrored():
    box = Box(1, 22, 9, 38, "eel")
    task = DetectionTask(Domain("sea", Task.DETECTION, ("eel",), "?", 0.8), HeadSettings(), None)
    mirrored = task.mirrored(Sample("a", IMAGE, Answer((box,))))
    assert mirrored.answer.boxes == (Box(31, 22, 39, 38, "eel"),)
    right = target(*mirrored.answer.boxes)
    assert (cells(target(box)), cells(right)) == ([4], [7])
    assert right.boxes[7].tolist() == pytest.approx([31 / 40, 22 / 80, 39 / 40, 38 / 80])


@pytest.mark.parametrize("objectness", ["presence", "iou"])
def test_loss_in_closed_form(objectness):
    """Against torchvision's IoU and the definition of cross entropy, cell by cell."""
    torch.manual_seed(3)
    raw = torch.randn(2, 16, 8, requires_grad=True)
    both = targets([Box(11, 22, 19, 38, "dog", 0.7), Box(21, 42, 29, 58, "eel", 0.4)],
                   [Box(8, 16, 32, 64, "cat", 0.9)])  # fmt: skip
    found = box_code.decode(raw[..., 1:5], GRID)
    presence = box = classes = objects = 0.0
    for image in range(2):
        for cell in range(16):
            wanted, weight = 0.0, 1.0
            if both.positive[image, cell]:
                weight, wanted = float(both.weight[image, cell]), 1.0
                pair = found[image, cell][None].detach(), both.boxes[image, cell][None]
                if objectness == "iou":
                    wanted = float(box_iou(*pair))
                objects += weight
                box += weight * (1 - float(generalized_box_iou(*pair)))
                label = both.classes[image, cell]
                classes -= weight * float(raw[image, cell, 5:].detach().log_softmax(0)[label])
            p = 1 / (1 + math.exp(-float(raw[image, cell, 0].detach())))
            presence -= weight * (wanted * math.log(p) + (1 - wanted) * math.log(1 - p))
    head, weights = BoxHeadModule(6, LABELS, GRID), HeadSettings(2.0, 3.0, 0.5, objectness)
    loss = head.loss(raw, both, weights)
    expected = (2.0 * presence + 3.0 * box + 0.5 * classes) / objects
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    head.loss(raw, both, replace(weights, box_weight=0.0, class_weight=0.0)).backward()
    assert raw.grad[..., 1:].abs().max() == 0.0  # the IoU teaches no box
    head = BoxHeadModule(6, ["cat"], GRID)  # a single class needs no class logits
    raw = head(torch.randn(3, 16, 6, dtype=torch.bfloat16))
    assert (raw.shape, raw.dtype) == ((3, 16, 5), torch.float32)
    assert torch.isfinite(head.loss(raw, targets([], [], [], labels=["cat"]), HeadSettings()))


def matched(score, hit):
    return Matches(score, hit, np.zeros(len(score), np.int64), np.array([1]), 0.0)


def test_calibration_recovers_a_known_distortion():
    rng = np.random.default_rng(0)
    logit = rng.normal(0, 2, 20_000)
    distorted = 1 / (1 + np.exp(-(0.5 * logit - 0.8)))
    hit = rng.uniform(size=20_000) < distorted
    head = BoxHeadModule(6, LABELS, GRID)
    # Scores made with the calibration that was found lead to the same one again.
    for score in (1 / (1 + np.exp(-logit)), distorted):
        head.calibrate(matched(score, hit))
        assert head.calibration.tolist() == pytest.approx([0.5, -0.8], abs=0.06)
        head.calibration.copy_(torch.tensor([0.5, -0.8]))
    score = np.linspace(0.01, 0.99, 200)  # no fit reverses an order
    head = BoxHeadModule(6, LABELS, GRID)
    head.calibrate(matched(score, score < 0.5))
    assert head.calibration.tolist() == [1.0, 0.0]


def test_round_trip_on_disk(tmp_path):
    head, file = BoxHeadModule(6, LABELS, GRID), tmp_path / "h.safetensors"
    head.calibration.copy_(torch.tensor([1.7, -0.3]))
    head.threshold.fill_(0.37)
    for vote_sigma in (None, VOTE_SIGMA):  # None: of earlier versions
        head.vote_sigma = vote_sigma
        write_head(file, head.stored(HeadSettings()))
        loaded = BoxHeadModule.of(read_head(file, 6))
        assert (loaded.labels, loaded.grid, loaded.vote_sigma) == (LABELS, GRID, vote_sigma)
        for key, value in head.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value), key
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BundleError, match=r"head .*h\.safetensors is damaged"):
        read_head(file, 6)


SIDES = st.integers(28, 2000)


@examples(30)
@given(SIDES, SIDES, SIDES, SIDES, st.data())
def test_round_trip_through_resizing(width, height, seen_width, seen_height, data):
    size, seen = (width, height), (seen_width, seen_height)
    x0 = data.draw(st.floats(0, width * 0.6))
    y0 = data.draw(st.floats(0, height * 0.6))
    x1, y1 = x0 + width * 0.3, y0 + height * 0.35
    box = Box(x0, y0, x1, y1, "a red thing")
    for convention, grid in (("grid1000", (1000, 1000)), ("pixels", seen)):
        text = write_box(box, size, seen, convention)
        (back,) = read_boxes(f"see {text} there", size, seen, convention)
        assert back.label == "a red thing"
        for place, (edge, other) in enumerate(zip(back.xyxy, box.xyxy, strict=True)):
            assert abs(edge - other) <= 0.5 * size[place % 2] / grid[place % 2] + 1e-6


@pytest.mark.parametrize(
    ("size", "seen", "convention", "step", "expected"),
    [
        (100, (50, 50), "grid1000", 1, "(120,80),(360,300)"),
        (100, (50, 200), "pixels", 1, "(6,16),(18,60)"),
        (97, (50, 50), "grid1000", 10, "(120,80),(370,310)"),
    ],
)
def test_as_qwen_writes_it(size, seen, convention, step, expected):
    text = write_box(Box(12, 8, 36, 30, "cat"), (size, size), seen, convention, step)
    assert text == f"<ref>cat</ref><box>{expected}</box>"


def test_what_is_no_box_is_left_out_and_what_is_outside_brought_inside():
    for bad in ("", "no box", "<box>(1,2)</box>", "<box>(300,1),(200,9)</box>", "<box>(a,b),(c,d)"):
        assert read_boxes(bad, (100, 100), (100, 100), "grid1000") == []
    (box,) = read_boxes("<box>(-5,0),(2000,500)</box>", (80, 40), (1, 1), "grid1000")
    assert (box.xyxy, box.label) == ((0, 0, 80, 20), "")


WIDTH = 6


def reads(count=5, tokens=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return HeadInputs(
        torch.randn(count, WIDTH, generator=generator),
        torch.randn(count, tokens, WIDTH, generator=generator),
        torch.ones(count, tokens, dtype=torch.bool),
        torch.tensor([0, 0, 5, 15])[:tokens].expand(count, tokens),
    )


def random_head(poolings=POOLINGS, seed=1):
    head = LabelHeadModule(WIDTH, LABELS, "classification", poolings)
    generator = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return head


def loss(logits, label, shares, **settings):
    targets = ChoiceTargets(torch.tensor(label), torch.as_tensor(shares))
    return random_head().loss(logits, targets, HeadSettings(**settings))


def test_soft_and_hard_labels_in_closed_form():
    first = [[2.0, 0.5, -1.0], [0.0, 1.0, 3.0]]
    second = [[0.3, -0.5, 1.5], [2.0, 1.0, -3.0]]
    share, heat = 0.4, 3.0

    def log_softmax(row):
        total = math.log(sum(math.exp(v) for v in row))
        return [v - total for v in row]

    def expected(logits):
        hard = [-log_softmax(row)[at] for row, at in zip(logits, (0, 2), strict=True)]
        powers = [p ** (1 / heat) for p in (0.7, 0.2, 0.1)]
        teacher = [p / sum(powers) for p in powers]
        student = log_softmax([v / heat for v in logits[0]])
        apart = sum(p * (math.log(p) - q) for p, q in zip(teacher, student, strict=True))
        return ((1 - share) * hard[0] + share * heat**2 * apart + hard[1]) / 2

    logits = torch.tensor([first, second]).transpose(0, 1)
    shares = [[0.7, 0.2, 0.1], [0.0, 0.0, 0.0]]
    found = float(loss(logits, [0, 2], shares, soft=share, temperature=heat))
    assert found == pytest.approx((expected(first) + expected(second)) / 2)
    # A student that says exactly what the teacher does has no loss: softmax is not taken twice.
    shares = torch.tensor([[0.6, 0.3, 0.1]])
    assert float(loss(shares.log()[:, None], [0], shares, soft=1.0)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_server_says_the_same(tmp_path, pooling):
    head, read = random_head(), reads()
    head.chosen.fill_(head.poolings.index(pooling))
    head.temperature.fill_(1.7)
    write_head(tmp_path / "head.safetensors", head.stored())
    served = read_head(tmp_path / "head.safetensors", WIDTH)
    ours = (head(read)[:, int(head.chosen)] / 1.7).softmax(-1)
    for row in range(5):
        hidden = read.visual[row] if served.reads_visual else read.last[row : row + 1]
        asked = [HeadRequest(served, hidden, places=read.places[row])]
        (result,) = launch_heads(asked)()
        said = [result.confidences[label] for label in LABELS]
        assert said == pytest.approx(ours[row].tolist(), abs=1e-5)
    again = LabelHeadModule.of(served)
    assert again.pooling == pooling
    assert again.labels == LABELS
    expected = head(read)[:, int(head.chosen)] / 1.7
    assert torch.allclose(again(read)[:, 0] / again.temperature, expected)
    # Padding is not pooled.
    read = reads(count=2, tokens=4)
    longer = HeadInputs(
        read.last,
        torch.cat([read.visual, torch.full((2, 3, WIDTH), 50.0)], dim=1),
        torch.cat([read.real, torch.zeros(2, 3, dtype=torch.bool)], dim=1),
        torch.cat([read.places, torch.zeros(2, 3, dtype=torch.int64)], dim=1),
    )
    assert torch.allclose(head(longer), head(read), atol=1e-6)


def test_the_pooling_with_the_most_hits_on_validation_is_chosen():
    head = random_head(("last", "visual_mean", "attention"))
    truth = torch.tensor([0, 1, 2, 0])
    right = F.one_hot(truth, 3).float() * 5
    wrong = right.roll(1, dims=-1)
    logits = torch.stack([wrong, right, torch.cat([right[:3], wrong[3:]])], dim=1)
    head.calibrate(logits, truth)
    assert head.pooling == "visual_mean"
    # Of equal hits the likelier; a sample without a known truth does not count.
    both = torch.stack([right, right * 2, wrong], dim=1)
    head.calibrate(both, torch.tensor([0, 1, 2, -1]))
    assert head.pooling == "visual_mean"
    # Calibration finds the temperature.
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4000, 3, generator=generator)
    truth = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    head = random_head(["last"])
    head.calibrate(logits[:, None] * 2.5, truth)
    assert float(head.temperature) == pytest.approx(2.5, rel=0.1)
