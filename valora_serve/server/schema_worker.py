"""The process that compiles grammars first: ``python -m valora_serve.server.schema_worker``.

Some schemas take the grammar engine hours, or all memory, and end only this process. A job is a
line of JSON, [rules, strict, schemas, …] of a `Grammar`; the answer is a line [error, rules].
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import Any

from valora_serve.errors import RequestError
from valora_serve.server.json_schema import prepare

SECONDS = 1.0  # of computing, for one grammar
MAX_BYTES = 2**30
MAX_STACK = 2**21  # bytes, less than any thread of the server has
LIMITS: dict[str, Any] = {
    # Together they bound the computation of a token's mask to about 5 ms for 150,000 tokens.
    "max_items_in_row": 1_000,
    "step_max_items": 10_000,
    "step_lexer_fuel": 30_000,
    # Memory, about 1 kB a state.
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
}
_OPTIONS = {"whitespace_flexible": False, "lenient": False, "coerce_one_of": False}
_SPACED = {"item_separator": ", ", "key_separator": ": "}  # as chat templates write calls


def first_line(error: object) -> str:
    """Return the first line of an error of the grammar engine, without its place in the rules."""
    text = str(error).strip().rpartition("failed to compile JSON schema: ")[2]
    text = re.sub(r"^regex parse error:\n {4}(.*)\n[ ^]*\nerror: ", r"pattern \1: ", text)
    return text.splitlines()[0][:300] if text else "it is none"


def rules_of(rules: str, strict: list[str], schemas: dict[str, Any]) -> str:
    """Return the rules of a grammar, with those of its schemas."""
    for name, schema in schemas.items():
        try:
            made = prepare(schema, strict=name in strict)
        except RequestError as error:
            raise RequestError(f"{_title(schemas, name)}{error}") from error
        options = {"x-guidance": _OPTIONS if name == "json" else _OPTIONS | _SPACED}
        rules += (
            f"\n{name}: %json {json.dumps(made | options if isinstance(made, dict) else options)}"
        )
    return rules


def _title(schemas: dict[str, Any], name: str) -> str:
    """Return what an error about one of several schemas begins with."""
    return f"{schemas[name]['title']}: " if name in schemas and name != "json" else ""


def main() -> None:
    """Answer jobs until the input ends."""
    import llguidance

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))
    # A vocabulary of single bytes, as what takes for ever does so with any.
    tokenizer = llguidance.LLTokenizer("byte")
    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends this process
        rules = error = ""
        try:
            schemas = json.loads(line)[2]
            rules = rules_of(*json.loads(line)[:3])
            matcher = llguidance.LLMatcher(tokenizer, rules, log_level=0, limits=limits)
            if matcher.is_error():
                error = f"The JSON schema cannot be used: {first_line(matcher.get_error())}"
                if place := re.match(r"at (\d+)\(", matcher.get_error()):
                    name = rules.splitlines()[int(place[1]) - 1].partition(":")[0]
                    error = f"{_title(schemas, name)}{error}"
        except RequestError as refused:
            error = str(refused)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps([error, rules]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
