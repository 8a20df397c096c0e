"""Text and bytes of single tokens."""

from typing import Any, Final

_SAME: Final = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS: Final = [byte for byte in range(256) if byte not in _SAME]
_BYTE_OF: Final = {chr(byte): byte for byte in _SAME} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
"""Bytes by the characters that stand for them in vocabularies such as GPT-2's."""


def text_and_bytes(tokenizer: Any, token: int) -> tuple[str, bytes | None]:
    """Return a token's text, as in the middle of others, and its own bytes.

    The bytes of a text's tokens are the text's, also where one is a part of a character and its
    own text a replacement character. None for a token that texts leave out, such as the end's.
    """
    text = tokenizer.decode([token])
    if text and not tokenizer.decode([token], skip_special_tokens=True):
        return text, None
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:  # weights may have more rows than the vocabulary
        return text, None
    if len(piece) == 6 and piece.startswith("<0x"):
        raw = bytes.fromhex(piece[3:5])
        return raw.decode(errors="replace"), raw
    if "\ufffd" not in text:
        if piece.startswith("▁"):  # decoders take a space from the first word
            text = " " * (len(piece) - len(piece.lstrip("▁"))) + text.lstrip(" ")
        return text, text.encode()
    found = [_BYTE_OF.get(char) for char in piece]
    return text, text.encode() if None in found else bytes(found)  # type: ignore[arg-type]
