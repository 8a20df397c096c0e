"""Regular expressions of adapters: the same answers as `re`, and an end whatever they are."""

import re
import time

import pytest

from tests.support.cases import others_slow
from valora_serve.catalogue import patterns
from valora_serve.catalogue.patterns import MAX_PATTERNS, Expression, match_all, plain
from valora_serve.errors import AdapterError

PATHS = (
    "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.11.mlp.up_proj",
    "model.vision_tower.encoder.layers.3.mlp.fc1", "lm_head",
)  # fmt: skip
SOUND = [
    r".*language_model.*\.(q_proj|up_proj)", r"^(?!.*vision).*proj$", r"(?<=x)nothing|lm_head",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.\d+)",
    r"(?i)LM_HEAD", r"(.*)\.(\w)\2.*", r"[^.]+", "",
]  # fmt: skip
HOSTILE = [
    r"(a+)+$", r"(.*)*x", r"((.+)+\.)+!", r"(\w|\w\w)*-", r"(([\w.]+)+)+#", ".*" * 30 + "!",
    r"(?=(.*)*y)", "(((_{0,9999}){0,9999}){0,9999}){0,9999}.*x",
    r"(\w+\.?)*$(?<!proj)(?<!fc1)(?<!d)",
]  # fmt: skip


@pytest.mark.parametrize("how", ["match", "fullmatch"])
def test_the_answers_are_re_s(how):
    expressions = tuple(Expression("x", how, pattern) for pattern in SOUND)
    rows = match_all(expressions, PATHS)
    for pattern, row in zip(SOUND, rows, strict=True):
        expected = [getattr(re, how)(pattern, path) is not None for path in PATHS]
        assert [found is not None for found in row] == expected, pattern


def test_the_number_of_a_layer():
    numbered = Expression("x", "match", r"(?:^|.*?\.)layers\.(?P<idx>\d+)\.")
    assert match_all((numbered,), PATHS) == [["0", "11", "3", None]]
    assert match_all((), PATHS) == []


@pytest.mark.parametrize("pattern", others_slow(HOSTILE[1:2], HOSTILE))
def test_hostile_expressions_end(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 1)
    began = time.monotonic()
    paths = tuple(f"{'a' * 60}.{path}.{'_' * 40}" for path in PATHS * 50)
    asked = tuple(Expression("target_modules", how, pattern) for how in ("match", "fullmatch"))
    known = "matching target_modules takes more than 1 s|target_modules is no"
    try:
        match_all(asked, paths)
    except AdapterError as error:
        assert re.match(known, str(error))
    assert time.monotonic() - began < 60  # on a busy machine; it has 1 s of processor time


def test_invalid_and_immoderate_expressions():
    for written, message in (
        (["("], "target_modules is no regular expression .*missing"),
        (["a{1,99999999999}"], "target_modules is no regular expression"),
        (["(?P<idx>x)(?P<idx>y)"], "is no regular expression"),
        (["x(?i)y"], "is no regular expression"),
        (["a" * 20_000], "20000 characters"),
        ([f"a{n}*" for n in range(MAX_PATTERNS + 1)], f"more than {MAX_PATTERNS}"),
    ):
        with pytest.raises(AdapterError, match=message):
            match_all(tuple(Expression("target_modules", "match", p) for p in written), PATHS)
    nested = "(" * 4000 + ")" * 4000
    with pytest.raises(AdapterError):
        match_all((Expression("target_modules", "match", nested),), PATHS)


def test_plain_names():
    assert all(map(plain, ("q_proj", "layers.0.mlp", "a-b", "")))
    assert not any(map(plain, ("q|v", "a*", ".*x", "[x]", "a b", "ü", r"a\.b", "^a", "a$", "x\n")))
