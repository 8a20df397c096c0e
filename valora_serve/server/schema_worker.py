"""Compiles grammars first, in a process that some end: they take hours, or all memory."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import re
import resource
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from valora_serve.errors import RequestError
from valora_serve.server.json_schema import prepare

SECONDS = 1.0  # of computing, for one grammar
MAX_BYTES = 2**30  # beyond those of the process without any
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


def process() -> ProcessPoolExecutor:
    """Make the process, which is started when it is needed."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (os.getpid(),))


def _begin(server: int) -> None:
    """Limit this process, which ends with the server, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != server:  # it ended before that
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to handle
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    max_bytes = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def compiled(key: str) -> str:
    """Return the rules of a grammar, which its `key` describes in JSON, with those of its schemas.

    Raises a `RequestError` if it cannot be compiled.
    """
    import llguidance

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends this process
    try:
        rules, strict, schemas, *_ = json.loads(key)
        for name, schema in schemas.items():
            try:
                made = prepare(schema, strict=name in strict)
            except RequestError as error:
                raise RequestError(f"{_title(name, schema)}{error}") from error
            options = {"x-guidance": _OPTIONS if name == "json" else _OPTIONS | _SPACED}
            made = made | options if isinstance(made, dict) else options
            rules += f"\n{name}: %json {json.dumps(made)}"
        # Single bytes, as what takes for ever does so with any vocabulary.
        matcher_of(rules, llguidance.LLTokenizer("byte"))
    except RecursionError as error:
        raise RequestError("The JSON schema has too many levels: simplify it") from error
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return str(rules)


def matcher_of(rules: str, tokenizer: Any) -> Any:
    """Return the grammar engine's matcher of rules; or a `RequestError`."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False, **LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, rules, log_level=0, limits=limits)
    if matcher.is_error():
        wrong, title = matcher.get_error(), ""
        if at := re.match(r"at (\d+)\(", wrong):
            name, _, schema = rules.splitlines()[int(at[1]) - 1].partition(": %json ")
            title = _title(name, json.loads(schema)) if schema else ""
        raise RequestError(f"{title}The JSON schema cannot be used: {first_line(wrong)}")
    return matcher


def _title(name: str, schema: Any) -> str:
    """Return what an error about one of several schemas begins with."""
    return "" if name == "json" else f"{schema['title']}: "
