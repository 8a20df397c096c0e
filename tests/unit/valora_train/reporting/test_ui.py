"""MLflow's start page as `make ui` serves it."""

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from fastapi.testclient import TestClient

from valora_train.reporting.ui import CHOOSE, choosing_model_training


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()

    @app.get("/")
    @app.get("/elsewhere")
    def page(request: Request) -> HTMLResponse:
        status = 304 if "if-none-match" in request.headers else 200
        return HTMLResponse("<html><head><title>x</title></head></html>", status, {"etag": "1"})

    return TestClient(choosing_model_training(app))


def test_the_start_page_chooses_model_training_once(client: TestClient) -> None:
    plain, again = client.get("/elsewhere"), client.get("/", headers={"if-none-match": "1"})
    assert CHOOSE not in plain.text
    assert plain.headers["etag"] == "1"
    # A copy of the page that the browser took from MLflow itself is not used.
    assert again.status_code == 200
    assert again.text == plain.text.replace("<head>", "<head>" + CHOOSE)
    assert int(again.headers["content-length"]) == len(again.content)
    assert "etag" not in again.headers
    # A browser that has chosen GenAI keeps its choice.
    assert "getItem('mlflow.workflowType_v1')||" in CHOOSE
