"""The decision trace: one line per step."""

import io

from tests.support.policy_views import policy, running, view, waiting
from valora_serve.orchestrator.trace import DecisionTrace


def test_trace_is_one_readable_line_per_step():
    file = io.StringIO()
    writer = DecisionTrace(file)
    seen = view([running(0, "a"), running(1, "b")], [waiting(1, "a"), waiting(2, "x")], now=12.5)
    decision = policy("slora").decide(seen)
    writer.write(seen, decision)
    assert file.getvalue() == (
        "   12.500000 unmerged -                   2d+32p run 2 wait 2  +x always unmerged\n"
    )


class FullDisk(io.StringIO):
    """A file that takes no more lines."""

    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_trace_and_nothing_else(caplog):
    writer = DecisionTrace(FullDisk())
    seen = view([running(0, "a")], [], now=1.0)
    decision = policy("slora").decide(seen)
    for _ in range(3):
        writer.write(seen, decision)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "No space left" in caplog.text
