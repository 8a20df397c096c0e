"""MLflow's start page as `make ui` serves it."""

import pytest
from mlflow.server import app as pages

from valora_train.reporting.ui import CHOOSE, create_app


def test_the_start_page_chooses_model_training_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pages.view_functions, "serve", pages.view_functions["serve"])
    before = pages.test_client().get("/")
    create_app()
    # A copy of the page that the browser took from MLflow itself is not used.
    after = pages.test_client().get("/", headers={"if-none-match": before.headers["etag"]})
    assert (after.status_code, "etag" in after.headers) == (200, False)
    assert after.text == before.text.replace("<head>", "<head>" + CHOOSE)
    assert after.text != before.text
    # A browser that has chosen GenAI keeps its choice.
    assert "getItem('mlflow.workflowType_v1')||" in CHOOSE
