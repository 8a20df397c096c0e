"""Random JSON schemas, and random answers to them token by token."""

import random

import numpy as np

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


def _number(draw):
    if draw.random() < 0.7:
        return draw.choice(NUMBERS)
    return round(draw.uniform(-20, 20), draw.choice([0, 1, 2, 5, 17]))


def _numeric(draw):
    made = {"type": draw.choice(["number", "integer", "number"])}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if draw.random() < 0.4:
            made[key] = _number(draw)
    if draw.random() < 0.2:
        made["multipleOf"] = draw.choice([1, 2, 3, 0.5, 0.25, 7, 10, 1.5])
    return made


def _string(draw):
    made = {"type": "string"}
    if draw.random() < 0.4:
        made["minLength"] = draw.randint(0, 6)
    if draw.random() < 0.4:
        made["maxLength"] = draw.randint(0, 8)
    if draw.random() < 0.5:
        made["pattern"] = draw.choice(PATTERNS)
    if draw.random() < 0.15:
        made["format"] = draw.choice(FORMATS)
    return made


def _simple(draw):
    way = draw.randrange(6)
    if way < 2:
        return _numeric(draw)
    if way == 2:
        return _string(draw)
    if way == 3:
        return {"const": draw.choice(CONSTANTS)}
    if way == 4:
        return {"enum": draw.choices(CONSTANTS, k=draw.randint(1, 4))}
    return draw.choice([{"type": "null"}, {"type": "boolean"}, {}])


def _object(draw, depth):
    names = draw.sample(["a", "b", "c", "d/e", "f~g", "minimum", "é"], draw.randint(0, 4))
    made = {
        "type": "object", "properties": {name: _any(draw, depth + 1) for name in names}
    }  # fmt: skip
    if draw.random() < 0.7:
        made["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.7:
        made["additionalProperties"] = draw.choice([False, False, {"type": "integer"}])
    if draw.random() < 0.15:
        made["patternProperties"] = {draw.choice(["^x", "y$", "^a"]): _any(draw, depth + 1)}
    if draw.random() < 0.15:
        made["minProperties"] = draw.randint(0, 3)
    if draw.random() < 0.15:
        made["maxProperties"] = draw.randint(0, 4)
    return made


def _array(draw, depth):
    made = {"type": "array"}
    if draw.random() < 0.8:
        made["items"] = _any(draw, depth + 1)
    if draw.random() < 0.2:
        made["prefixItems"] = [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.5:
        made["minItems"] = draw.randint(0, 3)
    if draw.random() < 0.5:
        made["maxItems"] = draw.randint(0, 4)
    return made


def _any(draw, depth):
    way = draw.random()
    if depth > 3 or way < 0.3:
        return _simple(draw)
    if way < 0.5:
        return _object(draw, depth)
    if way < 0.65:
        return _array(draw, depth)
    if way < 0.85:
        key = draw.choice(["anyOf", "oneOf", "allOf", "anyOf"])
        made = {key: [_any(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
        return made | (draw.choice([_numeric, _string])(draw) if draw.random() < 0.3 else {})
    return {"$ref": draw.choice(["#/$defs/n", "#", "#/$defs/n"])} | (
        {} if draw.random() < 0.7 else _numeric(draw)
    )


def random_schema(seed):
    """Return a JSON schema; some are contradictory, and some cannot be served."""
    draw = random.Random(seed)
    return _any(draw, 0) | {"$defs": {"n": _any(draw, 2)}}


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
