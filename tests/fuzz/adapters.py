"""Damaged and hostile adapters and bundles, loaded into a real engine while others use it.

Each case changes a sound adapter or bundle and loads it over HTTP. It must be refused with one
sentence, or served without changing what others are answered: texts and labels that are asked for
at the same time stay the same, and what is asked alone afterwards is equal bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.engine_reference import make_engine
from tests.support.helpers import save_random_llava
from tests.support.http_helpers import data_url, encoded, picture, serving
from tests.support.serve_helpers import (
    EVERYTHING,
    DomainSpec,
    make_adapter,
    make_bundle,
)
from valora_data.contract.bundle import GOLDEN, MANIFEST, write_manifest
from valora_data.hashing import file_hash
from valora_serve.engine.async_engine import AsyncEngine
from valora_serve.server.loading import golden
from valora_serve.server.loading.served_set import ServedSet

KEY = "an-admin-key-of-32-characters-ok"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SECONDS = 90  # of a case, on a busy machine
LONGEST = 2000  # characters of a sentence
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
OPTIONS = [
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights", "peft_type",
    "bias", "use_dora", "modules_to_save", "lora_bias", "use_qalora", "layer_replication",
    "trainable_token_indices", "alora_invocation_tokens", "target_parameters", "arrow_config",
    "kasa_config", "use_bdlora", "velora_config", "monteclora_config", "fan_in_fan_out",
    "megatron_config", "loftq_config", "eva_config", "base_model_name_or_path", "task_type",
    "__class__", "",
]  # fmt: skip


# Damage to one folder: each function changes it and says what it did


def any_value(rng):
    """A value of any type."""
    return rng.choice([*NUMBERS, *OTHERS, *PATTERNS])


def config_value(folder, rng):
    """An option of any type."""
    file = folder / CONFIG
    config = json.loads(file.read_text())
    option = rng.choice(OPTIONS)
    value = any_value(rng)
    if option in ("rank_pattern", "alpha_pattern") and rng.random() < 0.7:
        value = {rng.choice(PATTERNS): rng.choice([*NUMBERS, "x"])}
    config[option] = value
    if rng.random() < 0.1:
        del config[rng.choice(list(config))]
    file.write_text(json.dumps(config))
    return f"{option} = {str(value)[:40]!r}"


def config_pattern(folder, rng):
    """A regular expression where PEFT takes one."""
    file = folder / CONFIG
    config = json.loads(file.read_text())
    pattern = rng.choice(PATTERNS)
    option = rng.choice(["target_modules", "exclude_modules", "rank_pattern", "layers_pattern"])
    config[option] = {pattern: 8} if option == "rank_pattern" else pattern
    if option == "layers_pattern":
        config |= {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1]}
    file.write_text(json.dumps(config))
    return f"{option} = {pattern[:40]!r}"


def alpha(folder, rng):
    """A scaling of any size."""
    file = folder / CONFIG
    config = json.loads(file.read_text())
    value = rng.choice([-1, 1]) * 10.0 ** rng.uniform(-12, 12)
    if rng.random() < 0.5:
        config["lora_alpha"] = value
    else:
        config["alpha_pattern"] = {rng.choice(["q_proj", "layers.0.self_attn.v_proj"]): value}
    file.write_text(json.dumps(config))
    return f"alpha {value:.2g}"


def tensors(folder, rng):
    """Weights of any size, type, shape and name."""
    file = folder / WEIGHTS
    found = load_file(file)
    said = []
    for name in rng.sample(sorted(found), rng.choice([1, 1, 2, len(found)])):
        tensor, named = found.pop(name), name
        kind = rng.choice(["scale", "scale", "scale", "value", "dtype", "shape", "name", "drop",
                           "zero"])  # fmt: skip
        if kind == "scale":
            power = rng.uniform(-40, 40) if rng.random() < 0.5 else rng.uniform(0, 5)
            tensor = (tensor.double() * 10**power).to(tensor.dtype)
            kind = f"scale 1e{power:.1f}"
        elif kind == "value":
            tensor = tensor.clone()
            tensor.view(-1)[rng.randrange(tensor.numel())] = rng.choice(
                [float("nan"), float("inf"), -float("inf"), 3e38, 1e20, -1e4]
            )
        elif kind == "dtype":
            tensor = tensor.to(rng.choice([torch.float64, torch.float16, torch.bfloat16,
                                           torch.int8, torch.bool, torch.complex64,
                                           torch.float8_e4m3fn, torch.int64]))  # fmt: skip
        elif kind == "shape":
            tensor = rng.choice([tensor.T, tensor[:0], tensor[:1], tensor.reshape(-1), tensor[None],
                                 tensor.sum()]).contiguous()  # fmt: skip
        elif kind == "name":
            named = rng.choice([f"x.{name}", name.replace("lora_A", "lora_B"), name * 5, "é\n",
                               name.replace(".weight", ".bias"), "lora_A.weight"])  # fmt: skip
        elif kind == "zero":
            tensor = torch.zeros_like(tensor)
        if kind != "drop":
            found[named] = tensor
        said.append(kind)
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)
    return f"tensors: {', '.join(said[:3])}"


def flipped(file, rng):
    """Bytes changed, cut off or added."""
    content = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "flip", "cut", "add", "length"])
    if kind == "flip":
        for _ in range(rng.choice([1, 3, 50])):
            near = min(len(content), 400) if rng.random() < 0.5 else len(content)
            content[rng.randrange(near)] = rng.randrange(256)
    elif kind == "cut":
        content = content[: rng.randrange(len(content))]
    elif kind == "add":
        content += rng.randbytes(rng.choice([1, 1000]))
    else:
        content[:8] = rng.choice([0, 1, 2**31, 2**63, len(content)]).to_bytes(8, "little")
    file.write_bytes(content)
    return f"{kind} bytes of {file.name}"


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
    return f"{file.name} = {body[:20]!r}…"


class Code:
    """A pickle that would leave a trace if it were read."""

    def __reduce__(self):
        return (os.system, ("touch pickle-was-run",))


def node(file, rng):
    """Something else in a file's place."""
    content = file.read_bytes()
    file.unlink()
    kind = rng.choice(["directory", "pipe", "link", "device", "pickle", "sparse", "empty", "gone",
                       "circle", "beside"])  # fmt: skip
    if kind == "directory":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/etc/passwd")
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "circle":
        file.symlink_to(file)
    elif kind == "pickle":
        file.write_bytes(pickle.dumps(Code()))
    elif kind == "sparse":
        with file.open("wb") as made:
            made.truncate(40 << 30)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "beside":
        file.write_bytes(content)
        (file.parent / "adapter_model.bin").write_bytes(pickle.dumps(Code()))
    return f"{kind} for {file.name}"


