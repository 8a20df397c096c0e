"""What a key sees of others: their models, and whether the server has read their prompts."""

import re
from dataclasses import replace

import pytest

from tests.support.fake_engine import ADAPTER, PERSON, FakeEngine
from tests.support.http_helpers import PNG, PNG_URL, serving
from valora_serve.errors import SettingsError, UnknownModelError
from valora_serve.server.access.keys import Key, new_key, read_keys

MESSAGES = [{"role": "user", "content": "hello"}]
BY_BODY = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1, "valora": {"head": False}},
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1, "valora": {"head": False}},
    "/v1/embeddings": {"input": "x"},
}  # and `model`
BY_PATH = {"/v1/vision/{}": {"images": [PNG_URL]}}
SALTS = (None, "s", "t")


@pytest.fixture
def keyed(tmp_path):
    """Makes keys, each limited to some models; gives their headers and the file."""

    def made(**limits):
        found, lines = {}, []
        for name, models in limits.items():
            secret, line = new_key(name, "user", models)
            found[name] = {"authorization": f"Bearer {secret}"}
            lines.append(line)
        (tmp_path / "keys").write_text("\n".join(lines))
        return found, str(tmp_path / "keys")

    return made


@pytest.mark.parametrize(
    ("sharing", "group"),
    [
        ("key", lambda key, salt: (key, salt)),
        ("salt", lambda key, salt: (None if salt else key, salt)),
        ("all", lambda key, salt: salt),
    ],
)
def test_who_shares_cached_prompts(keyed, sharing, group):
    keys, file = keyed(alice=(), bob=())
    with serving(keys_file=file, cache_sharing=sharing) as server:
        asked = server.engine.asked
        streamed = [(path, body | {"stream": True}) for path, body in BY_BODY.items()][:3]
        every = (*BY_BODY.items(), *BY_PATH.items(), *streamed)
        for path, body in every[1::3] if sharing == "salt" else every[1:2]:
            salts = {}
            for name, headers in keys.items():
                for salt in SALTS:
                    sent = body if salt is None else body | {"cache_salt": salt}
                    answer = server.client.post(path.format("person"), json=sent, headers=headers)
                    assert answer.status_code == 200, answer.text
                    salts[name, salt] = asked[-1].cache_salt
            for one, other in ((one, other) for one in salts for other in salts):
                same = group(*one) == group(*other)
                assert (salts[one] == salts[other]) == same, (path, one, other)
        form = {"files": {"image": PNG}, "data": {"cache_salt": "s"}}
        server.client.post("/v1/vision/person", **form, headers=keys["bob"]).raise_for_status()
        assert asked[-1].cache_salt == salts["bob", "s"]


def test_salts_without_keys_and_salts_that_are_none():
    with serving() as server:
        for salt in (None, "s"):
            body = BY_BODY["/v1/completions"] | {"cache_salt": salt}
            assert server.client.post("/v1/completions", json=body).status_code == 200
        assert [one.cache_salt is None for one in server.engine.asked] == [True, False]
        for salt in ("", "x" * 1025, 7, ["s"]):
            for path, body in BY_BODY.items():
                answer = server.client.post(path, json=body | {"cache_salt": salt})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


OTHERS = ("team-1", "rules", "scene", "caption", "adapter-1", "tiny")


def filled():
    """An engine with an adapter and a context that are in no bundle."""
    engine = FakeEngine()
    engine._served["team-1"] = replace(ADAPTER, name="team-1", adapter="team-1", bundle=None)
    engine._served["rules"] = replace(
        PERSON, name="rules", bundle=None, form="prefix", head=None, task="context", prompt="{}"
    )
    return engine


PATTERNS = {
    "all": ((), {"person", *OTHERS}),
    "one": (("person",), {"person"}),
    "none": (("PERSON", "person?", "erson"), set()),
    "several": (("team-*", "rules"), {"team-1", "rules"}),
    "bundle": (("d@1",), {"adapter-1", "person", "scene", "caption"}),
    "base": (("d@*", "tiny"), {"adapter-1", "person", "scene", "caption", "tiny"}),
    "version": (("d*", "d@2"), set()),  # a bundle is meant only by its version, too
    "star": (("*",), {"person", *OTHERS}),
}


