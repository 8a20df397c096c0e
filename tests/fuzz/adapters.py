"""Damaged and hostile adapters and bundles, loaded into a real engine while others use it.

Each case changes a sound adapter or bundle and loads it over HTTP. It must be refused with one
sentence, or served without changing what others are answered: texts and labels that are asked for
at the same time stay the same, and what is asked alone afterwards is equal bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import re
import shutil
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.fuzz import media
from tests.fuzz.driver import error_of, together
from tests.support.engine_reference import make_engine
from tests.support.helpers import save_random_llava
from tests.support.http_helpers import data_url, encoded, picture, serving
from tests.support.serve_helpers import EVERYTHING, DomainSpec, make_adapter, make_bundle
from valora_data.contract.bundle import GOLDEN, MANIFEST, write_manifest
from valora_data.hashing import file_hash
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.server.loading import golden
from valora_serve.server.loading.served_set import ServedSet

KEY = "an-admin-key-of-32-characters-ok"
CONFIG = "adapter_config.json"
SECONDS = 90  # of a case, on a busy machine
LIMITS = {"seconds": SECONDS, "health": 30.0}  # the server shares this process
DEEP = 10**5
PATTERNS = [
    "(a+)+$", "((.+)+\\.)+!", "(.*)*x", "(", "[", "a{1,99999}", "(?P<idx>x)", "(?<=a*)b", "\\",
    "(((x{0,999}){0,999}){0,999}){0,999}y", "(" * 200 + ")" * 200, ".*" * 40 + "#", "a" * 20_000,
    "^(?!.*vision).*proj$", ".*", "q_proj", "", "all-linear", "(?i)Q_PROJ", "\u0000", "é",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 8, 257, 10**6, 10**18, 10**30, 1e3, 1e30, 1e300, -1e300, 1e-300, 0.5, float("nan"),
    float("inf"), True, False,
]  # fmt: skip
OTHERS = [
    None, "", "x", "8", "none", "\ud800", "x" * 10**5, [], {}, [[]], [None], [8], ["q_proj"],
    {"q_proj": 8}, {"": ""}, {"x": {"y": {}}}, ["x"] * 5000,
]  # fmt: skip
OPTIONS = [*LoraConfig.__dataclass_fields__, "__class__", ""]


# Damage to one file: each function changes it and says what it did


def json_value(file, rng):
    """A value of any type anywhere, an option of PEFT, or something less."""
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
        if key in ("rank_pattern", "alpha_pattern") and rng.random() < 0.7:
            value = {rng.choice(PATTERNS): rng.choice([*NUMBERS, "x"])}
        elif key in ("target_modules", "exclude_modules", "layers_pattern"):
            value = rng.choice(PATTERNS)
            content |= {"layers_to_transform": [0, 1]} if key == "layers_pattern" else {}
        elif key == "lora_alpha":
            value = rng.choice([-1, 1]) * 10.0 ** rng.uniform(-12, 12)
    if key == "image" and rng.random() < 0.5:
        value = rng.choice(["/etc/passwd", "../../x.png", "heads", "bundle.json", "\0"])
    inside[key] = value
    if rng.random() < 0.2:
        inside.pop(key)
    if file.name == GOLDEN and rng.random() < 0.1:
        content = content * 2000
    file.write_text(json.dumps(content))
    return f"{'.'.join(map(str, way))} = {str(value)[:40]!r}"


def tensors(file, rng):
    """Weights of any size, type, shape and name, or other metadata."""
    with safe_open(file, "pt") as opened:
        facts = dict(opened.metadata() or {})
    found, said = load_file(file), []
    if "format" not in facts and facts and rng.random() < 0.5:
        key = rng.choice(sorted(facts))
        facts[key] = rng.choice(["", "x", "[" * DEEP, "[1e9, 1e9]", "[true, 4]", "[4, 4, 4]", "nan",
                                 "inf", "-1", "9" * 5000, "[]", '["a", "a"]', "x" * 10**5, "0",
                                 json.dumps(["x" * 999] * 300), "counting"])  # fmt: skip
        said.append(f"{key} = {facts[key][:30]!r}")
    for name in rng.sample(sorted(found), rng.choice([1, 1, 2, len(found)])) if not said else ():
        tensor, named = found.pop(name), name
        kind = rng.choice(["scale"] * 3 + ["value", "dtype", "shape", "name", "drop", "zero"])
        if kind == "scale":
            power = rng.uniform(-40, 40) if rng.random() < 0.5 else rng.uniform(0, 5)
            tensor = (tensor.double() * 10**power).to(tensor.dtype)
            kind = f"scale 1e{power:.1f}"
        elif kind == "value":
            tensor = tensor.clone()
            value = rng.choice([float("nan"), float("inf"), -float("inf"), 3e38, 1e20, -1e4])
            tensor.view(-1)[rng.randrange(tensor.numel())] = value
        elif kind == "dtype":
            tensor = tensor.to(rng.choice([torch.float64, torch.float16, torch.bfloat16,
                                           torch.int8, torch.bool, torch.complex64,
                                           torch.float8_e4m3fn, torch.int64]))  # fmt: skip
        elif kind == "shape":
            tensor = rng.choice([tensor.t() if tensor.ndim < 3 else tensor, tensor[:0], tensor[:1],
                                 tensor.reshape(-1), tensor[None], tensor.sum()])  # fmt: skip
        elif kind == "name":
            named = rng.choice([f"x.{name}", name.replace("lora_A", "lora_B"), name * 5, "é\n",
                               name.replace(".weight", ".bias"), "lora_A.weight"])  # fmt: skip
        elif kind == "zero":
            tensor = torch.zeros_like(tensor)
        if kind != "drop":
            found[named] = tensor
        said.append(kind)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file, facts)
    return ", ".join(said[:3])


def flipped(file, rng):
    """Bytes changed, cut off or repeated, or another length of the header."""
    content, lengths = file.read_bytes(), [0, 1, 2**31, 2**63]
    change = rng.choice([media.flipped, media.flipped, media.truncated, media.repeated, None])
    changed = (
        change(rng, content) if change else rng.choice(lengths).to_bytes(8, "little") + content[8:]
    )
    file.write_bytes(changed)
    return change.__name__ if change else "length"


def text(file, rng):
    """JSON that no reader should parse."""
    whole = file.read_text()
    body = rng.choice([
        "[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP, "", "null", "5", "[]", '"x"', "{",
        whole[:-1] + ', "r": 1}', "\ufeff" + whole, whole + " " * (9 << 20), "NaN",
        whole.replace(": ", ': {"x":' * 200, 1), '{"n": ' + "9" * 10**5 + "}",
        "[" + "[]," * 400_000 + "1]", '{"\\ud800": 1}',
    ])  # fmt: skip
    file.write_text(body)
    return f"{body[:20]!r}…"


class Code:
    """A pickle that would leave a trace if it were read."""

    def __reduce__(self):
        return (os.system, ("touch pickle-was-run",))


NODES = {
    "directory": lambda file: file.mkdir(),
    "pipe": os.mkfifo,
    "link": lambda file: file.symlink_to("/etc/passwd"),
    "device": lambda file: file.symlink_to("/dev/zero"),
    "circle": lambda file: file.symlink_to(file),
    "pickle": lambda file: file.write_bytes(pickle.dumps(Code())),
    "sparse": lambda file: file.touch() or os.truncate(file, 40 << 30),
    "empty": lambda file: file.touch(),
    "gone": lambda file: None,
}


def node(file, rng):
    """Something else in a file's place, and perhaps a pickle beside it."""
    kind = rng.choice(list(NODES))
    file.unlink()
    NODES[kind](file)
    if rng.random() < 0.3:
        (file.parent / "adapter_model.bin").write_bytes(pickle.dumps(Code()))
    return kind


