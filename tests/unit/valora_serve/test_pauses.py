import gc
import sys
from contextlib import ExitStack

from valora_serve.pauses import short_pauses


def test_pauses_are_short_while_one_of_two_serves_and_as_before_afterwards(monkeypatch):
    before = sys.getswitchinterval()
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes seconds after many tests
    first, second = ExitStack(), ExitStack()
    first.enter_context(short_pauses())
    second.enter_context(short_pauses())
    first.close()
    assert sys.getswitchinterval() <= 0.001 < before
    assert gc.get_freeze_count() > 1000  # what lives as long as the server is not walked
    second.close()
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)
