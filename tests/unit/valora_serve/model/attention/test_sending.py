"""Arrays that travel to the device in one copy."""

import numpy as np
import torch

from valora_serve.model.attention.base import ALIGNED, send_together


def test_arrays_keep_their_values_shapes_and_places():
    parts = [
        np.arange(10).reshape(2, 5),
        np.zeros(0, np.int64),
        np.arange(ALIGNED, 3 * ALIGNED),
        np.array([7]),
    ]
    sent = send_together(parts, torch.device("cpu"))
    for part, tensor in zip(parts, sent, strict=True):
        assert tensor.dtype == torch.int64
        assert tensor.tolist() == part.tolist()
        assert tensor.storage_offset() % ALIGNED == 0
    assert sent[0].storage_offset() == 0  # compiled layers take the first one
    assert len({tensor.untyped_storage().data_ptr() for tensor in sent}) == 1