KINDS = {".json": (json_value,) * 3 + (text, flipped, node), ".png": (flipped, node),
         ".safetensors": (tensors,) * 3 + (flipped, node)}  # fmt: skip


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


# The server, and what others ask it


def alike(a, b):
    """Whether values are equal, numbers within what the order of sums changes."""
    if isinstance(a, float) and isinstance(b, int | float):
        return abs(a - b) <= 1e-3 * max(1.0, abs(a))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def call(server, path, body):
    headers = {"authorization": f"Bearer {KEY}"}
    return server.client.post(f"/v1/{path}", json=body, timeout=SECONDS, headers=headers)


def done(server, path, body):
    """Call, and return the answer, which must be 200."""
    answer = call(server, path, body)
    assert answer.status_code == 200, f"{path} {str(body)[:100]}: {answer.text[:300]}"
    return answer.json()


def listed(server):
    answer = server.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    return {model["id"] for model in answer.json()["data"]}


def tenants_of(url):
    """What others ask: path and body by name."""
    image = {"type": "image_url", "image_url": {"url": url}}
    text = {"max_tokens": 8, "temperature": 0, "logprobs": 1}
    turn = {"messages": [{"role": "user", "content": [image]}], "max_tokens": 8, "temperature": 0}
    return {
        "base": ("completions", text | {"prompt": "a quiet street with"}),
        "tenant": ("completions", text | {"prompt": "a quiet street", "model": "tenant"}),
        "written": ("chat/completions", turn | {"model": "t-caption"}),
        "boxes": ("vision/t-plates", {"images": [url], "min_score": 0.0}),
        "label": ("vision/t-scene", {"images": [url]}),
    }


