"""Regular expressions of adapters: the same answers as `re`, and an end whatever they are."""

import re
import time

import pytest

from tests.support.cases import others_slow
from valora_serve.catalogue import patterns
from valora_serve.catalogue.patterns import place

PATHS = (
    "model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.11.mlp.up_proj",
    "model.vision_tower.encoder.layers.3.mlp.fc1", "lm_head",
)  # fmt: skip
SOUND = [
    r".*language_model.*\.(q_proj|up_proj)", r"^(?!.*vision).*proj$", r"(?<=x)nothing|lm_head",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.\d+)",
    r"(?i)LM_HEAD", r"(.*)\.(\w)\2.*", r"[^.]+", "lm.head",
]  # fmt: skip
HOSTILE = [
    r"(a+)+$", r"(.*)*x", r"((.+)+\.)+!", r"(\w|\w\w)*-", r"(([\w.]+)+)+#", ".*" * 30 + "!",
    r"(?=(.*)*y)", "(((_{0,9999}){0,9999}){0,9999}){0,9999}.*x",
    r"(\w+\.?)*$(?<!proj)(?<!fc1)(?<!d)",
]  # fmt: skip
EMPTY = {
    "target_modules": [], "exclude_modules": [], "layers_pattern": [], "layers_to_transform": [],
    "rank_pattern": {}, "alpha_pattern": {}, "r": 8, "lora_alpha": 16,
}  # fmt: skip


def placed(paths=PATHS, **rules):
    return place(EMPTY | rules, [(path, path) for path in paths])


@pytest.mark.parametrize("pattern", SOUND)
def test_the_answers_are_re_s(pattern):
    assert [found is not None for found in placed(target_modules=pattern)] == [
        re.fullmatch(pattern, path) is not None for path in PATHS
    ]


@pytest.mark.parametrize("pattern", others_slow(HOSTILE[1:2], HOSTILE))
def test_hostile_expressions_end(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "SECONDS", 1)
    began = time.monotonic()
    paths = tuple(f"{'a' * 60}.{path}.{'_' * 40}" for path in PATHS * 50)
    try:
        placed(paths, target_modules="all-linear", rank_pattern={pattern: 4})
    except ValueError as error:
        assert re.match("matching rank_pattern takes more than 1 s|a part of rank_pa", str(error))
    assert time.monotonic() - began < 60  # on a busy machine; it has 1 s of processor time


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{1,99999999999}", "(?P<idx>x)(?P<idx>y)", "x(?i)y", "(" * 4000 + ")" * 4000],
)
def test_what_is_no_expression(pattern):
    with pytest.raises(ValueError, match="a part of target_modules is no regular expression"):
        placed(target_modules=pattern)


def test_plain_names_need_no_process(monkeypatch):
    monkeypatch.delattr("subprocess.run")
    rules = {"layers_to_transform": [11, 3], "layers_pattern": ["layers"],
             "rank_pattern": {"up.proj": 4}, "alpha_pattern": {"mlp.fc1": 2}}  # fmt: skip
    for names in (["up_proj", "fc1"], "all-linear"):
        found = placed(target_modules=names, **rules)
        assert found[1:3] == [(4, 16), (8, 2)]
        assert (found[0] is None) == (names != "all-linear")
    for wild in ("q|v", "a*", "[x]", "a b", "ü", r"a\.b", "^a", "a$", "x\n"):
        with pytest.raises(AttributeError, match="run"):
            placed(target_modules=wild)
