"""Launching a step: which decided requests can take part, and what the model computes for each."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from valora_kernels.metadata import NONE
from valora_serve.errors import RequestError, ServeError
from valora_serve.model.heads import HeadRequest, launch_heads
from valora_serve.model.sampler import TokenChoice
from valora_serve.model.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from valora_serve.engine.images import ImageEncoder
    from valora_serve.engine.merge import MergeState
    from valora_serve.engine.requests import Requests
    from valora_serve.engine.sequence import SequenceState
    from valora_serve.memory.unified import UnifiedMemory
    from valora_serve.model.heads import HeadLogits
    from valora_serve.model.lmm import Lmm
    from valora_serve.model.runner import ModelRunner
    from valora_serve.model.work import StepResult
    from valora_serve.orchestrator.decision import Decision
    from valora_serve.types import Mode

log = logging.getLogger(__name__)

MASK_SECONDS = 0.005
"""Time of a step in which the masks of constraints are computed."""


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose results the host has not read yet.

    Attributes:
        choosing: Requests that get a token, in the order of the tokens of `result`.
        result: Tokens, log probabilities and hidden states, on their way to the host.
        answering: Requests whose head answers, in the order of `heads`, those included that rode on
            the pass of another one.
        heads: Outputs of the heads, None if no head answers.
        mode: Inference mode of the step.
        merged: Key of the adapter that was merged into the weights, None for none.
    """

    choosing: list[SequenceState]
    result: StepResult
    answering: list[SequenceState]
    heads: HeadLogits | None
    mode: Mode
    merged: str | None