def damage_adapter(folder, rng):
    """Change an adapter; returns the kind of change and what it was."""
    kind = rng.choice([config_value, config_value, config_pattern, alpha, tensors, tensors,
                       "bytes", "text", "node"])  # fmt: skip
    if kind == "bytes":
        return kind, flipped(folder / rng.choice([CONFIG, WEIGHTS, WEIGHTS]), rng)
    if kind == "text":
        return kind, text(folder / CONFIG, rng)
    if kind == "node":
        return kind, node(folder / rng.choice([CONFIG, WEIGHTS]), rng)
    return kind.__name__, kind(folder, rng)


def manifest(folder, rng):
    """An entry of the manifest of any type."""
    file = folder / MANIFEST
    content = json.loads(file.read_text())
    place, way = content, []
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if way and way[0] == "files":
            break
        inside, key = place, rng.choice(keys)
        way.append(key)
        place = place[key]
        if rng.random() < 0.3:
            break
    value = any_value(rng)
    if rng.random() < 0.2:
        inside.pop(key)
        value = "gone"
    else:
        inside[key] = value
    file.write_text(json.dumps(content))
    return f"{'.'.join(map(str, way))} = {str(value)[:40]!r}"


def head(folder, rng):
    """A head with other metadata or weights."""
    file = rng.choice(sorted((folder / "heads").iterdir()))
    with safe_open(file, "pt") as opened:
        facts = dict(opened.metadata())
    found = load_file(file)
    if rng.random() < 0.5:
        key = rng.choice(sorted(facts))
        facts[key] = rng.choice(["", "x", "[" * DEEP, "[1e9, 1e9]", "[true, 4]", "[4, 4, 4]", "nan",
                                 "inf", "-1", "9" * 5000, "[]", '["a", "a"]', "x" * 10**5, "0",
                                 json.dumps(["x" * 999] * 300), "counting"])  # fmt: skip
        said = f"{key} = {facts[key][:30]!r}"
    else:
        name = rng.choice(sorted(found))
        change = rng.choice(
            [1e30, 1e8, 1e3, 1e-30, 0.0, -1.0, float("nan"), "shape", "type", "gone"]
        )
        tensor = found.pop(name)
        if change == "shape":
            found[name] = tensor.reshape(-1)[:1].clone()
        elif change == "type":
            found[name] = tensor.to(rng.choice([torch.float64, torch.bool, torch.complex64]))
        elif change != "gone":
            found[name] = tensor * change
        said = f"{name} × {change}"
    save_file(found, file, facts)
    return f"{file.name}: {said}"