def ask(server, path, body):
    """What matters of an answer."""
    found = done(server, path, body)
    if "choices" not in found:
        return {key: found[key] for key in ("results", "label", "confidences") if key in found}
    return [(c.get("text") or c["message"]["content"], c.get("logprobs")) for c in found["choices"]]


def add_golden(server, folder, image):
    """Give a served bundle golden examples: what it answers now."""
    (folder / "golden").mkdir()
    (folder / "golden" / "0.png").write_bytes(image)
    examples = []
    for domain, more in (("plates", {"min_score": 0.19}), ("scene", {})):
        found = done(server, f"vision/{domain}", {"images": [data_url(image)]} | more)
        found = found["results"][0] if "results" in found else found
        expected = found.get("detections")
        if expected is None:
            expected = {key: found[key] for key in ("label", "confidence")}
        examples.append({"domain": domain, "image": "golden/0.png", "expected": expected})
    (folder / GOLDEN).write_text(json.dumps(examples))
    stored = json.loads((folder / MANIFEST).read_text())
    kept = {k: v for k, v in stored.items() if k not in ("schema_version", "files")}
    write_manifest(folder, kept)


def ask_beside(server, tenants, alone, models):
    """Ask the new models and the tenants at once; only the new ones may fail, in a sentence."""
    image = data_url(encoded(picture(50, 40)))

    def hostile(model):
        body = {"model": model["id"], "prompt": "a street", "max_tokens": 6, "logprobs": 1}
        path = "completions"
        if model["head"]:
            path, body = f"vision/{model['id']}", {"images": [image]}
        answer = call(server, path, body)
        if answer.status_code != 200:
            error_of(answer.text)
        assert not re.search(r"\bNaN\b|Infinity", answer.text), answer.text[:300]

    def tenant(name):
        found = ask(server, *tenants[name])  # the last bits differ: sums have another order
        assert alike(found, alone[name]), f"{name}, beside: {alone[name]} → {found}"[:900]

    asked = [partial(hostile, model) for model in models[:6] * (2 if len(models) > 1 else 5)]
    together(asked + [partial(tenant, name) for name in tenants])


