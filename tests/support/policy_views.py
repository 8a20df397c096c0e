"""Views of made-up requests for the tests of the policies, and a machine with simple costs."""

from dataclasses import replace

from valora_serve.orchestrator.cost_model import H200_7B
from valora_serve.orchestrator.decision import PolicySettings, RequestView, StepLimits, View
from valora_serve.orchestrator.registry import make_policy
from valora_serve.types import Mode

COSTS = replace(
    H200_7B,
    decode_seconds=(4.4e-3, 14e-6, 6e-6, 0.0, 0.125e-6, 0.45e-3, 0.52e-6, 0.12e-6, 0.0),
    prefill_seconds=(8e-3, 1e-6, 0.0, 20e-6, 0.0, 0.125e-6, 1e-9, 1.5e-3, 3e-3, 0.52e-6, 0.017e-6,
                     0.0),
)  # fmt: skip
"""A machine on which LoRA costs by the row, and a second term costs no more than a first."""

LIMITS = StepLimits(max_requests=16, max_tokens=512, free_pages=1000, max_adapters=8, chunk=512)


def waiting(i, adapter, arrival=0.0, prompt=32, output=50, **more):
    """A waiting request with id `w{i}`."""
    rank = 64 if adapter else 0
    pages = 3
    return RequestView(
        f"w{i}", adapter, rank, arrival, prompt, output_left=output, pages=pages,
        adapter_pages=16 if adapter else 0, **more,
    )  # fmt: skip


def running(i, adapter, arrival=0.0, left=50, **more):
    """A running request with id `r{i}` that decodes; `left` tokens are still to generate."""
    rank = 64 if adapter else 0
    defaults = {"held": 4, "adapter_pages": 16 if adapter else 0, "served": arrival}
    return RequestView(
        f"r{i}", adapter, rank, arrival, 0, kv_tokens=50, output_left=left, running=True,
        **{**defaults, **more},
    )  # fmt: skip


def view(run=(), wait=(), *, now=1.0, merged=None, mode=None, resident="abcdefgh", **more):
    """The state before a step."""
    if mode is None:
        mode = Mode.UNMERGED if merged is None else Mode.MERGED
    limits = more.pop("limits", LIMITS)
    return View(
        now, tuple(run), tuple(wait), mode, merged, frozenset(resident),
        more.pop("loading", frozenset()), limits, **more,
    )  # fmt: skip


def policy(name, **settings):
    """A new policy on that machine."""
    return make_policy(name, COSTS, PolicySettings(**settings))


def taken(decision):
    """Ids of the requests in the batch."""
    return {key for key, _ in decision.batch}
