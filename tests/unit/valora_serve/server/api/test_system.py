"""Health, version and the console."""

import sys

from tests.support.http_helpers import serving


def test_version_and_console(tmp_path):
    with serving() as server:
        found = server.client.get("/version").json()
        assert found["base"] == "tiny"
        assert found["python"] == sys.version.split()[0]
        page = server.client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in ("app.js", "style.css", "icon.svg"):
            assert server.client.get(f"/console/{name}").status_code == 200
        for name in ("index.html", "../server.py", "%2e%2e/server.py", "x"):
            assert server.client.get(f"/console/{name}").status_code == 404
    with serving(console=False) as server:
        assert server.client.get("/").status_code == 404