def test_a_key_sees_the_models_that_its_patterns_name(keyed):
    keys, file = keyed(**{name: models for name, (models, _) in PATTERNS.items()})
    with serving(filled(), keys_file=file) as server:
        for key, (models, seen) in PATTERNS.items():

            def status(method, path, key=key, **body):
                answer = server.client.request(method, path, headers=keys[key], **body)
                return answer.status_code

            for path, there in (("/v1/models", seen), ("/v1/contexts", seen & {"rules"})):
                found = server.client.get(path, headers=keys[key]).json()["data"]
                assert {one["id"] for one in found} == there
            for name in ("person", *OTHERS):
                expected = 200 if name in seen else 404
                assert status("GET", f"/v1/models/{name}") == expected
                for path, body in list(BY_BODY.items())[:: 1 if key == "base" else 3]:
                    assert status("POST", path, json=body | {"model": name}) == expected, path
            bare = status("POST", "/v1/completions", json=BY_BODY["/v1/completions"])
            assert bare == (200 if "tiny" in seen else 404)
            for path in ("/v1/status", "/metrics"):
                assert status("GET", path) == (403 if models else 200)
        assert server.client.get("/metrics").status_code == 401
    with serving(filled(), keys_file=keyed(all=())[1]) as server:
        assert server.client.get("/metrics").status_code == 200


def test_models_that_a_key_does_not_see_are_as_if_they_were_not_there(keyed):
    keys, file = keyed(app=("person",))
    with serving(filled(), keys_file=file) as server:

        def said(method, path, name, **body):
            answer = server.client.request(method, path, headers=keys["app"], **body)
            assert answer.status_code == 404, answer.text
            text = re.sub(rf"\b{re.escape(name)}\b", "NAME", answer.text)
            assert not any(re.search(rf"\b{one}\b", text) for one in (*OTHERS, "d@1")), text
            return text

        for name in OTHERS:
            for path, body in BY_BODY.items():
                sent = body | {"model": name}
                none = said("POST", path, "none-such", json=body | {"model": "none-such"})
                assert said("POST", path, name, json=sent) == none
            for path, body in BY_PATH.items():
                none = said("POST", path.format("none-such"), "none-such", json=body)
                assert said("POST", path.format(name), name, json=body) == none
            for path in ("/v1/models/{}", "/v1/examples/{}/0/0"):
                none = said("GET", path.format("none-such"), "none-such")
                assert said("GET", path.format(name), name) == none


def test_a_model_that_is_unloaded_before_the_engine_looks_is_told_without_others(keyed):
    keys, file = keyed(app=("person",))
    with serving(keys_file=file) as server:
        server.engine.refuse = UnknownModelError("no model is named person: use one of team-1")
        body = {"images": [PNG_URL]}
        answer = server.client.post("/v1/vision/person", json=body, headers=keys["app"])
    assert (answer.status_code, "team-1" in answer.text) == (404, False)


@pytest.mark.parametrize(
    ("line", "models"),
    [
        ("\ufeffapp user {}", ()), ("app user {}   cars-* d@*  # both", ("cars-*", "d@*")),
        ("ops admin {}", ()),
        *((line, None) for line in ("ops admin {} cars-*", "app user cars-* {}", "name",
                                    "name user abc", "name root {}", "sk-valora-x")),
    ],
)  # fmt: skip
def test_lines_of_keys_files(tmp_path, line, models):
    (tmp_path / "keys").write_text(line.format("a" * 64))
    if models is None:
        with pytest.raises(SettingsError, match=r"line 1 .*valora-serve key") as refused:
            read_keys(tmp_path / "keys")
        assert "sk-valora-x" not in str(refused.value)  # it may be a key in the clear
    else:
        name, role = line.strip("\ufeff").split()[:2]
        assert read_keys(tmp_path / "keys") == [Key(name, role, "a" * 64, models)]
