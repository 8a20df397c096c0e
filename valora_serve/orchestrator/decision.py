"""The seam between deciding and doing: what a policy sees, and what it answers (VaLoRA §4.4).

Nothing here or in the policies imports torch. The engine and the simulator call the same
`Policy.decide` once per step and carry out the `Decision` that comes back:

1. `abort` requests end with `OverloadedError` or `DeadlineError`;
2. `preempt` requests give their pages back and wait again, to be computed anew;
3. the weights go to (`mode`, `merged`), if they are not there yet;
4. `prefetch` adapters are copied in, in this order, as memory allows;
5. `batch` is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TextIO

from valora_serve.types import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from valora_serve.orchestrator.cost_model import CostModel


@dataclass(slots=True)
class RequestView:
    """What a policy sees of a request; the engine keeps one per request and updates it in place.

    Attributes:
        id: Of the request.
        adapter: Adapter that acts, None for the base model.
        rank: Of the adapter, 0 for the base model.
        arrival: When it came, seconds on the engine's clock.
        prompt_left: Prompt tokens not yet computed (images' tokens included, cached ones not).
        context: Tokens that it holds in the KV cache.
        output_left: Tokens still to generate, as expected; 0 for a head request.
        running: Whether it holds pages.
        pages: Pages that it must be given before anything of it is computed: for a waiting
            request those of its whole prompt and first token, for a running one those of its
            next token (mostly 0).
        held: Pages that come free if it is preempted.
        adapter_pages: Pages that its adapter takes on the device, 0 for the base model.
        images: Images still to be encoded.
        deadline: When it must be answered, seconds on the engine's clock; None for no limit.
        domain: Domain that was asked for, if any.
        limit: Latency limit of its domain in seconds from arrival, None for none.
        credit: Kept by the policy: seconds waited, plus predicted execution and switch.
        served: Kept by the policy: when it was last in a batch, None if never.
    """

    id: str
    adapter: str | None
    rank: int
    arrival: float
    prompt_left: int
    context: int = 0
    output_left: int = 0
    running: bool = False
    pages: int = 0
    held: int = 0
    adapter_pages: int = 0
    images: int = 0
    deadline: float | None = None
    domain: str | None = None
    limit: float | None = None
    credit: float = 0.0
    served: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may take.

    Attributes:
        max_requests: Most requests that hold pages at a time, hence in a step.
        max_tokens: Most tokens computed in a step.
        free_pages: Pages that are free or can be freed right away: all but those of running
            requests, of their adapters, of the merged adapter and of loading ones. Idle adapters
            and unused cached prefixes count as free; the engine evicts the least recently used,
            first those that no request in the view names. A policy that takes in a waiting
            request therefore also counts its adapter's pages, unless they are counted already.
        max_adapters: Most distinct adapters in a step, the merged one included.
        chunk: Most prompt tokens of one request in a step.
    """

    max_requests: int
    max_tokens: int
    free_pages: int
    max_adapters: int
    chunk: int


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees before a step.

    Attributes:
        now: Seconds on the engine's clock.
        running: Requests that hold pages.
        waiting: Requests that do not, oldest first. May be cut to the oldest ones.
        mode: Mode of the last step.
        merged: Adapter in the base weights, None if they are pristine.
        resident: Adapters on the device.
        loading: Adapters on their way there.
        limits: What the step may take.
        switchable: Adapters that can be merged now, None for all resident ones.
    """

    now: float
    running: Sequence[RequestView]
    waiting: Sequence[RequestView]
    mode: Mode
    merged: str | None
    resident: frozenset[str] | set[str]
    loading: frozenset[str] | set[str]
    limits: Limits
    switchable: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in the next step.

    Attributes:
        mode: ``MERGED``: only rows of `merged` in the batch. ``MIXTURE``: `merged` in the
            weights, any rows. ``UNMERGED``: pristine weights, any rows, `merged` is None.
        merged: Adapter that the weights shall hold.
        batch: Requests and how many of their tokens to compute: 1 for a request whose prompt
            is done, else a chunk of the prompt. May be empty.
        prefetch: Adapters to copy in, most urgent first; neither resident nor loading.
        abort: Requests to give up on, with the reason in words.
        preempt: Running requests to take the pages from; none of them is in the batch.
        reason: Why, for people.
        until: The same answer holds for steps that start before this time, as long as nothing
            arrives, ends, finishes its prompt, needs a page or has been loaded, and no clock
            but that of the decoded tokens moves on; 0 for this step alone.
    """

    mode: Mode
    merged: str | None
    batch: tuple[tuple[str, int], ...] = ()
    prefetch: tuple[str, ...] = ()
    abort: tuple[tuple[str, str], ...] = ()
    preempt: tuple[str, ...] = ()
    reason: str = ""
    until: float = 0.0


class Policy(Protocol):
    """Decides, step by step."""

    def decide(self, view: View) -> Decision:
        """Say what the next step does; writes `credit` and `served` of the requests it sees."""

    def finished(self, request_id: str) -> None:
        """Be told that a request has ended, for whatever reason."""


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Knobs of the policies.

    Attributes:
        theta: Starvation threshold of `valora`: seconds of credit (VaLoRA §4.4.3).
        stall: Longest that `cost` lets a request stand still so that others gain, seconds.
        groups: Whether `cost` may run fewer requests at a time than it could, so that the average
            request ends sooner; at saturation that costs throughput.
        patience: Seconds after which a waiting request may not be overtaken, by any policy.
        hysteresis: A mode or merged adapter is left only if the other is better by this share.
        clusters: S-LoRA's adapter clustering: adapters in a batch from which on requests of the
            same adapters are preferred; 0 turns it off (S-LoRA §4.2).
        early_abort: S-LoRA's admission control: give up on requests that will miss their limit
            (S-LoRA §4.3, appendix B).
        slo: Seconds to the first token that early abort assumes where a request has no limit.
        limits: Latency limit in seconds by domain; a request's own limit goes first.
    """

    theta: float = 0.03
    stall: float = 1.0
    groups: bool = True
    patience: float = 20.0
    hysteresis: float = 0.1
    clusters: int = 0
    early_abort: bool = False
    slo: float = 6.0
    limits: dict[str, float] = field(default_factory=dict)


POLICIES = ("cost", "valora", "merge_only", "unmerge_only", "dlora", "slora")


def make_policy(name: str, cost_model: CostModel, settings: PolicySettings | None = None) -> Policy:
    """A policy by name.

    Args:
        name: One of `POLICIES`.
        cost_model: What steps, switches and loads cost on this machine.
        settings: Knobs; the defaults if None.

    Raises:
        ValueError: There is no policy of this name.
    """
    from valora_serve.orchestrator import policies

    return policies.make(name, cost_model, settings or PolicySettings())


class Trace:
    """Writes the decisions for people: one line per step.

    Columns: time in seconds, mode, adapter in the weights, requests in the batch (``d`` decoding,
    ``p`` prompt tokens), running and waiting, prefetches and aborts if any, and the reason::

          12.345678 mixture  plates        18d+256p  run 19 wait 2  +faces  2 others wait > 0.1 s

    Args:
        file: Where to write; flushed by its owner.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, view: View, decision: Decision) -> None:
        """Add the line of one step."""
        prefilling = {r.id for r in view.waiting}
        prefilling.update(r.id for r in view.running if r.prompt_left)
        tokens = sum(n for key, n in decision.batch if key in prefilling)
        decodes = sum(key not in prefilling for key, _ in decision.batch)
        notes = [f"+{name}" for name in decision.prefetch]
        notes += [f"preempt {key}" for key in decision.preempt]
        notes += [f"abort {key}: {why}" for key, why in decision.abort]
        self._file.write(
            f"{view.now:12.6f} {decision.mode:8} {decision.merged or '-':16} "
            f"{decodes:4d}d+{tokens}p run {len(view.running)} wait {len(view.waiting)}  "
            f"{' '.join([*notes, decision.reason])}\n"
        )
