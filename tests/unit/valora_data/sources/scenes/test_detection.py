"""The six built-in detection domains: repeatable, tightly labelled, without leaks."""

import subprocess
import sys
from io import BytesIO
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from torch import tensor
from torchvision.ops import box_iou, masks_to_boxes

from tests.support.data_sets import check_no_leak
from valora_data.errors import DataError
from valora_data.images import encoded_file
from valora_data.schema import Split
from valora_data.sources.scenes.detection import (
    DOMAINS,
    MAX_IOU,
    detection_sample,
    detection_samples,
    draw_scene,
)
from valora_data.sources.scenes.drawing import GLYPHS, Layer, Pen, Pose, arc, lit
from valora_data.sources.scenes.objects import NEAR_MISSES, TARGETS

COUNT = 40


def test_domains_are_those_of_figure_10() -> None:
    assert DOMAINS == (
        "license_plate",
        "traffic_sign",
        "vehicle",
        "vegetation",
        "bicycle",
        "person",
    )
    assert set(NEAR_MISSES) == set(DOMAINS)


@pytest.mark.parametrize("domain", DOMAINS)
def test_boxes_are_tight_around_visible_targets(domain: str) -> None:
    import torch

    for index in range(COUNT):
        scene = draw_scene(domain, Split.VAL, index)
        boxes = scene.boxes()
        assert len(boxes) == len(scene.masks) <= 4
        if not boxes:
            continue
        expected = masks_to_boxes(torch.from_numpy(np.stack(scene.masks)))
        expected[:, 2:] += 1  # torchvision's edges are the last pixels, ours lie behind them
        assert tensor([box.xyxy for box in boxes]).tolist() == expected.tolist()


