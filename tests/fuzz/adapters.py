"""Damaged adapters and bundles, loaded into a server while others use it.

Each must be refused with one sentence, or served without changing what others are answered: what is
asked at the same time stays the same, and what is asked alone afterwards is equal bit for bit.
"""

import contextlib
import json
import math
import os
import re
import shutil
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fuzz.driver import alike, check_log, error_of, together
from tests.fuzz.mutations import CHANGES, json_texts
from tests.fuzz.tenants import ALWAYS, MORE, Tenants
from tests.support.http_helpers import data_url, encoded, picture
from valora_data.contract.bundle import MANIFEST
from valora_data.hashing import file_hash

CONFIG = "adapter_config.json"
LIMITS = {"seconds": 90, "health": 30.0}  # of a case, on a busy machine
ASKED = (None, "red", "caption", "scene", "plates")  # what others ask
DEEP = 10**5
PATTERNS = [
    "(a+)+$", "((.+)+\\.)+!", "(", "a{1,99999}", "(?<=a*)b", "(((x{0,999}){0,999}){0,999}){0,999}y",
    "(" * 200 + ")" * 200, ".*" * 40 + "#", "a" * 20_000, ".*", "q_proj", "", "all-linear", "é\0",
]  # fmt: skip
NUMBERS = [0, -1, 8, 257, 10**18, 10**30, 1e3, 1e300, 1e-300, 0.5, math.nan, math.inf, True]
OTHERS = [
    None, "", "8", "none", "\ud800", "x" * 10**5, [], {}, [[]], [None], [8], ["q_proj"],
    {"q_proj": 8}, {"": ""}, {"x": {"y": {}}}, ["x"] * 5000,
]  # fmt: skip
OPTIONS = [*LoraConfig.__dataclass_fields__, "__class__", ""]
DTYPES = [
    torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64,
    torch.float8_e4m3fn, torch.int64,
]  # fmt: skip
VALUES = [math.nan, math.inf, -math.inf, 3e38, 1e20, -1e4]


def json_value(file, rng):
    """A value of any type anywhere, an option of PEFT, or something less; says which."""
    content = json.loads(file.read_text())
    way, place = [], content
    while isinstance(place, dict | list) and place and (not way or rng.random() < 0.7):
        inside, key = place, rng.choice([*place] if isinstance(place, dict) else range(len(place)))
        way.append(key)
        place = place[key]
        if key == "files":
            break
    value = rng.choice([*NUMBERS, *OTHERS, *PATTERNS])
    if file.name == CONFIG and rng.random() < 0.7:
        inside, key = content, rng.choice(OPTIONS)
        way = [key]
        if key in ("rank_pattern", "alpha_pattern"):
            value = {rng.choice(PATTERNS): value}
        elif key in ("target_modules", "exclude_modules", "layers_pattern"):
            value = rng.choice(PATTERNS)
            content |= {"layers_to_transform": [0, 1]} if key == "layers_pattern" else {}
    inside[key] = value
    if rng.random() < 0.2:
        inside.pop(key)
    file.write_text(json.dumps(content))
    return f"{'.'.join(map(str, way))} = {str(value)[:40]!r}"


def _scaled(tensor, rng):
    power = rng.choice((rng.uniform(-40, 40), rng.uniform(0, 5)))
    return (tensor.double() * 10**power).to(tensor.dtype)


def _spoilt(tensor, rng):
    numbers = torch.arange(tensor.numel()).view_as(tensor)
    return tensor.masked_fill(numbers == rng.randrange(tensor.numel()), rng.choice(VALUES))


TENSORS = {
    "scale": _scaled, "value": _spoilt,
    "shape": lambda tensor, rng: rng.choice([
        tensor.transpose(0, -1), tensor[:0], tensor[:1], tensor.flatten(), tensor[None],
        tensor.sum()]),
    "dtype": lambda tensor, rng: tensor.to(rng.choice(DTYPES)),
    "zero": lambda tensor, rng: torch.zeros_like(tensor),
}  # fmt: skip


def tensors(file, rng):
    """Weights of any size, type, shape and name; a head's metadata stay."""
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    found, said = load_file(file), []
    for name in rng.sample(sorted(found), rng.choice([1, 1, 2, len(found)])):
        tensor, named = found.pop(name), name
        kind = rng.choice(["scale", "scale", *TENSORS, "name", "drop"])
        if kind == "name":
            named = rng.choice([f"x.{name}", name.replace("lora_A", "lora_B"), name * 5, "é\n",
                               name.replace(".weight", ".bias"), "lora_A.weight"])  # fmt: skip
        if kind != "drop":
            found[named] = TENSORS[kind](tensor, rng) if kind in TENSORS else tensor
        said.append(kind)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, facts)
    return ", ".join(said[:3])


def changed(file, rng):
    """Other bytes, anywhere."""
    change = rng.choice(CHANGES)
    file.write_bytes(change(rng, file.read_bytes()))
    return change.__name__