class Launcher:
    """Turns decisions into steps on the device, and keeps the state of their requests.

    Args:
        lmm: The base model.
        runner: Runs steps.
        requests: Unfinished requests.
        images: Encodes images.
        merge_state: State of the base weights.
        memory: Pages on the device.
        fail: Ends a request with an error.

    Attributes:
        steps: Steps launched since the start.
        prompt_tokens: Prompt tokens computed since the start.
        shared: Requests since the start that rode on the pass of another one.
    """

    def __init__(
        self,
        lmm: Lmm,
        runner: ModelRunner,
        requests: Requests,
        images: ImageEncoder,
        merge_state: MergeState,
        memory: UnifiedMemory,
        fail: Callable[[SequenceState, ServeError], None],
    ) -> None:
        self.steps = self.prompt_tokens = self.shared = 0
        self._lmm, self._runner, self._requests = lmm, runner, requests
        self._blocks, self._adapters = requests.blocks, requests.adapters
        self._images, self._merge_state, self._fail = images, merge_state, fail
        self._memory = memory

    def launch(self, decision: Decision) -> Flight | None:
        """Enqueue the batch of a decision, and start the copies of the adapters that it prefetches.

        The weights must be in the decided mode already.

        Returns:
            The step; None if no request could take part.
        """
        shares, works = self._works(self._shares(decision))
        if not shares:
            return None
        result = self._runner.step(works, self._merge_state.slot)
        self.steps += 1
        now = time.monotonic()
        commit = self._blocks.commit
        choosing: list[SequenceState] = []
        answering: list[SequenceState] = []
        prompts = iter(result.prompts)
        for (sequence, count), work, hidden in zip(shares, works, result.hidden, strict=True):
            if work.targets and sequence.scores is not None:
                sequence.scores.append(next(prompts))
            if sequence.started is None:
                sequence.started = now
            if sequence.computed < sequence.prompt_tokens:
                self.prompt_tokens += count
            sequence.computed += count
            view = sequence.view
            view.kv_tokens += count
            view.held = len(work.table) - sequence.given // self._blocks.block_size
            view.prompt_left = max(0, view.prompt_left - count)
            # The newest token may be known to the device only.
            commit(sequence.id, min(sequence.computed, len(sequence.ids)))
            if hidden is not None:
                sequence.hidden.append(hidden)
            if work.choice is not None:
                sequence.pending += 1
                sequence.chosen = True
                view.output_left = max(1, view.output_left - 1)
                choosing.append(sequence)
            view.images = len(sequence.prompt.visuals) - len(sequence.features)
            if not view.prompt_left:
                view.images = 0
                sequence.features.clear()
                sequence.memory = None
                if sequence.head is not None:
                    answering += self._landed(sequence)
        inputs = [self._head_request(one) for one in answering]
        heads = launch_heads(inputs) if inputs else None
        for sequence in answering:  # its keys and values are not needed any more
            if sequence.request.keep_kv:
                table = self._blocks.table(sequence.id)
                sequence.kv = self._memory.read_tokens(table, sequence.prompt_tokens)
            self._requests.release(sequence)
        state = self._merge_state
        return Flight(choosing, result, answering, heads, state.mode, state.adapter)

    def _landed(self, sequence: SequenceState) -> list[SequenceState]:
        """Return the requests whose heads read the hidden states of a pass that is computed."""
        riders, sequence.riders = sequence.riders, []
        self.shared += len(riders)
        sequence.hidden = [torch.cat(sequence.hidden)]
        for rider in riders:
            rider.carrier, rider.hidden = None, sequence.hidden
            rider.started, rider.cached = sequence.started, sequence.cached
        return [sequence, *riders]

    def _prefetch(self, labels: Iterable[str]) -> None:
        """Start copying adapters to the device; only the first may evict ones that are wanted."""
        for number, key in enumerate(labels):
            members = self._requests.mixes.get(key)
            keys = (key,) if members is None else next(iter(members.values())).adapters
            # What is there must not be evicted for what is loaded beside it.
            held = [one for one in keys if one in self._adapters.resident]
            for one in held:
                self._adapters.pin(one)
            failed: dict[str, ServeError] = {}
            for one in keys:
                if one not in self._adapters:
                    continue  # unloaded, and the last request that waited for it has ended
                try:
                    self._adapters.load(one, urgent=number == 0)
                except ServeError as error:
                    failed[one] = error
            for one in held:
                self._adapters.unpin(one)
            for one, wrong in failed.items():
                self.fail_adapter(one, wrong)

    def fail_adapter(self, key: str, error: ServeError) -> None:
        """End the requests of an adapter that cannot be used."""
        for sequence in self._requests.of_adapter(key):
            self._fail(sequence, error)

    def _shares(self, decision: Decision) -> list[tuple[SequenceState, int]]:
        """Return the requests of a batch that have their memory and images, and their tokens."""
        requests, reserve = self._requests, self._blocks.reserve
        running, waiting, admit = requests.running, requests.waiting, requests.admit
        shares: list[tuple[SequenceState, int]] = []
        for request_id, tokens in decision.batch:
            sequence = running.get(request_id) or waiting.get(request_id)
            if sequence is None or not admit(sequence):
                continue
            if sequence.view.pair and self._merge_state.adapter is not None:
                continue  # beside a merged adapter rows have room for one of their own
            count = min(tokens, sequence.left)
            if reserve(sequence.id, sequence.computed + count):
                shares.append((sequence, count))
        # Only now, as the adapters of the batch are pinned and a prefetch cannot evict them.
        self._prefetch(decision.prefetch)
        for broken, error in self._images.encode(shares):
            self._fail(broken, error)
        return [share for share in shares if share[0].finish is None]

    def _works(
        self, shares: list[tuple[SequenceState, int]]
    ) -> tuple[list[tuple[SequenceState, int]], list[Work]]:
        """Return the shares with their works; requests whose constraint fails are ended.

        Constraints have `MASK_SECONDS` in all. Those that took longest so far come last, and wait
        for the next step if no time is left, so that slow ones delay nobody but themselves.
        """
        kept, works = [], []
        until: float | None = None
        for sequence, count in sorted(shares, key=lambda share: share[0].mask_seconds):
            if sequence.request.sampling.constraint is not None:
                now = time.monotonic()
                until = until or now + MASK_SECONDS
                if now > until:
                    continue
            try:
                works.append(self._work(sequence, count))
            except RequestError as error:
                self._fail(sequence, error)
            except Exception as error:
                log.exception("request %s", sequence.id)
                self._fail(sequence, ServeError(f"request {sequence.id} failed: {error}"))
            else:
                kept.append((sequence, count))
        return kept, works

    def _work(self, sequence: SequenceState, count: int) -> Work:
        """Return what the model computes for the next `count` tokens of a request."""
        start, prompt = sequence.computed, sequence.prompt
        end = start + count
        terms = [(self._adapters.slot(key), one) for key, one in sequence.adapters.items()]
        work = Work(
            place=sequence.place if sequence.place is not None else 0,
            start=start,
            count=count,
            tokens=None,
            table=self._blocks.table(sequence.id),
            adapter=terms[0][0] if terms else NONE,
            weighted=() if sequence.view.adapter in sequence.adapters else terms,
            plain=min(max(sequence.own_from - start, 0), count),
            delta=prompt.delta,
        )
        if not (sequence.chosen and count == 1):
            work.tokens = sequence.ids[start:end]
        if start < sequence.prompt_tokens:
            if prompt.positions is not None:
                work.positions = sequence.positions(start, end)
            work.visuals = sequence.visuals(start, end)
            work.targets = sequence.targets(start, end)
            work.prompt_logprobs = sequence.request.sampling.prompt_logprobs or 0
        if sequence.head is not None:
            work.keep = sequence.kept(start, end)
        elif end == sequence.length:
            work.choice = self._choice(sequence)
            work.logprobs = sequence.request.sampling.logprobs
        return work

    def _choice(self, sequence: SequenceState) -> TokenChoice:
        """Return how a request's next token is chosen.

        Raises:
            RequestError: Its constraint allows no token.
        """
        params = sequence.request.sampling
        early = sequence.generated < params.min_tokens
        forbidden = tuple(self._lmm.stop_ids) if early else ()
        counts = sequence.counts
        if counts is not None:
            counts.update(sequence.ids, sequence.prompt_tokens)
        choice = TokenChoice(params, sequence.generator, forbidden, None, counts, sequence.bias)
        if params.constraint is None:
            return choice
        allowed = np.ones(self._lmm.vocabulary, dtype=np.bool_)
        began = time.monotonic()
        params.constraint.mask(allowed)
        sequence.mask_seconds += time.monotonic() - began
        if not allowed.any():
            raise RequestError(
                f"request {sequence.id} was given up, as its JSON schema allows no token that the "
                "model has: simplify the schema"
            )
        if forbidden and allowed.sum() == allowed[list(forbidden)].sum():
            forbidden = ()  # only stop tokens are allowed: the answer ends before min_tokens
        return replace(choice, allowed=allowed, forbidden=forbidden)

    def _head_request(self, sequence: SequenceState) -> HeadRequest:
        """Return what the head of a request computes from the hidden states that it reads."""
        head, visuals = sequence.head, sequence.prompt.visuals
        assert head is not None
        (hidden,), sequence.hidden = sequence.hidden, []
        if head.reads_visual and any(item.cells is not None for item in visuals):
            # They were kept in the order of the prompt, and a head reads whole rows of the grid.
            order = np.concatenate([item.read for item in visuals]).argsort().argsort()
            hidden = hidden[torch.from_numpy(order).to(hidden.device)]
        visual = torch.ones(len(hidden), dtype=torch.bool) if head.reads_visual else None
        sizes = [item.size for item in visuals] if head.reads_visual else ()
        places = None
        if head.reads_places:
            places = torch.cat([item.places() for item in visuals])
        return HeadRequest(head, hidden, visual, sizes, sequence.request.min_score, places)
