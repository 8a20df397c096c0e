"""Version, console and status."""

import sys
from dataclasses import replace

from tests.support.fake_engine import FakeEngine
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


def test_status_has_every_replica():
    engine = FakeEngine()
    with serving(engine) as server:
        assert server.client.get("/v1/status").json()["replicas"] is None
        parts = {
            "east": replace(engine.stats(), running=3, pages_kv=7),
            "west": replace(engine.stats(), running=5, prefix_queries=0, merged_adapter=None),
        }
        engine.peers = parts
        found = server.client.get("/v1/status").json()
        assert found["running"] == 8
        east, west = found["replicas"]["east"], found["replicas"]["west"]
        assert (east["running"], east["pages_kv"], east["prefix_hit_ratio"]) == (3, 7, 0.5)
        facts = (west["running"], west["merged_adapter"], west["prefix_hit_ratio"])
        assert facts == (5, None, None)
        assert set(east) < set(found)
