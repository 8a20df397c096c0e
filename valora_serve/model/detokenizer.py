"""Streaming detokenisation: text of each new token, and the end of an answer at a stop text."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PENDING = 32  # tokens without text, or with unfinished bytes, that are decoded together


class Detokenizer:
    """Text of a growing list of tokens.

    Text that may still change is held back: an unfinished character at the end, and the possible
    beginning of a `stop` text, which ends the answer and is not part of it; none is looked for in
    the first `min_tokens`. The stop text that is complete first counts, of several the longest,
    however the text is divided. No token costs more the longer answer or stops are.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], min_tokens: int = 0) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._decode: Callable[[Sequence[int]], str]
        # transformers' own clean-up of spaces comes after the library's decoding.
        if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._decode = partial(tokenizer.decode, skip_special_tokens=True)
        else:
            self._decode = backend.decode  # an eighth of the time
        self._stop = tuple(sorted(text for text in stop if text))
        self._firsts = {text[0] for text in self._stop}
        self._min_tokens = min_tokens
        self._count = 0
        # Tokens of the last text that came, and that text: of those behind it comes what it adds.
        self._said: list[int] = []
        self._prefix = ""
        self._pending: list[int] = []  # tokens whose text has not come yet
        self._held = ""  # text that may become a stop text
        self._looks = True  # whether stop texts count in the last token
        self.stopped = False
        self.chars = 0

    def push(self, token: int, *, stop: bool = True) -> str:
        """Add a token, in which stop texts count or not; returns the text that is new and final."""
        self._count += 1
        self._looks = stop
        self._pending.append(token)
        text = self._step()
        if text is None:
            return self._cut() if len(self._pending) >= MAX_PENDING else ""
        return self._up_to_stop(text)

    def _step(self) -> str | None:
        """The text of pending tokens; None while it may change."""
        text = self._decode(self._said + self._pending)
        if text.endswith(REPLACEMENT) or len(text) <= len(self._prefix):
            return None
        if not text.startswith(self._prefix):
            # With bytes that are no UTF-8, some tokenizers decode the text before them differently.
            # That text was returned already, so it goes on behind it.
            self._said, self._prefix = [], ""
            return self._step()
        new = text[len(self._prefix) :]
        self._said, self._pending = self._pending, []
        self._prefix = self._decode(self._said)
        return new

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        if self.stopped:
            return ""
        rest = self._up_to_stop(self._decode(self._pending)) + self._held
        self._pending, self._held = [], ""
        return rest

    def _cut(self) -> str:
        """The text of pending tokens but for the last, so that they are not decoded every time."""
        pending = self._pending
        for at in range(len(pending) - 3, len(pending) + 1):
            text, self._pending = self._decode(pending[:at]), pending[at:]
            if text + self._decode(self._pending) == self._decode(pending):
                break
        if text:
            self._said, self._prefix = [], ""
        return self._up_to_stop(text)

    def _up_to_stop(self, new: str) -> str:
        """The part of the held and the new text that is certain to come before a stop text."""
        self.chars += len(new)
        if not self._stop or self._count <= self._min_tokens or not self._looks:
            new, self._held = self._held + new, ""
            return new
        if not self._held and self._firsts.isdisjoint(new):
            return new
        said, held = "", self._held
        for char in new:
            held += char
            if held.endswith(self._stop):
                self.stopped, self._held = True, ""
                longest = max(len(stop) for stop in self._stop if held.endswith(stop))
                return said + held[: len(held) - longest]
            # Each character is held once and let go once, however often stop texts begin anew.
            gone = 0
            while not self._begins_stop(held[gone:]):
                gone += 1
            said, held = said + held[:gone], held[gone:]
        self._held = held
        return said

    def _begins_stop(self, text: str) -> bool:
        """Whether a stop text begins with a text: in their order it is next to it."""
        at = bisect_left(self._stop, text)
        return not text or (at < len(self._stop) and self._stop[at].startswith(text))
