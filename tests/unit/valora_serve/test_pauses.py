import gc
import sys

from valora_serve.pauses import short_pauses


def test_pauses_are_short_while_serving_and_as_before_afterwards(monkeypatch):
    before = sys.getswitchinterval()
    monkeypatch.setattr(gc, "collect", lambda: 0)  # takes seconds after many tests
    with short_pauses():
        assert sys.getswitchinterval() <= 0.001 < before
        assert gc.get_freeze_count() > 1000  # what lives as long as the server is not walked
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (before, 0)
