"""The list of models."""

import threading

from tests.support.http_helpers import serving
from valora_serve.server.api import models
from valora_serve.server.api.models import card


def test_models_list_says_what_is_known(client):
    listed = {model.id: model for model in client.models.list()}
    assert next(iter(listed)) == "tiny"
    person = listed["person"]
    assert (person.parent, person.root, person.task) == ("adapter-1", "bundles/d", "detection")
    assert (person.labels, person.accuracy, person.metric) == (["person"], 0.87, "f1@0.5")
    assert (person.head, person.rank, person.max_model_len) == ("detection", 8, 2048)
    assert listed["adapter-1"].parent == "tiny"
    assert client.models.retrieve("scene").labels == ["street", "beach"]


def test_the_list_of_models_is_made_off_the_event_loop(monkeypatch):
    """There may be thousands of adapters."""
    threads = set()

    def told(*arguments, **more):
        threads.add(threading.current_thread().name)
        return card(*arguments, **more)

    monkeypatch.setattr(models, "card", told)
    with serving() as server:
        found = server.client.get("/v1/models").json()
        assert [one["id"] for one in found["data"]] == [one.name for one in server.engine.models()]
        assert found["object"] == "list"
        one = server.client.get("/v1/models/tiny").json()
        assert one == found["data"][0]
    assert any(name.startswith("work") for name in threads)
