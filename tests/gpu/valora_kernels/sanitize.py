"""Run every kernel once on small odd shapes, for compute-sanitizer."""

# ruff: noqa: E402  # it runs as a script and adds the packages to the path first

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[3] / "kernels")]

import torch

from tests.support.lora_cases import make_case
from valora_kernels.atmm import launch
from valora_kernels.merge import MergeableWeights, MergeTiling
from valora_kernels.project import add_projection
from valora_kernels.tiling import ProjectTiling, Tiling
from valora_kernels.weights import LoraWeights

for tiling in (
    Tiling("shrink_expand", 16, 64, 64, 128, 32),
    Tiling("shrink_expand", 64, 128, 64, 256, 64),
    Tiling("shrink_expand", 16, 64, 64, 128, 32, gather=True, loop=2),
    Tiling("fused", 32, 64, 64, parts=2),
):
    for paged in (False, True):
        case = make_case(
            21, [8, 24, 64], 264, (136, 72, 40), dtype=torch.bfloat16, terms=2, paged=paged,
            device="cuda",
        )  # fmt: skip
        for add in (True, False):
            launch(tiling, case.ys, case.x, case.weights, case.batch, add=add)
for rows, tiling in (
    (21, ProjectTiling(32, 32, 64, 4, 3)),
    (90, ProjectTiling(32, 64, 64, 4, 3)),
    (200, ProjectTiling(128, 64, 64, 4, 3, fold=True)),
):
    case = make_case(rows, [8, 24, 64], 264, (136, 72), dtype=torch.bfloat16, device="cuda")
    bases = [torch.randn(n, 264, device="cuda").bfloat16() for n in (136, 72)]
    add_projection(case.ys, case.x, bases, case.weights, case.batch, tiling=tiling)
merged = MergeableWeights({"q": (136, 264), "k": (72, 264)}, dtype=torch.bfloat16, device="cuda")
weights = LoraWeights.contiguous(1, 24, 264, (136, 72), dtype=torch.bfloat16, device="cuda")
merged.bind({"q": (weights, 0), "k": (weights, 1)})
merged.merge(0, 20, 0.5, tiling=MergeTiling(64, 64, 128, 32, 4))
merged.unmerge()
torch.cuda.synchronize()
