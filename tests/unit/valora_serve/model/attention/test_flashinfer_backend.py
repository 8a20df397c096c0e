"""FlashInfer's plans without a GPU: the library and the device's queue are simulated."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad, scaled_dot_product_attention

from valora_serve.model.attention import flashinfer_backend
from valora_serve.model.attention.base import KVCache, Rows
from valora_serve.model.attention.flashinfer_backend import FlashInferBackend
from valora_serve.model.attention.torch_backend import TorchBackend

PAGE, KV_HEADS, HEADS, WIDTH = 4, 1, 2, 8
SCALE = 0.5  # of scores; not 1 / √WIDTH


class Device:
    """A device that is behind: what is enqueued runs once the host waits for it."""

    def __init__(self):
        self.queue = []  # the oldest first
        self.computed = []  # kind of each kernel that has run, and what its plan says first

    def finish(self):
        """Run everything that is enqueued."""
        while self.queue:
            self.queue.pop(0)()

    def event(self):
        """An event, as `torch.cuda.Event()` makes it."""
        done = [True]

        def record():
            done[0] = False
            self.queue.append(lambda: done.__setitem__(0, True))

        def synchronize():
            while not done[0]:
                self.queue.pop(0)()

        return SimpleNamespace(record=record, synchronize=synchronize)

    def prefill(self, *_, **options):
        """FlashInfer's wrapper for sequences of any number of rows."""
        return self._wrapper(f"prefill {options['backend']}", options)

    def decode(self, *_, **options):
        """FlashInfer's wrapper for sequences of one row."""
        return self._wrapper("decode", options)

    def _wrapper(self, kind, options):
        """A wrapper: its copies to the device begin in one buffer of the host."""
        buffer = []
        copied = []
        fixed = []

        def plan(*parts, **_):
            parts = parts if kind != "decode" else (torch.arange(len(parts[0])), *parts)
            starts, indptr, indices, last, heads, kv_heads, width, page, *_ = parts
            assert heads in (KV_HEADS, HEADS)
            assert (kv_heads, width, page) == (KV_HEADS, WIDTH, PAGE)
            assert len(starts) == len(indptr) == len(last) + 1
            assert indptr[0] == 0
            assert indptr[-1] == len(indices)
            if options.get("use_cuda_graph"):
                fixed[:] = fixed or [len(last)]
                assert fixed == [len(last)], "a captured wrapper has a fixed number of sequences"
            buffer[:] = [part.clone() for part in (starts, indptr, indices, last)]

            def copy():
                copied[:] = buffer
                for name, new in zip(
                    ("indptr", "indices", "last_page_len"), buffer[1:], strict=True
                ):
                    held = options.get(f"paged_kv_{name}_buf")
                    held = options.get(f"paged_kv_{name}_buffer") if held is None else held
                    if held is not None:
                        held[: len(new)] = new

            self.queue.append(copy)

        def run(query, pages, q_scale, out):
            def attend():
                starts, indptr, indices, last = copied
                self.computed.append((kind, (indptr if kind == "decode" else starts).tolist()))
                for i, tokens in enumerate(last.tolist()):
                    table = indices[indptr[i] : indptr[i + 1]].long()
                    length = (len(table) - 1) * PAGE + tokens
                    own = slice(int(starts[i]), int(starts[i + 1]))
                    count = own.stop - own.start
                    key, value = (x[table].flatten(0, 1)[:length] for x in pages)
                    seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
                    out[own] = scaled_dot_product_attention(
                        *(x.transpose(0, 1)[None] for x in (query[own], key, value)),
                        attn_mask=seen, enable_gqa=True, scale=q_scale * WIDTH**-0.5,
                    )[0].transpose(0, 1)  # fmt: skip

            self.queue.append(attend)
            return out

        return SimpleNamespace(plan=plan, run=run)

    def append(self, key, value, owner, position, pages, indices, indptr, _):
        """FlashInfer's `append_paged_kv_cache`."""

        def write():
            at = indices[indptr[owner.long()] + position // PAGE].long()
            for held, new in zip(pages, (key, value), strict=True):
                held[at, position.long() % PAGE] = new

        self.queue.append(write)


def replaced(patch, capability=(9, 0)):
    """Put a simulated device of a compute capability in place of FlashInfer and CUDA."""
    found = Device()
    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=found.prefill,
        BatchDecodeWithPagedKVCacheWrapper=found.decode,
        append_paged_kv_cache=found.append,
    )
    patch.setitem(sys.modules, "flashinfer", library)
    for name in ("prefill", "decode"):
        patch.setitem(sys.modules, f"flashinfer.{name}", ModuleType(f"flashinfer.{name}"))
    patch.setattr(torch.cuda, "Event", found.event)
    patch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    patch.setattr(flashinfer_backend, "WORKSPACE_BYTES", 1)
    patch.setattr(flashinfer_backend, "WIDTHS", (WIDTH,))
    patch.setattr(flashinfer_backend, "DTYPES", (torch.float32,))
    return found