def golden_examples(folder, rng):
    """Golden examples of any type, and images that are none."""
    file = folder / GOLDEN
    examples = json.loads(file.read_text())
    image = folder / examples[0]["image"]
    kind = rng.choice(["entry", "entry", "text", "bytes", "image", "many", "node"])
    if kind == "entry":
        key = rng.choice(["domain", "image", "rest", "media", "question", "max_tokens", "expected"])
        value = any_value(rng)
        if key == "image" and rng.random() < 0.5:
            value = rng.choice(["/etc/passwd", "../../x.png", "heads", "bundle.json", "\0"])
        rng.choice(examples)[key] = value
        file.write_text(json.dumps(examples))
        return f"{key} = {str(value)[:40]!r}"
    if kind == "text":
        return text(file, rng)
    if kind == "bytes":
        return flipped(file, rng)
    if kind == "image":
        return flipped(image, rng)
    if kind == "many":
        file.write_text(json.dumps(examples * 2000))
        return "thousands of examples"
    return node(rng.choice([file, image]), rng)


def damage_bundle(folder, rng):
    """Change a bundle, mostly with hashes that fit; returns the kind of change and what it was."""
    inner = rng.choice(sorted((folder / "adapters").iterdir()))
    kind = rng.choice(
        ["manifest", "manifest", "head", "head", "golden", "adapter", "manifest text"]
    )
    if kind == "adapter":
        kind, said = damage_adapter(inner, rng)
        kind = f"its adapter: {kind}"
    elif kind == "manifest":
        return kind, manifest(folder, rng)
    elif kind == "manifest text":
        return kind, rng.choice([text, flipped, node])(folder / MANIFEST, rng)
    else:
        said = {"head": head, "golden": golden_examples}[kind](folder, rng)
    if rng.random() < 0.85:
        rehash(folder)
    return kind, said


def rehash(folder):
    """Make the manifest's hashes fit the files, so that the damage gets past them."""
    file = folder / MANIFEST
    content = json.loads(file.read_text())
    for name in content["files"]:
        place = folder / name
        if place.is_file() and place.stat().st_size < 1 << 30:
            content["files"][name] = file_hash(place)
    file.write_text(json.dumps(content))


# The server, and what others ask it


class Broken(AssertionError):
    """The property does not hold."""


