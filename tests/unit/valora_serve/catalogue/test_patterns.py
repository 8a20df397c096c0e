"""Regular expressions of adapters: the same answers as `re`, and an end whatever they are."""

import re
import time

import pytest

from tests.support.cases import others_slow
from valora_serve.catalogue import patterns
from valora_serve.catalogue.patterns import alphas

PATHS = (
    "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.11.mlp.up_proj",
    "model.vision_tower.encoder.layers.3.mlp.fc1", "lm_head",
)  # fmt: skip
SOUND = [
    r".*language_model.*\.(q_proj|up_proj)", r"^(?!.*vision).*proj$", r"(?<=x)nothing|lm_head",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.\d+)",
    r"(?i:LM_HEAD)", r"(?P<a>.*)\.(?P<b>\w)(?P=b).*", r"[^.]+", "lm.head",
]  # fmt: skip
HOSTILE = [
    r"(a+)+$", r"(.*)*x", r"((.+)+\.)+!", r"(\w|\w\w)*-", r"(([\w.]+)+)+#", ".*" * 30 + "!",
    r"(?=(.*)*y)", "(((_{0,9999}){0,9999}){0,9999}){0,9999}.*x",
    r"(\w+\.?)*$(?<!proj)(?<!fc1)(?<!d)",
]  # fmt: skip


def found(pattern, paths=PATHS):
    return alphas({pattern: 4}, [(path, path) for path in paths])


@pytest.mark.parametrize("pattern", SOUND)
def test_the_answers_are_re_s(pattern):
    """A path matches as a whole, or its end after a dot."""
    ends = {path: [path.split(".", n)[-1] for n in range(path.count(".") + 1)] for path in PATHS}
    assert [alpha is not None for alpha in found(pattern)] == [
        any(re.fullmatch(pattern, end) for end in ends[path]) for path in PATHS
    ]


@pytest.mark.parametrize("pattern", others_slow(HOSTILE[1:2], HOSTILE))
def test_hostile_expressions_end(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 1)
    began = time.monotonic()
    paths = tuple(f"{'a' * 60}.{path}.{'_' * 40}" for path in PATHS * 50)
    try:
        found(pattern, paths)
    except ValueError as error:
        assert re.match("matching alpha_pattern takes more than 1 s|a part of alpha_", str(error))
    assert time.monotonic() - began < 60  # on a busy machine; it has 1 s of processor time


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{1,99999999999}", "(?P<idx>x)(?P<idx>y)", "x(?i)y", "(" * 4000 + ")" * 4000],
)
def test_what_is_no_expression(pattern):
    with pytest.raises(ValueError, match="a part of alpha_pattern is no regular expression"):
        found(pattern)


def test_plain_names_need_no_process(monkeypatch):
    monkeypatch.delattr("subprocess.run")
    assert alphas({"up.proj": 4, "mlp.fc1": 2}, [(path, path) for path in PATHS]) == [
        None, 4, 2, None
    ]  # fmt: skip
    for wild in ("q|v", "a*", "[x]", "a b", "ü", r"a\.b", "^a", "a$", "x\n"):
        with pytest.raises(AttributeError, match="run"):
            found(wild)
