"""Streaming detokenisation: text of each new token, and the end of an answer at a stop text.

tokenizers' `DecodeStream` decodes. What it lacks is here: stop texts, the text of an unfinished
character at the end, going on after bytes that are no UTF-8, and tokenizers of other libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from collections.abc import Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a growing list of tokens.

    Text that may still change is held back: an unfinished character at the end, and the possible
    beginning of a stop text.

    Args:
        tokenizer: transformers' tokenizer.
        stop: Texts that end the answer; they are not part of it.
        min_tokens: Number of first tokens in whose text no stop text is looked for.

    Attributes:
        stopped: Whether a stop text has come.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        # transformers' own clean-up of spaces comes after the library's decoding.
        native = not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._backend = getattr(tokenizer, "backend_tokenizer", None) if native else None
        self._stop = tuple(text for text in stop if text)
        self._min_tokens = min_tokens
        self._count = 0
        self._stream = self._new_stream()
        self._pending: list[int] = []  # tokens whose text has not come yet
        self._held = ""  # text that may become a stop text
        self._looks = True  # whether stop texts count in the last token
        self.stopped = False

    def push(self, token: int, *, stop: bool = True) -> str:
        """Add a token, in which stop texts count or not; returns the text that is new and final."""
        self._count += 1
        self._looks = stop
        self._pending.append(token)
        try:
            text = self._stream.step(self._backend, [token])
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # With bytes that are no UTF-8, some tokenizers decode the text before them differently.
            # That text was returned already, so a new stream goes on behind it.
            self._stream = self._new_stream()
            text = self._stream.step(self._backend, self._pending)
        if text is None:
            return ""
        self._pending.clear()
        return self._up_to_stop(text)

    def flush(self) -> str:
        """The text that was held back, at the end of the answer."""
        if self.stopped:
            return ""
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        self._pending.clear()
        rest = self._up_to_stop(text)
        rest, self._held = rest + self._held, ""
        return rest

    def _new_stream(self) -> Any:
        if self._backend is None:
            return _PythonStream(self._tokenizer)
        return DecodeStream(skip_special_tokens=True)

    def _up_to_stop(self, new: str) -> str:
        """The part of the held and the new text that is certain to come before a stop text."""
        if not self._stop or self._count <= self._min_tokens or not self._looks:
            new, self._held = self._held + new, ""
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


class _PythonStream:
    """The algorithm of `DecodeStream`, for tokenizers that are not of the tokenizers library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._known, self._prefix = (
            0,
            "",
        )  # the first tokens, whose text was returned, and that text

    def step(self, _: None, tokens: Sequence[int]) -> str | None:
        """Add tokens; returns the text that is new and final, or None."""
        self._tokens += tokens
        text = self._decode()
        if text.endswith(REPLACEMENT) or len(text) <= len(self._prefix):
            return None
        if not text.startswith(self._prefix):
            raise ValueError("Invalid prefix")
        new = text[len(self._prefix) :]
        del self._tokens[: self._known]
        self._known, self._prefix = len(self._tokens), self._decode()
        return new

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return text
