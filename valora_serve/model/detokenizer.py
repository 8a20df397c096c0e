"""From tokens to text, as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTES = 4
"""Most bytes of a character."""


class Detokenizer:
    """Text of a growing list of tokens, held back where it may still change.

    Held back are an incomplete character at the end, and what may become a stop text.

    Args:
        tokenizer: transformers' tokenizer.
        stop: Texts that end the answer; they are not part of it.
        least: Tokens in whose text no stop text is looked for.

    Attributes:
        stopped: Whether a stop text has come.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], least: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._least = least
        self._tokens: list[int] = []
        self._start = 0  # tokens before it are text for good
        self._settled = ""  # text of the tokens from `_start` on that was given out already
        self._held = ""  # text not given out, as it may become a stop text
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is new and certain."""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text.endswith(REPLACEMENT):
            return ""  # a character of which more bytes come
        new = text[len(self._settled) :]
        # One token of context is enough for the spaces that tokenizers put between words, if it
        # has a text of its own; a character's bytes can be as many tokens.
        for count in range(1, min(BYTES, len(self._tokens) - self._start) + 1):
            last = self._decode(self._tokens[-count:])
            if last and REPLACEMENT not in last:
                self._start, text = len(self._tokens) - count, last
                break
        self._settled = text
        return self._give(new)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._decode(self._tokens[self._start :])[len(self._settled) :]
        self._settled += text
        rest = self._give(text)
        rest, self._held = rest + self._held, ""
        return rest

    def _give(self, new: str) -> str:
        if not self._stop or len(self._tokens) <= self._least:
            return new
        text = self._held + new
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        keep = max(
            (
                size
                for stop in self._stop
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
