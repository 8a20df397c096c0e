"""Random JSON schemas, and random answers to them token by token."""

import numpy as np
from hypothesis import strategies as st

NUMBERS = [
    0, 1, -1, 0.5, -0.5, 5, 5.5, 0.1, 1e-3, 1e-9, 1e-20, 1e-300, -1e-300, 12.25, 99, 100, 1e15,
    1e17,
    2**53, 2**53 + 1, 2**63 - 1, 1e19, -(2**63), 123456789.123456789, 0.1 + 0.2, 1.0, -7.75,
]  # fmt: skip
PATTERNS = [
    "^[a-c]{2,5}$", "ab", "^a|b$", r"\d+", r"\w{3}", "^(foo|bar)+$", "[^x]{2}", "^.$", "a.*b",
    r"\s", "é", r"^\S+@\S+$", "[[:alpha:]]", r"\p{L}{2}", "^$", r"\bcat\b", "(?i)a", "[a&&b]",
]  # fmt: skip
FORMATS = ["date", "date-time", "email", "ipv4", "ipv6", "uuid", "uri", "hostname", "time"]
CONSTANTS = [
    None, True, False, 0, 1, -1, 1.5, "x", 'é\n"', "", [1, "a"], {"a": 1}, {}, [], 1e-7, -0.0, 1.0,
    10**15,
]  # fmt: skip
NAMES = ["a", "b", "c", "d/e", "f~g", "minimum", "é"]


def _of(*kinds, **keywords):
    """Schemas of one of these types, each with some of the keywords."""
    return st.fixed_dictionaries({"type": st.sampled_from(kinds)}, optional=keywords)


_number = st.sampled_from(NUMBERS) | st.floats(-20, 20) | st.integers(-20, 20)
_numeric = _of(
    "number", "integer", multipleOf=st.sampled_from([1, 2, 3, 0.5, 0.25, 7, 10, 1.5]),
    minimum=_number, maximum=_number, exclusiveMinimum=_number, exclusiveMaximum=_number,
)  # fmt: skip
_string = _of(
    "string", minLength=st.integers(0, 6), maxLength=st.integers(0, 8),
    pattern=st.sampled_from(PATTERNS), format=st.sampled_from(FORMATS),
)  # fmt: skip
_constant = st.sampled_from(CONSTANTS)
_simple = (
    _numeric
    | _string
    | st.fixed_dictionaries({"const": _constant})
    | st.fixed_dictionaries({"enum": st.lists(_constant, min_size=1, max_size=4)})
    | st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}])
    | st.builds(lambda place, more: {"$ref": place} | more, st.sampled_from(["#/$defs/n", "#"]),
                st.just({}) | _numeric)
)  # fmt: skip


def _nested(inner):
    named, few = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4), st.integers(0, 4)
    closed = st.sampled_from([False, False, {"type": "integer"}])
    patterns = st.dictionaries(st.sampled_from(["^x", "y$", "^a"]), inner, max_size=1)
    objects = named.flatmap(lambda made: _of(
        "object", properties=st.just(made), additionalProperties=closed, minProperties=few,
        required=st.lists(st.sampled_from(sorted(made) or ["a"]), unique=True),
        maxProperties=few, patternProperties=patterns,
    ))  # fmt: skip
    several = st.lists(inner, min_size=1, max_size=3)
    arrays = _of("array", items=inner, prefixItems=several, minItems=few, maxItems=few)
    joined = st.builds(
        lambda key, parts, more: {key: parts} | more, st.sampled_from(["anyOf", "oneOf", "allOf"]),
        several, st.just({}) | _numeric | _string,
    )  # fmt: skip
    return objects | arrays | joined


schemas = st.recursive(_simple, _nested, max_leaves=8)
"""Some are contradictory, and some cannot be served."""


def random_answer(constraint, tokenizer, seed, *, padded=0, most=200, begin=""):
    """Walk through a constraint by tokens that it allows.

    It begins with the text `begin`. After 40 tokens, those that close a text, a list or an object
    are preferred.

    Returns:
        The text at the end; None if it has not ended after `most` tokens.
    """
    draw = np.random.default_rng(seed)
    tokens = tokenizer(begin, add_special_tokens=False)["input_ids"]
    for token in tokens:
        constraint.advance(token)
    for step in range(most):
        allowed = np.ones(len(tokenizer) + padded, dtype=bool)
        constraint.mask(allowed)
        assert not allowed[len(tokenizer) :].any()
        choices = np.flatnonzero(allowed)
        assert choices.size
        end = tokenizer.eos_token_id
        if end in choices and (len(choices) == 1 or draw.random() < 0.5):
            constraint.advance(end)
            return str(tokenizer.decode(tokens))
        choices = choices[choices != end]
        if step > 40:
            starts = {one: tokenizer.decode([one])[:1] for one in choices.tolist()}
            closing = [one for one, start in starts.items() if start and start in '"}]']
            closing = closing or [one for one, start in starts.items() if start == ","]
            choices = np.array(closing) if closing else choices
        token = int(draw.choice(choices))
        tokens.append(token)
        constraint.advance(token)
    return None
