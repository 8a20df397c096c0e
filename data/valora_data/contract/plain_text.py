"""Texts of users as plain text: ``<image>`` or ``<|im_end|>`` in them is no special token.

Such words are marked before a chat template writes special tokens around them, and the tokenizer
drops the mark again when special tokens have been found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MARK = "\ufdd0"  # a noncharacter of Unicode
_KEPT = "\u2060"  # a word joiner, in tokens that are found when the mark has been dropped


class PlainText:
    """Marks the special tokens of a tokenizer in texts of users.

    Args:
        tokenizer: transformers' tokenizer, which drops the marks from now on.
        placeholders: Ids of tokens that are special here, whatever the tokenizer says.
    """

    def __init__(self, tokenizer: Any, placeholders: Sequence[int | None] = ()) -> None:
        from tokenizers import normalizers

        self._marked: dict[str, str] = {}
        self._longest = 0
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return
        for number, token in backend.get_added_tokens_decoder().items():
            if token.special or number in placeholders:
                mark = _KEPT if token.normalized else _MARK
                self._marked[token.content] = token.content[:1] + mark + token.content[1:]
        self._longest = max(map(len, self._marked), default=0)
        found = backend.normalizer or normalizers.Sequence([])
        if _MARK in found.normalize_str(_MARK):
            backend.normalizer = normalizers.Sequence([normalizers.Replace(_MARK, ""), found])

    def text(self, text: str) -> str:
        """Return a text whose special tokens are marked."""
        for token, marked in self._marked.items():
            text = text.replace(token, marked)
        return text

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return turns of a conversation whose special tokens are marked, in each text."""
        return [{**turn, "content": self._content(turn["content"])} for turn in messages]

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.text(content)
        parts, before = [], ""  # the text right before a part, which may begin a token
        for part in content:
            text = self.text(part["text"]) if "text" in part else ""
            if text and any(token in before + text[: self._longest] for token in self._marked):
                text = _MARK + text
            before = (before + text)[-self._longest :] if "text" in part else ""
            parts.append({**part, "text": text} if "text" in part else part)
        return parts
