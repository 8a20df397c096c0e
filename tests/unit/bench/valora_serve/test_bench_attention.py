"""The mixes of `bench_attention`, and its table without a GPU."""

import numpy as np

from tests.bench.valora_serve.bench_attention import Mix


def test_steps_of_a_mix():
    rows = Mix(decoding=3, context=40, prompts=2, past=20).rows(13, pages=40)
    assert rows is not None
    assert np.diff(rows.starts).tolist() == [1, 1, 1, 5, 5]
    assert rows.lengths.tolist() == [40, 40, 40, 25, 25]
    used = [page for table in rows.tables for page in table]
    assert [len(table) for table in rows.tables] == [3, 3, 3, 2, 2]
    assert len(set(used)) == len(used)
    assert 0 not in used  # which takes the rows that pad a step
    assert Mix(12, 40, 1).rows(13, pages=40) is None  # a prompt has more than one row
    assert Mix(0, 0, 1, 640).rows(13, pages=40) is None  # too few pages