@pytest.mark.parametrize("domain", DOMAINS)
def test_targets_can_be_told_apart_by_one_box_per_cell(domain: str) -> None:
    for sample in detection_samples(domain, Split.TRAIN, COUNT):
        assert sample.image.size == (96, 96)
        assert sample.image.mode == "RGB"
        for box in sample.answer.boxes:
            assert box.label == domain
            assert box.confidence == 1.0
            assert 0 <= box.x0 < box.x1 <= 96
            assert 0 <= box.y0 < box.y1 <= 96
            assert min(box.x1 - box.x0, box.y1 - box.y0) >= 8
        cells = [((b.x0 + b.x1) // 2 // 12, (b.y0 + b.y1) // 2 // 12) for b in sample.answer.boxes]
        assert len(set(cells)) == len(cells)
        for a, b in combinations(sample.answer.boxes, 2):
            assert box_iou(tensor([a.xyxy]), tensor([b.xyxy])).item() <= MAX_IOU


@pytest.mark.parametrize("domain", DOMAINS)
def test_targets_stand_out_from_a_scene_without_them(domain: str) -> None:
    """Inside a mask the picture differs from the surroundings: nothing invisible is labelled."""
    gaps = []
    for index in range(COUNT):
        scene = draw_scene(domain, Split.TEST, index)
        pixels = np.asarray(scene.image, dtype=float)
        for mask in scene.masks:
            inside = pixels[mask]
            outside = pixels[~np.logical_or.reduce(scene.masks)]
            gaps.append(max(np.abs(inside.mean(0) - outside.mean(0)).max(), inside.std()))
    assert min(gaps) > 10


def test_counts_follow_the_difficulty() -> None:
    counts = [len(sample.answer.boxes) for sample in detection_samples("person", Split.VAL, 200)]
    assert counts.count(0) >= 10
    assert max(counts) >= 3
    assert 0.8 < np.mean(counts) < 2.2


def test_sample_is_a_function_of_its_arguments() -> None:
    one = detection_sample("bicycle", Split.UNLABELLED, 7)
    assert one.id == "bicycle/unlabelled/00007"
    again = detection_sample("bicycle", Split.UNLABELLED, 7)
    assert (again.image.tobytes(), again.answer) == (one.image.tobytes(), one.answer)
    others = (
        detection_sample("bicycle", Split.UNLABELLED, 8),
        detection_sample("bicycle", Split.UNLABELLED, 7, seed=1),
        detection_sample("bicycle", Split.TEST, 7),
        detection_sample("person", Split.UNLABELLED, 7),
    )
    assert all(other.image.tobytes() != one.image.tobytes() for other in others)
    listed = list(detection_samples("bicycle", Split.UNLABELLED, 8))
    assert listed[7].image.tobytes() == one.image.tobytes()


def test_an_image_keeps_the_file_that_the_camera_wrote() -> None:
    image = detection_sample("bicycle", Split.VAL, 2).image
    file = encoded_file(image)
    assert file is not None
    assert file.content.startswith(b"\xff\xd8\xff")
    with Image.open(BytesIO(file.content)) as opened:
        assert opened.convert("RGB").tobytes() == image.tobytes()


def test_a_pen_reduces_as_pillow_does() -> None:
    """Colours at edges, where only some of the finer pixels are covered."""
    pen = Pen(20, 10, margin=0)
    pen.polygon(((0.05, 0.1), (0.9, 0.3), (0.4, 0.95)), (10, 200, 30))
    pen.line(((0.0, 0.0), (1.0, 0.8)), (230, 7, 90), 1.3)
    with_alpha = Image.frombytes("RGBA", pen._image.size, pen._image.tobytes())
    expected = np.asarray(with_alpha.reduce(4), dtype=np.float32)
    assert set(np.unique(expected[..., 3])) - {0, 255}
    pixels = pen.layer().pixels
    np.testing.assert_array_equal(pixels[..., :3], expected[..., :3])
    np.testing.assert_array_equal(pixels[..., 3], expected[..., 3] / np.float32(255))


def test_sample_is_the_same_in_another_process() -> None:
    """Neither hash randomisation nor earlier draws leak into an image."""
    code = (
        "import hashlib\n"
        "from valora_data.schema import Split\n"
        "from valora_data.sources.scenes.detection import detection_sample\n"
        "image = detection_sample('vehicle', Split.VAL, 3).image\n"
        "print(hashlib.sha256(image.tobytes()).hexdigest())"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    detection_sample("person", Split.VAL, 1)
    import hashlib

    here = detection_sample("vehicle", Split.VAL, 3).image
    assert hashes == {hashlib.sha256(here.tobytes()).hexdigest() + "\n"}


def test_splits_share_no_image() -> None:
    check_no_leak({split: detection_samples("vehicle", split, COUNT) for split in Split})


def test_unknown_domain_is_refused() -> None:
    with pytest.raises(DataError, match="unknown domain 'boat': expected one of license_plate"):
        detection_sample("boat", Split.TRAIN, 0)


@pytest.mark.parametrize("painters", [TARGETS, NEAR_MISSES], ids=["targets", "near_misses"])
def test_painters_vary_and_draw_nothing_at_the_rim(painters: dict) -> None:
    """A shape that touches the rim of its sheet would have been cut off."""
    for name, paint in painters.items():
        rng = np.random.default_rng(0)
        drawings = [paint(rng) for _ in range(60)]
        assert len({d.thing.pixels.tobytes() for d in drawings}) == 60
        for drawing in drawings:
            coverage = drawing.thing.pixels[..., 3]
            assert coverage.max() > 0.9, name
            rim = (coverage[0], coverage[-1], coverage[:, 0], coverage[:, -1])
            assert max(side.max() for side in rim) < 0.5, name


def test_pen_draws_where_it_is_told() -> None:
    pen = Pen(20, 10, margin=0.5)
    pen.rectangle(0.25, 0.5, 0.75, 1.0, (200, 100, 50))
    coverage = pen.layer().pixels[..., 3]
    # 10 × 5 pixels, and a supersampled line of rim at most.
    assert coverage.sum() == pytest.approx(50, rel=0.15)
    ys, xs = np.nonzero(coverage > 0.5)
    assert (xs.min(), xs.max() + 1, ys.min(), ys.max() + 1) == (15, 25, 10, 15)
    assert pen.layer().pixels[12, 20, :3].tolist() == [200, 100, 50]


def test_pose_turns_and_mirrors() -> None:
    def centre(pose: Pose) -> tuple[float, float]:
        pen = Pen(40, 40, pose, margin=0)
        pen.rectangle(0.0, 0.0, 0.25, 0.25, (255, 255, 255))  # the top left corner
        ys, xs = np.nonzero(pen.layer().pixels[..., 3] > 0.5)
        return xs.mean(), ys.mean()

    assert centre(Pose()) == pytest.approx((4.5, 4.5), abs=1)
    assert centre(Pose(mirrored=True)) == pytest.approx((35, 4.5), abs=1)
    assert centre(Pose(turn=90)) == pytest.approx((35, 4.5), abs=1)
    assert centre(Pose(turn=180)) == pytest.approx((35, 35), abs=1)


def test_light_brightens_the_side_it_comes_from() -> None:
    grey = Layer(np.full((8, 8, 4), 100, dtype=np.float32))
    pixels = lit(grey, (0.0, -1.0), 0.3).pixels
    assert pixels[0, 0, 0] == pytest.approx(130)
    assert pixels[-1, 0, 0] == pytest.approx(70)
    assert (pixels[..., 3] == 100).all()


def test_arc_is_part_of_an_ellipse() -> None:
    points = np.array(arc(0.5, 0.5, 0.4, 0.2, start=np.pi))
    assert ((points[:, 0] - 0.5) ** 2 / 0.16 + (points[:, 1] - 0.5) ** 2 / 0.04) == pytest.approx(1)
    assert points[:, 1].max() <= 0.5 + 1e-9  # the upper half: y points down
    assert points[0] == pytest.approx((0.1, 0.5))
    assert points[-1] == pytest.approx((0.9, 0.5))


def test_glyphs_are_distinct_and_inside_the_unit_square() -> None:
    assert len(set(GLYPHS)) == len(GLYPHS)
    assert all(0 <= v <= 1 for g in GLYPHS for stroke in g for point in stroke for v in point)
