"""Words of messages: those that agree with a number, and the first ones of an error."""

import io
import re
import sys
from collections.abc import Sequence

_CHOICE = re.compile(r"([^\s|]+)\|([^\s|]+)")


def plural(number: int, words: str) -> str:
    """A number with a noun whose plural ends in s, or ``class|classes has|have no samples``."""
    if "|" not in words:
        words += f"|{words.rsplit(maxsplit=1)[-1]}s"
    return f"{number} {agreeing(number, words)}"


def agreeing(number: float, words: str) -> str:
    """Words alone that agree with a number, e.g. ``has|have``."""
    return _CHOICE.sub(lambda found: found[1 if number == 1 else 2], words)


def joined(words: Sequence[str]) -> str:
    """Words in a sentence: ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def examples(texts: Sequence[str], limit: int) -> str:
    """The first texts of a list, and how many there are beyond them."""
    more = f"; and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + more


def first_line(error: BaseException) -> str:
    """The first line of what an error says; the name of its class if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip() if lines else type(error).__name__


def encode_all_output() -> None:
    """Let this process print what its terminal's encoding lacks, as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