class Watch(logging.Handler):
    """Keeps what the server logs with a traceback."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))


def templates(place, base):
    """Sound adapters and bundles to be changed."""
    options = [
        {"rank": 8, "targets": EVERYTHING},
        {"rank": 4, "targets": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 7}},
        {"rank": 6, "use_rslora": True, "rank_pattern": {r"layers\.1\..*q_proj": 3}},
    ]
    adapters = [
        make_adapter(place / f"adapter-{n}", base, seed=n, **chosen)
        for n, chosen in enumerate(options)
    ]
    bundle = make_bundle(place / "bundle", base, name="sample", seed=3)
    return adapters, bundle


class Tenants:
    """What others ask, and what they were answered before the first case."""

    def __init__(self, server, image):
        self._server = server
        url = data_url(image)
        self._asked = {
            "base": ("completions", {"prompt": "a quiet street with", "logprobs": 1}),
            "tenant": ("completions", {"prompt": "a quiet street", "model": "tenant",
                                       "logprobs": 1}),
            "written": ("chat/completions", {"model": "t-caption", "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}),
            "boxes": ("vision/t-plates", {"images": [url], "min_score": 0.0}),
            "label": ("vision/t-scene", {"images": [url]}),
        }  # fmt: skip
        for name in self._asked:
            self.ask(name)  # what it leaves in the prefix cache changes the sums of later ones
        self.alone = {name: self.ask(name) for name in self._asked}

    def __iter__(self):
        return iter(self._asked)

    def ask(self, name):
        path, body = self._asked[name]
        more = {} if path.startswith("vision") else {"max_tokens": 8, "temperature": 0}
        answer = call(self._server, path, {**body, **more})
        if answer.status_code != 200:
            raise Broken(f"{name} got {answer.status_code}: {answer.text[:300]}")
        found = answer.json()
        if "choices" not in found:
            return {key: found[key] for key in ("results", "label", "confidences") if key in found}
        return [
            (choice.get("text") or choice["message"]["content"], choice.get("logprobs"))
            for choice in found["choices"]
        ]

    def check_alone(self, name):
        found = self.ask(name)
        if found != self.alone[name]:
            raise Broken(f"{name}, asked alone, changed: {self.alone[name]} → {found}"[:900])

    def check_beside(self, name):
        """Beside others the sums have another order, so that the last bits may differ."""
        found = self.ask(name)
        if not alike(found, self.alone[name]):
            raise Broken(f"{name}, asked beside, changed: {self.alone[name]} → {found}"[:900])


def alike(a, b):
    """Whether values are equal, numbers within what the order of sums changes."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-3 * max(1.0, abs(a))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def call(server, path, body, timeout=SECONDS):
    return server.client.post(
        f"/v1/{path}", json=body, timeout=timeout, headers={"authorization": f"Bearer {KEY}"}
    )


def listed(server):
    answer = server.client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"})
    return {model["id"] for model in answer.json()["data"]}


def check_sentence(answer):
    """One sentence for people: no traceback, no raw values of the program, not endless."""
    if not 400 <= answer.status_code < 500:
        raise Broken(f"status {answer.status_code}: {answer.text[:300]}")
    said = answer.json()["error"]["message"]
    if "Traceback" in said or " object at 0x" in said or "\n" in said or len(said) > LONGEST:
        raise Broken(f"no sentence for people: {said[:500]}")