@pytest.fixture
def device(monkeypatch):
    return replaced(monkeypatch)


def empty_cache(pages, heads=HEADS):
    shape = (pages, PAGE, KV_HEADS, WIDTH)
    return KVCache([(torch.zeros(shape), torch.zeros(shape))], PAGE, heads)


@pytest.mark.parametrize("kind", ["plan", "mixed_plan", "decode_plan"])
def test_steps_of_a_device_that_is_behind_keep_their_plans(device, kind):
    backend = FlashInferBackend(empty_cache(32))
    fixed = None
    if kind != "plan":
        fixed = backend.mixed_plan(2, 8) if kind == "mixed_plan" else backend.decode_plan(1)
    steps = [(1, 5), (1, 14)] if kind == "decode_plan" else [(3, 5), (2, 14), (4, 20)]
    expected = []
    for count, length in steps:
        rows = Rows(np.array([0, count], np.int32), np.array([length], np.int32), [[*range(5)]])
        plan = fixed or backend.plan(rows)
        if fixed is not None:
            fixed.update(rows)
        rows_of_plan = 8 if kind == "mixed_plan" else count
        x = torch.zeros(rows_of_plan, HEADS, WIDTH)
        plan.run(0, x, x[:, :KV_HEADS], x[:, :KV_HEADS], 1.0)
        expected.append([0, -(-length // PAGE)] if kind == "decode_plan" else [0, count])
    device.finish()
    name = "decode" if kind == "decode_plan" else "prefill fa3"
    assert [plan[:2] for made, plan in device.computed if made == name] == expected


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("kind", ["mixed_plan", "decode_plan"])
def test_sequences_that_share_a_prefix_fit(kind):
    """Together their tables have many more pages than the cache."""
    backend = FlashInferBackend(empty_cache(32))
    if kind == "mixed_plan":
        backend.mixed_plan(20, 32)  # whose buffers are smaller
    plan = backend.mixed_plan(20, 64) if kind == "mixed_plan" else backend.decode_plan(20)
    shared = Rows(np.arange(21, dtype=np.int32), np.full(20, 124, np.int32), [[*range(1, 32)]] * 20)
    assert plan.max_pages >= 20 * 31
    plan.update(shared)


SEQUENCES = st.lists(  # tokens that are cached, and rows of the step
    st.tuples(st.integers(0, 30), st.just(1) | st.integers(1, 12)), min_size=1, max_size=6
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(SEQUENCES, min_size=1, max_size=3),
    st.sampled_from([("plan", True, HEADS), ("plan", False, HEADS), ("mixed_plan", True, HEADS),
                     ("mixed_plan", False, HEADS), ("crowded_plan", True, KV_HEADS)]),
)  # fmt: skip
@example([[(9, 1), (4, 1), (0, 6), (3, 2)]], ("crowded_plan", True, KV_HEADS))
@example([[(9, 1)], [(4, 3), (2, 1)], [(5, 1), (1, 1)]], ("crowded_plan", True, KV_HEADS))
@example([[(9, 1), (4, 1), (0, 6), (3, 2)]], ("crowded_plan", True, HEADS))
@example([[(9, 1)], [(4, 3), (2, 1)], [(5, 1), (1, 1)]], ("crowded_plan", True, HEADS))
@example([[(9, 1)], [(4, 3), (2, 1)], [(5, 1), (1, 1)]], ("mixed_plan", True, HEADS))
@example([[(3, 2), (9, 1)]], ("mixed_plan", False, HEADS))
def test_attention_is_that_of_plain_torch(steps, kind):
    """For any mix of rows: each step's outputs, and the cache behind it."""
    with pytest.MonkeyPatch.context() as patch:
        made, hopper, heads = kind
        device = replaced(patch, (9, 0) if hopper else (8, 0))
        mine, other = empty_cache(96, heads), empty_cache(96, heads)
        backend, reference = FlashInferBackend(mine), TorchBackend(other)
        most = 80
        captured = None if made == "plan" else getattr(backend, made)(8, most)
        g = torch.Generator().manual_seed(0)
        for held in (mine, other):
            for pages in held.layers[0]:
                pages.copy_(torch.randn(pages.shape, generator=g.manual_seed(7)))
        for sequences in steps:
            starts = np.cumsum([0, *(count for _, count in sequences)]).astype(np.int32)
            lengths = np.array([cached + count for cached, count in sequences], np.int32)
            tables = [[*range(1 + 11 * i, 12 + 11 * i)] for i in range(len(sequences))]
            rows = Rows(starts, lengths, tables)
            used = int(starts[-1])
            query = torch.randn(used, heads, WIDTH, generator=g)
            key, value = torch.randn(2, used, KV_HEADS, WIDTH, generator=g)
            expected = reference.plan(rows).run(0, query, key, value, SCALE)
            plan, padding = captured or backend.plan(rows), 0
            if captured is not None:
                captured.update(rows)
                padding = most - used
            parts = [pad(x, (0, 0, 0, 0, 0, padding)) for x in (query, key, value)]
            found = plan.run(0, *parts, SCALE)
            device.finish()
            torch.testing.assert_close(found[:used], expected)
        for one, two in zip(mine.layers[0], other.layers[0], strict=True):
            torch.testing.assert_close(one[1:], two[1:])  # page 0 takes the rows that pad a step


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_decoding_rows_have_a_kernel_of_their_own(monkeypatch, capability):
    """Three sequences of one row, then two with more; the last one of one row comes too late.

    Captured steps have that kernel where many rows decode.
    """
    device, hopper = replaced(monkeypatch, capability), capability == (9, 0)
    backend, prompts = FlashInferBackend(empty_cache(32, KV_HEADS)), f"prefill fa{2 + hopper}"
    starts = np.array([0, 1, 2, 3, 9, 14, 15], np.int32)
    rows = Rows(starts, np.array([9, 3, 5, 6, 8, 2], np.int32), [[i + 1, i + 8, i + 15]
                for i in range(6)])  # fmt: skip
    x = torch.zeros(16, KV_HEADS, WIDTH)
    backend.plan(rows).run(0, x[:15], x[:15], x[:15], 1.0)
    device.finish()
    eager = prompts if hopper else "prefill auto"
    assert device.computed == [("decode", [0, 3, 4, 6]), (eager, [0, 6, 11, 12])]
    assert (backend.crowd(6) is not None) == hopper
    for kind in ("mixed_plan", "crowded_plan")[: 1 + hopper]:
        device.computed.clear()
        plan = getattr(backend, kind)(6, 16)
        plan.update(rows)
        plan.run(0, x, x, x, 1.0)
        device.finish()
        assert [name for name, _ in device.computed] == ["decode", prompts][kind == "mixed_plan" :]
