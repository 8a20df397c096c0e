"""Logs: request ids, one line for each event, no secrets."""

import json
import logging

from tests.support.http_helpers import chat, serving
from valora_serve.server.telemetry import logs


def test_json_logs_have_the_requests_id_and_no_content(capsys):
    key = "a-secret-key-that-is-long"
    logs.set_up("info", "json")
    with serving(api_key=key, log_format="json") as server:
        answer = server.client.post(
            "/v1/chat/completions", json=chat("a private question"),
            headers={"authorization": "Bearer a-secret-key-that-is-long", "x-request-id": "abc-1"},
        )  # fmt: skip
        assert answer.headers["x-request-id"] == "abc-1"
        odd = server.client.get("/health", headers={"x-request-id": "a b\tc" * 50})
        assert odd.headers["x-request-id"] != "a b\tc" * 50
        server.client.get("/v1/%0aforged%20line", headers={"authorization": "Bearer x"})
        form = {"authorization": f"Bearer {key}", "content-type": "multipart/form-data; boundary=x"}
        assert server.client.post("/v1/vision", content="--x:--x--", headers=form).is_client_error
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    (line,) = [line for line in lines if line.get("request_id") == "abc-1"]
    assert (line["event"], line["status"], line["model"]) == ("request", 200, "tiny")
    assert line["key"] == "api_key" and line["seconds"] > 0
    assert "a-secret-key" not in text and "private" not in text and "end of boundary" in text
    assert len(lines) == len([line for line in text.splitlines() if line])


def test_text_logs_stay_on_one_line():
    form = logs._Formatter(False)
    record = logging.LogRecord("x", logging.INFO, "", 0, "said\nforged", (), None)
    record.facts = {"path": "/a\r\nINFO forged"}
    assert len(form.format(record).splitlines()) == 1