def add_golden(server, folder, image):
    """Give a served bundle golden examples: what it answers now."""
    (folder / "golden").mkdir()
    (folder / "golden" / "0.png").write_bytes(image)
    examples = []
    for domain in ("plates", "scene"):
        body = {"images": [data_url(image)]} | ({"min_score": 0.19} if domain == "plates" else {})
        answer = call(server, f"vision/{domain}", body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        found = found["results"][0] if "results" in found else found
        expected = found.get("detections")
        if expected is None:
            expected = {key: found[key] for key in ("label", "confidence")}
        examples.append({"domain": domain, "image": "golden/0.png", "expected": expected})
    (folder / GOLDEN).write_text(json.dumps(examples))
    stored = json.loads((folder / MANIFEST).read_text())
    write_manifest(
        folder, {k: v for k, v in stored.items() if k not in ("schema_version", "files")}
    )


def run_case(server, tenants, sources, place, rng, watch):
    """Change, load, ask and unload; returns the kind, what was done, and the outcome."""
    adapters, bundle = sources
    is_bundle = rng.random() < 0.45
    source = bundle if is_bundle else rng.choice(adapters)
    folder = place / "adapters" / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    kind, said = (damage_bundle if is_bundle else damage_adapter)(folder, rng)
    kind = f"bundle: {kind}" if is_bundle else f"adapter: {kind}"
    try:
        before = listed(server)
        if is_bundle:
            answer = call(server, "load_bundle", {"bundle_path": "case"})
        else:
            answer = call(
                server, "load_lora_adapter", {"lora_name": "hostile", "lora_path": "case"}
            )
        outcome = "refused"
        if answer.status_code == 200:
            outcome = "served"
            ask_beside(server, tenants, answer.json()["models"])
            unload(server, answer.json()["models"])
        else:
            check_sentence(answer)
        if listed(server) != before:
            raise Broken(f"models are {listed(server)}, were {before}")
        tenants.check_alone(rng.choice(list(tenants)))
        if server.client.get("/health").status_code != 200:
            raise Broken("/health is not 200")
        if watch.found:
            raise Broken(f"a traceback in the log: {watch.found.pop()[-1500:]}")
    except Broken as error:
        watch.found.clear()
        return kind, said, str(error) or "broken"
    except Exception as error:  # noqa: BLE001 - the client's time limit, a connection lost
        return kind, said, f"{type(error).__name__}: {error}"
    return kind, said, outcome


def ask_beside(server, tenants, models):
    """Ask the new models and the tenants at once; only the new ones may fail, in a sentence."""
    image = data_url(encoded(picture(50, 40)))

    def hostile(model):
        if model["head"]:
            answer = call(server, f"vision/{model['id']}", {"images": [image]})
        else:
            body = {"model": model["id"], "prompt": "a street", "max_tokens": 6, "logprobs": 1}
            answer = call(server, "completions", body)
        if answer.status_code != 200:
            said = answer.json()["error"]["message"]
            if "Traceback" in said or "\n" in said or len(said) > LONGEST:
                raise Broken(f"{model['id']} got {answer.status_code}: {said[:300]}")
        elif re.search(r"\bNaN\b|Infinity", answer.text):
            raise Broken(f"{model['id']} got numbers that JSON cannot hold: {answer.text[:300]}")

    with ThreadPoolExecutor(12) as pool:
        asked = [
            pool.submit(hostile, model) for model in models[:6] * (2 if len(models) > 1 else 5)
        ]
        asked += [pool.submit(tenants.check_beside, name) for name in tenants]
        for one in asked:
            one.result()


def unload(server, models):
    """Unload what was loaded."""
    names = {model["bundle"].partition("@")[0] for model in models if model["bundle"]}
    for name in names:
        answer = call(server, "unload_bundle", {"bundle_name": name})
        if answer.status_code != 200:
            raise Broken(f"unload_bundle {name[:100]!r}: {answer.text[:300]}")
    if not names:
        answer = call(server, "unload_lora_adapter", {"lora_name": "hostile"})
        if answer.status_code != 200:
            raise Broken(f"unload: {answer.text[:300]}")


@contextlib.contextmanager
def running(place):
    """A server with tenants, sources of cases, and a watch over its log."""
    base = str(save_random_llava(place / "base", seed=5))
    sources = templates(place / "sources", base)
    (place / "adapters").mkdir()
    shutil.copytree(sources[1], place / "adapters" / "first")
    make_adapter(place / "adapters" / "tenant", base, seed=70, rank=5)
    domains = {
        "t-plates": DomainSpec("one", labels=["plate"], prompt="Find plates."),
        "t-scene": DomainSpec("one", "classification", ["forest", "street"], prompt="Which?"),
        "t-caption": DomainSpec("one", None, [], prompt="Describe the image."),
    }
    make_bundle(place / "adapters" / "tenants", base, name="tenants", domains=domains,
                adapters={"one": {"rank": 4, "alpha": 9}}, seed=8)  # fmt: skip
    engine = AsyncEngine(make_engine(base))
    served = ServedSet(
        engine, place / "adapters", place / "served.json", partial(golden.replay, engine)
    )
    watch = Watch()
    logging.getLogger("valora_serve").addHandler(watch)
    settings = {
        "allow_runtime_loading": True, "adapter_folder": str(place / "adapters"), "api_key": KEY,
        "state_file": str(place / "served.json"), "console": False,
    }  # fmt: skip
    try:
        with serving(engine, served=served, **settings) as server:
            image = encoded(picture(60, 48))
            loaded = [
                call(server, "load_lora_adapter", {"lora_name": "tenant", "lora_path": "tenant"}),
                call(server, "load_bundle", {"bundle_path": "tenants"}),
                call(server, "load_bundle", {"bundle_path": "first"}),
            ]
            assert all(answer.status_code == 200 for answer in loaded), [a.text for a in loaded]
            add_golden(server, sources[1], image)
            assert call(server, "unload_bundle", {"bundle_name": "sample"}).status_code == 200
            yield server, Tenants(server, image), sources, watch
    finally:
        logging.getLogger("valora_serve").removeHandler(watch)


def memory(name):
    """A line of /proc/self/status in MB."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024


def fuzz(cases, seed, only=None):
    """Run cases; returns rows of (kind, outcome, seconds), failures, and peak memory above idle."""
    place = Path(tempfile.mkdtemp(prefix="fuzz-adapters-"))
    rows, failures = [], []
    try:
        with running(place) as (server, tenants, sources, watch):
            for name in tenants:
                tenants.check_alone(name)
            idle = memory("VmRSS")
            for number in range(cases) if only is None else [only]:
                rng = random.Random(f"{seed}/{number}")
                began = time.monotonic()
                kind, said, outcome = run_case(server, tenants, sources, place, rng, watch)
                seconds = time.monotonic() - began
                if outcome in ("served", "refused") and seconds > SECONDS:
                    outcome = f"took {seconds:.0f} s"
                if outcome not in ("served", "refused"):
                    failures.append(f"case {number}: {kind}, {said}\n  {outcome}")
                    print(failures[-1], flush=True)
                    outcome = "failed"
                rows.append((kind, outcome, seconds))
                if (number + 1) % 50 == 0:
                    print(f"{number + 1} of {cases} cases", flush=True)
            peak = memory("VmHWM") - idle
        if Path("pickle-was-run").exists():
            failures.append("a pickle was run")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return rows, failures, peak


def main(arguments: list[str]) -> int:
    """Load changed adapters and bundles; see ``--help``."""
    parser = argparse.ArgumentParser("python -m tests.fuzz adapters", description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of the cases")
    parser.add_argument("--only", type=int, default=None, help="run the case of this number alone")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)
    rows, failures, peak = fuzz(options.cases, options.seed, options.only)
    print("| change | cases | refused | served, others' answers the same | failed | slowest, s |")
    print("|---|---|---|---|---|---|")
    counts = Counter(kind for kind, _, _ in rows)
    for kind in [*sorted(counts), None]:
        mine = [row for row in rows if kind in (row[0], None)]
        outcomes = Counter(outcome for _, outcome, _ in mine)
        print(
            f"| {kind or 'all'} | {len(mine)} | {outcomes['refused']} | {outcomes['served']} | "
            f"{outcomes['failed']} | {max((row[2] for row in mine), default=0):.1f} |"
        )
    print(f"peak memory above idle: {peak} MB")
    if failures:
        print(f"{len(failures)} failed; repeat one with --seed {options.seed} --only NUMBER:")
        print("\n".join(failures[:20]))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
