"""Which place of an image a visual token lies in, and the mean of each place."""

import torch
from torch.nn import functional as F

from valora_data.contract.grid_pooling import places_of, pool_places


def test_places_part_an_image_evenly():
    assert places_of(4, 8).tolist() == [
        row * 4 + column for row in range(4) for column in (0, 0, 1, 1, 2, 2, 3, 3)
    ]
    assert places_of(2, 3).tolist() == [0, 1, 2, 8, 9, 10]  # fewer tokens than places
    assert places_of(1, 1, images=3).tolist() == [0, 0, 0]


def test_equal_places_are_average_pooling():
    seen = torch.randn(3, 8 * 12, 5, generator=torch.Generator().manual_seed(0))
    pooled = pool_places(seen, places_of(8, 12).expand(3, -1), torch.ones(3, 96, dtype=torch.bool))
    expected = F.adaptive_avg_pool2d(seen.transpose(1, 2).unflatten(2, (8, 12)), 4)
    torch.testing.assert_close(pooled, expected.flatten(2).transpose(1, 2).flatten(1))


def test_images_of_other_sizes_count_by_their_tokens():
    # Two images, 4 × 4 and 1 × 4, and two tokens of padding.
    places = torch.cat([places_of(4, 4), places_of(1, 4), torch.zeros(2, dtype=torch.int64)])
    real = torch.arange(22)[None] < 20
    pooled = pool_places(torch.arange(22.0)[None, :, None], places[None], real)
    assert pooled.tolist() == [[(n + 16 + n) / 2 for n in range(4)] + list(range(4, 16))]
