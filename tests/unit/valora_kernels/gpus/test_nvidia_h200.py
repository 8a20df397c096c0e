"""The H200's record: for which sizes its own base products run."""

from valora_kernels.gpus.registry import GPUS
from valora_kernels.project import product_tiling, project_tiling


def test_the_h200_computes_few_rows_by_own_products() -> None:
    gpu = GPUS["nvidia_h200"]
    for rows, outputs, tile in (
        (16, (4096,), (16, 32)),
        (17, (4224,), (64, 32)),
        (64, (4096, 4096, 4096), (64, 64)),
        (128, (4096,), (64, 64)),
        (256, (4096,), (64, 128)),
        (1024, (4096,), (128, 256)),
    ):
        tiling = project_tiling(gpu, rows, outputs)
        assert tiling is not None
        assert (tiling.rows, tiling.outputs, tiling.fold) == (*tile, rows == 1024)
    assert project_tiling(gpu, 16, (1024, 1024)) is None  # too few columns
    assert project_tiling(gpu, 257, (4096,)) is None
    assert project_tiling(gpu, 200, (12288,)) is None  # y is too large
    assert project_tiling(gpu, 1024, (2048, 2048)) is None
    assert product_tiling(gpu, 16, 8192) != product_tiling(gpu, 16, 4096) is not None
    assert product_tiling(gpu, 17, 8192) is product_tiling(gpu, 0, 8192) is None