def text(file, rng):
    """JSON that no reader should parse."""
    texts = json_texts(rng.choice((DEEP, 4 * DEEP)))
    name = rng.choice(list(texts))
    file.write_bytes(texts[name]())
    return name


NODES = {
    "directory": Path.mkdir, "pipe": os.mkfifo, "empty": Path.touch, "gone": lambda file: None,
    "link": lambda file: file.symlink_to("/etc/passwd"),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "circle": lambda file: file.symlink_to(file),
    "sparse": lambda file: file.touch() or os.truncate(file, 40 << 30),
}  # fmt: skip


def node(file, rng):
    """Something else in a file's place."""
    kind = rng.choice(list(NODES))
    file.unlink()
    NODES[kind](file)
    return kind


KINDS = {".json": (json_value,) * 3 + (text, changed, node),
         ".safetensors": (tensors,) * 3 + (changed, node)}  # fmt: skip


def damage(folder, rng):
    """Change a file; in a bundle, its manifest's hashes mostly fit, so that it is read."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in KINDS]
    file = rng.choice(files)
    change = rng.choice(KINDS[file.suffix])
    said, manifest = change(file, rng), folder / MANIFEST
    if manifest in files and file != manifest and rng.random() < 0.85:
        content = json.loads(manifest.read_text())
        for name in content["files"]:
            place = folder / name
            if place.is_file() and place.stat().st_size < 1 << 30:
                content["files"][name] = file_hash(place)
        manifest.write_text(json.dumps(content))
    return f"{file.name}: {change.__name__}", f"{file.relative_to(folder)}: {said}"


def make_case(tenants, rng, bundles=0.45):
    """Damage an adapter or, so often, a bundle; returns its kind, what was done, what loads it."""
    case, is_bundle = tenants.store / "case", rng.random() < bundles
    shutil.rmtree(case, ignore_errors=True)
    shutil.copytree(tenants.store / ("more" if is_bundle else rng.choice(ALWAYS)), case)
    kind, what = damage(case, rng)
    kind = f"{'bundle' if is_bundle else 'adapter'}, {kind}"
    return kind, what, partial(load_and_ask, tenants, MORE[0] if is_bundle else "hostile")


def load_and_ask(tenants, name, alone=()):
    """Load the case, ask it and others, and unload it."""
    before = tenants.server.names()
    answer = tenants.change(name, path="case")
    if answer.status_code == 200:
        models = answer.json()["models"]
        ask_beside(tenants, alone, models)
        bundles = {model["bundle"].partition("@")[0] for model in models if model["bundle"]}
        ended = [tenants.server.post("unload_bundle", bundle_name=one) for one in bundles]
        for unloaded in ended or [tenants.change(name, load=False)]:
            assert unloaded.status_code == 200, unloaded.text
    else:
        assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
        error_of(answer.text)
    assert tenants.server.names() == before, f"models are {tenants.server.names()}, were {before}"
    return "served" if answer.status_code == 200 else "refused"


def ask_beside(tenants, alone, models):
    """Ask the new models and the tenants at once; only the new ones may fail, in a sentence."""

    def hostile(model):
        path, body = f"vision/{model['id']}", {"images": [data_url(encoded(picture(50, 40)))]}
        if not model["head"]:
            path = "completions"
            body = {"model": model["id"], "prompt": "a street", "max_tokens": 6, "logprobs": 1}
        answer = tenants.server.post(path, **body)
        if answer.status_code != 200:
            error_of(answer.text)
        assert not re.search(r"\bNaN\b|Infinity", answer.text), answer.text[:300]

    def tenant(question):
        found = tenants.ask(question)  # the last bits differ: sums have another order
        wrong = f"{question.model}, beside: {alone[question]} → {found}"
        assert alike(found, alone[question]), wrong[:900]

    asked = [partial(hostile, model) for model in models[:6] * (2 if len(models) > 1 else 5)]
    together(asked + [partial(tenant, question) for question in alone])


@contextlib.contextmanager
def running(folder):
    """A server with tenants; in one mode always, since others change the last bits."""
    tenants = Tenants(folder)
    with tenants.served("unmerge_only", "--log-level", "warning") as server:
        assert tenants.change("red").status_code == 200
        asked = {(one.model, bool(one.image)): one for one in tenants.questions}
        asked = [one for (model, _), one in asked.items() if model in ASKED]
        for question in asked:
            tenants.ask(question)  # what is in the prefix cache changes the sums of later ones
        alone = {question: tenants.ask(question) for question in asked}

        def make(rng, number):
            kind, what, load = make_case(tenants, rng)
            chosen = rng.choice(asked)

            def send():
                outcome, found = load(alone), tenants.ask(chosen)
                wrong = f"{chosen.model}, alone: {alone[chosen]} → {found}"
                assert found == alone[chosen], wrong[:900]
                check_log(server)
                return outcome

            return kind, what, send

        yield server, make
