"""What comes out of a step: tokens, log probabilities and results of heads, told to requests."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from valora_data.contract.results import HeadResult
from valora_serve.errors import NonFiniteError, RequestError, ServeError
from valora_serve.model.finite import BROKEN
from valora_serve.tokens import text_and_bytes
from valora_serve.types import (
    Finish,
    Logprob,
    Mode,
    Output,
    PromptLogprobs,
    Times,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from valora_serve.engine.launch import Flight
    from valora_serve.engine.requests import Requests
    from valora_serve.engine.sequence import SequenceState
    from valora_serve.model.lmm import Lmm
    from valora_serve.model.sampler import StepLogprobs

log = logging.getLogger(__name__)


class Answers:
    """Reads what steps computed, ends requests, and keeps the outputs until they are taken.

    Args:
        lmm: The base model, which names the tokens that end an answer.
        tokenizer: Turns token ids into text; used by the engine's thread only.
        requests: Unfinished requests.
        context_length: Longest prompt and answer together, in tokens.
        on_end: Called after a request was taken out of `requests`.
        on_broken: Called with a request that has ended because its outputs were not finite, and
            with the key of the adapter that was merged into the weights, None for none.

    Attributes:
        generated_tokens: Tokens generated since the start.
        finished: Requests ended since the start, by the value of `Finish`.
        non_finite: Requests that failed since the start because the model's outputs were not
            finite.
        pending: Outputs that nobody has taken yet, in order.
    """

    def __init__(
        self,
        lmm: Lmm,
        tokenizer: Any,
        requests: Requests,
        context_length: int,
        on_end: Callable[[SequenceState], None],
        on_broken: Callable[[SequenceState, str | None], None],
    ) -> None:
        self.generated_tokens = self.non_finite = 0
        self.finished: Counter[str] = Counter()
        self.pending: list[Output] = []
        self._lmm, self._tokenizer, self._requests = lmm, tokenizer, requests
        self._context_length = context_length
        # Texts and bytes of tokens that log probabilities were told of.
        self._texts: dict[int, tuple[str, bytes | None]] = {}
        self._on_end, self._on_broken = on_end, on_broken

    def take(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self.pending = self.pending, []
        return outputs

    def collect(self, flight: Flight) -> None:
        """Wait for a step, and make outputs of what it computed."""
        tokens = flight.result.read()
        step_logprobs, mode = flight.result.logprobs, flight.mode
        logprobs = None
        if step_logprobs is not None:
            logprobs = self._logprobs(flight.choosing, tokens, step_logprobs)
        for row, (sequence, token) in enumerate(zip(flight.choosing, tokens, strict=True)):
            sequence.pending -= 1
            if sequence.finish is not None:
                continue  # it ended while this step ran
            if token == BROKEN:
                self._broken(sequence, flight)
                continue
            try:
                self._token(sequence, token, logprobs[row] if logprobs else (), mode)
            except RequestError as error:
                self.fail(sequence, error)
            except Exception as error:
                log.exception("request %s", sequence.id)
                self.fail(sequence, ServeError(f"request {sequence.id} failed: {error}"))
        if flight.heads is not None:
            results = flight.heads.read()
            for sequence, result in zip(flight.answering, results, strict=True):
                if sequence.finish is not None:
                    continue
                sequence.first_token = time.monotonic()
                if isinstance(result, HeadResult):
                    self.end(sequence, Finish.HEAD, head=result, mode=mode)
                elif isinstance(result, NonFiniteError):
                    self._broken(sequence, flight)
                else:
                    self.fail(sequence, result)

    def _logprobs(
        self, choosing: Sequence[SequenceState], tokens: Sequence[int], step_logprobs: StepLogprobs
    ) -> list[tuple[TokenLogprobs, ...]]:
        """Return for each row its log probabilities; nothing for rows that want none."""
        chosen = step_logprobs.chosen.tolist()
        ids, values = step_logprobs.tokens.tolist(), step_logprobs.values.tolist()
        found: list[tuple[TokenLogprobs, ...]] = []
        for row, (sequence, token) in enumerate(zip(choosing, tokens, strict=True)):
            count = sequence.request.sampling.logprobs
            if count is None or sequence.finish is not None or token == BROKEN:
                found.append(())
                continue
            pairs = zip(ids[row][:count], values[row][:count], strict=True)
            top = tuple(self._logprob(one, value) for one, value in pairs)
            own = self._logprob(token, chosen[row])
            found.append((TokenLogprobs(own, top, sequence.text.chars),))
        return found

    def _logprob(self, token: int, value: float) -> Logprob:
        if (found := self._texts.get(token)) is None:
            found = self._texts[token] = text_and_bytes(self._tokenizer, token)
        return Logprob(token, found[0], value, found[1])

    def _broken(self, sequence: SequenceState, flight: Flight) -> None:
        """End a request whose outputs are not finite, which no answer can be made of."""
        self.non_finite += 1
        name = " and ".join(name for name, _ in sequence.request.adapters) or sequence.request.model
        on_adapter = bool(sequence.adapters)
        remedy = "use another model, or train the adapter again" if on_adapter else "see the log"
        error = NonFiniteError(
            f"{name or 'the base model'} computed NaN or infinity for this request: {remedy}",
            blame_adapter=on_adapter,
        )
        log.warning("request %s on %s in %s mode: %s", sequence.id, name, flight.mode, error)
        self.fail(sequence, error)
        self._on_broken(sequence, flight.merged)

    def _token(
        self,
        sequence: SequenceState,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        mode: Mode,
    ) -> None:
        """Add a token to a request's answer, and end the request if that was the last one."""
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
        params = sequence.request.sampling
        sequence.ids.append(token)
        self.generated_tokens += 1
        free: bool | None = True
        if params.constraint is not None:
            free = params.constraint.advance(token)
        prompt = sequence.prompt_logprobs()
        length = len(sequence.ids)
        count = length - sequence.prompt_tokens
        stops = token in self._lmm.stop_ids and (
            # A constraint allows a stop token only at its end, where nothing else can come.
            params.constraint is not None or (not params.ignore_eos and count > params.min_tokens)
        )
        text = "" if stops else sequence.text.push(token, stop=free is not False)
        finish = None
        if free is None and sequence.text.stopped:
            raise RequestError(
                f"request {sequence.id} was given up, as a stop text cut its JSON: leave out stop "
                "or response_format"
            )
        if stops or sequence.text.stopped:
            finish = Finish.STOP
        elif count >= sequence.max_new or length >= self._context_length:
            finish = Finish.LENGTH
        if finish is not None:
            self.end(
                sequence, finish, text=text, tokens=(token,), logprobs=logprobs, prompt=prompt,
                mode=mode,
            )  # fmt: skip
            return
        self.pending.append(
            Output(sequence.id, text, (token,), logprobs=logprobs, prompt=prompt, mode=mode)
        )

    def fail(self, sequence: SequenceState, error: ServeError) -> None:
        """End a request with an error."""
        self.end(sequence, Finish.ERROR, error=error)

    def end(
        self,
        sequence: SequenceState,
        finish: Finish,
        *,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt: PromptLogprobs | None = None,
        head: HeadResult | None = None,
        error: ServeError | None = None,
        mode: Mode | None = None,
    ) -> None:
        """End a request: release what it holds, and make its last output.

        Args:
            sequence: The request.
            finish: Reason for which the request ends.
            text: New text of its answer.
            tokens: New token ids of its answer.
            logprobs: Log probabilities of the new tokens.
            prompt: Log probabilities of its prompt, if no output had them yet.
            head: Result of its head.
            error: Error that ended the request.
            mode: Mode of its last step.
        """
        if finish in (Finish.STOP, Finish.LENGTH):
            text += sequence.text.flush()
            finish = Finish.STOP if sequence.text.stopped else finish
        sequence.finish = finish
        self._requests.remove(sequence)
        self._on_end(sequence)
        self.finished[str(finish)] += 1
        image = sum(len(item.at) for item in sequence.prompt.visuals)
        completion = len(sequence.ids) - sequence.prompt_tokens
        self.pending.append(
            Output(
                sequence.id,
                text,
                tokens,
                logprobs=logprobs,
                prompt=prompt,
                finish=finish,
                head=head,
                kv=sequence.kv if finish is Finish.HEAD else None,
                error=error,
                usage=Usage(sequence.prompt_tokens, completion, image, sequence.cached),
                times=Times(
                    sequence.arrival, sequence.started, sequence.first_token, time.monotonic()
                ),
                mode=mode,
            )
        )
