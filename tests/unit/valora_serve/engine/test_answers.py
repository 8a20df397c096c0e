"""The last output of a request: finish reason, usage and error."""

from pathlib import Path

import pytest

from tests.support.engine_reference import assert_empty, make_engine, question, run
from valora_serve.types import Mode, Output

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_is_said_of_a_step(base: str, adapters: dict[str, Path]) -> None:
    engine = make_engine(base, {"a": adapters["a"]}, policy="merge_only")
    found = run(engine, [question("one", "a"), question("two", "a")])
    last: Output | None = found["one"].last
    assert last is not None
    assert last.mode is Mode.MERGED
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.completion) == (12, 6)
    times = last.times
    assert times is not None
    assert times.arrival <= (times.started or 0) <= (times.first_token or 0) <= times.finished  # type: ignore[operator]
    stats = engine.stats()
    assert (stats.mode, stats.finished) == (Mode.MERGED, {"length": 2})
    assert stats.merged_adapter is not None
    assert_empty(engine)
