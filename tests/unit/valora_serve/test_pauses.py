import gc
import sys

from valora_serve.pauses import short_pauses


def test_pauses_are_short_while_serving_and_as_before_afterwards():
    before, held = sys.getswitchinterval(), [[] for _ in range(1000)]
    with short_pauses():
        assert sys.getswitchinterval() <= 0.001 < before
        # What lives as long as the server is not walked by a collection; what comes later is.
        walked = {id(item) for item in gc.get_objects()}
        assert walked.isdisjoint(map(id, held))
        later = [[] for _ in range(10)]
        assert {id(item) for item in gc.get_objects()} >= set(map(id, later))
    assert sys.getswitchinterval() == before
    assert {id(item) for item in gc.get_objects()} >= set(map(id, held))
