"""Runs in MLflow that compare several jobs."""

import pytest

from tests.support.stores import new_store
from valora_train.reporting.study import StudyRun


def test_a_run_is_continued_by_its_key_and_ended_by_an_error(tmp_path):
    uri = new_store(tmp_path)
    first = StudyRun(uri, "valora/x", "sweep 7", "one", {})
    with pytest.raises(KeyboardInterrupt), first:
        raise KeyboardInterrupt
    assert first._client.get_run(first.run_id).info.status == "KILLED"
    again = StudyRun(uri, "valora/x", "sweep 7", "two", {})
    other = StudyRun(uri, "valora/x", "sweep 8", "three", {}, parent=again.run_id)
    assert again.run_id == first.run_id != other.run_id
    assert again._client.get_run(again.run_id).info.run_name == "two"
    assert other._client.get_run(other.run_id).data.tags["mlflow.parentRunId"] == again.run_id