def load_and_ask(server, tenants, alone, is_bundle, chosen):
    """Load the case, ask it and others, and unload it."""
    before = listed(server)
    if is_bundle:
        answer = call(server, "load_bundle", {"bundle_path": "case"})
    else:
        answer = call(server, "load_lora_adapter", {"lora_name": "hostile", "lora_path": "case"})
    if answer.status_code == 200:
        models = answer.json()["models"]
        ask_beside(server, tenants, alone, models)
        names = {model["bundle"].partition("@")[0] for model in models if model["bundle"]}
        for name in names:
            done(server, "unload_bundle", {"bundle_name": name})
        if not names:
            done(server, "unload_lora_adapter", {"lora_name": "hostile"})
    else:
        assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
        error_of(answer.text)
    assert listed(server) == before, f"models are {listed(server)}, were {before}"
    found = ask(server, *tenants[chosen])
    assert found == alone[chosen], f"{chosen}, alone: {alone[chosen]} → {found}"[:900]
    assert not Path("pickle-was-run").exists(), "a pickle was run"
    return "served" if answer.status_code == 200 else "refused"


@contextlib.contextmanager
def running(folder):
    """A server with tenants in this process, and a watch over its log."""
    base = str(save_random_llava(folder / "base", seed=5))
    adapters = [
        make_adapter(folder / f"adapter-{n}", base, seed=n, **options)
        for n, options in enumerate((
            {"rank": 8, "targets": EVERYTHING},
            {"rank": 4, "targets": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 7}},
            {"rank": 6, "use_rslora": True, "rank_pattern": {r"layers\.1\..*q_proj": 3}},
        ))
    ]  # fmt: skip
    bundle = make_bundle(folder / "bundle", base, name="sample", seed=3)
    store = folder / "adapters"
    shutil.copytree(bundle, store / "first")
    make_adapter(store / "tenant", base, seed=70, rank=5)
    domains = {
        "t-plates": DomainSpec("one", labels=["plate"], prompt="Find plates."),
        "t-scene": DomainSpec("one", "classification", ["forest", "street"], prompt="Which?"),
        "t-caption": DomainSpec("one", None, [], prompt="Describe the image."),
    }
    make_bundle(store / "tenants", base, name="tenants", domains=domains,
                adapters={"one": {"rank": 4, "alpha": 9}}, seed=8)  # fmt: skip
    engine = AsyncEngine(make_engine(base))
    served = ServedSet(engine, store, folder / "served.json", partial(golden.replay, engine))
    watch = BufferingHandler(10**6)
    logging.getLogger("valora_serve").addHandler(watch)
    settings = {"allow_runtime_loading": True, "adapter_folder": str(store), "api_key": KEY,
                "state_file": str(folder / "served.json"), "console": False}  # fmt: skip
    try:
        with serving(engine, served=served, **settings) as server:
            image = encoded(picture(60, 48))
            done(server, "load_lora_adapter", {"lora_name": "tenant", "lora_path": "tenant"})
            done(server, "load_bundle", {"bundle_path": "tenants"})
            done(server, "load_bundle", {"bundle_path": "first"})
            add_golden(server, bundle, image)
            done(server, "unload_bundle", {"bundle_name": "sample"})
            tenants = tenants_of(data_url(image))
            for asked in tenants.values():
                ask(server, *asked)  # what is in the prefix cache changes the sums of later ones
            alone = {name: ask(server, *asked) for name, asked in tenants.items()}

            def make(rng, number):
                is_bundle = rng.random() < 0.45
                shutil.rmtree(store / "case", ignore_errors=True)
                shutil.copytree(bundle if is_bundle else rng.choice(adapters), store / "case")
                kind, what = damage(store / "case", rng)
                kind = f"{'bundle' if is_bundle else 'adapter'}, {kind}"
                chosen = rng.choice(list(tenants))

                def send():
                    watch.flush()
                    found = load_and_ask(server, tenants, alone, is_bundle, chosen)
                    for record in watch.buffer:
                        assert not record.exc_info, logging.Formatter().format(record)[-1500:]
                    return found

                return [kind], what, send

            yield server.url, os.getpid(), make
    finally:
        logging.getLogger("valora_serve").removeHandler(watch)
