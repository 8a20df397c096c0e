"""The list of models."""


def test_models_list_says_what_is_known(client):
    listed = {model.id: model for model in client.models.list()}
    assert next(iter(listed)) == "tiny"
    person = listed["person"]
    assert (person.parent, person.root, person.task) == ("adapter-1", "bundles/d", "detection")
    assert (person.labels, person.accuracy, person.metric) == (["person"], 0.87, "f1@0.5")
    assert (person.head, person.rank, person.max_model_len) == ("detection", 8, 2048)
    assert listed["adapter-1"].parent == "tiny"
    assert client.models.retrieve("scene").labels == ["street", "beach"]
