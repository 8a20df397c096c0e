"""``valora-serve`` in a process of its own, with the tiny base model and a random bundle."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.engine_reference import Reference
from tests.support.forked import Forked
from tests.support.serve_helpers import make_bundle
from valora_data.contract.boxes import read_detections
from valora_data.contract.bundle import GOLDEN, read_bundle, write_manifest
from valora_serve.types import Request

ROOT = Path(__file__).parents[3]
SECRET = "an-admin-key-for-these-tests"
HEADERS = {"authorization": f"Bearer {SECRET}"}
ROOTS = os.pathsep.join(str(ROOT / part) for part in ("", "data", "kernels", "teachers"))
ENVIRONMENT = {"PYTHONPATH": ROOTS, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def bundle_with_golden(folder, *, seed=2, **options):
    """A random bundle whose golden examples are what plain PEFT and the head say of them.

    With the default seed, heads find boxes in them; none would hold whatever a server answers.
    """
    make_bundle(folder, "tiny", seed=seed, **options)
    bundle = read_bundle(folder)
    (folder / "golden").mkdir()
    examples = []
    for number, (name, facts) in enumerate(bundle.domains.items()):
        if facts["task"] == "detection":
            image = Image.radial_gradient("L").resize((120 + 40 * number, 90)).convert("RGB")
            file = f"golden/{name}-0.png"
            image.save(folder / file)
            rows = detect(bundle, facts, image)
            assert rows, f"the random head of {name} finds nothing: choose another seed"
            examples.append({"domain": name, "image": file, "expected": rows})
    write_golden(folder, examples)
    return folder


def write_golden(folder, examples):
    """Give a bundle other golden examples."""
    manifest = dict(read_bundle(folder).manifest)
    del manifest["files"], manifest["schema_version"]
    (folder / GOLDEN).parent.mkdir(exist_ok=True)
    (folder / GOLDEN).write_text(json.dumps(examples))
    write_manifest(folder, manifest)


def detect(bundle, facts, image):
    """Boxes of a detection domain, by the format of bundles: PEFT, one linear layer, the box code.

    A domain without an adapter is one of the base model as transformers loads it.
    """
    name = facts["adapter"]
    adapters = {} if name is None else {name: bundle.folder / bundle.adapters[name]["path"]}
    reference = Reference("tiny", adapters)
    turn = [{"type": "text", "text": facts["prompt"]}, {"type": "image"}]
    asked = Request("", messages=[{"role": "user", "content": turn}], images=[image])
    inputs = reference.inputs(asked)
    model = reference.model.get_base_model() if adapters else reference.model
    with torch.no_grad():
        hidden = model.model(**inputs).last_hidden_state[0]
    visual = hidden[inputs["input_ids"][0] == model.config.image_token_id]
    file = bundle.folder / facts["head"]
    head = load_file(file)
    with safe_open(file, "pt") as opened:
        told = opened.metadata()
    boxes, confidences, classes = read_detections(
        (visual @ head["weight"].T + head["bias"]).numpy(),
        tuple(json.loads(told["grid"])),
        head["calibration"].tolist(),
        nms_iou=float(told["nms_iou"]),
        min_score=facts["threshold"],
        most=int(told["most"]),
        vote_sigma=float(told["vote_sigma"]),
    )
    return [
        {"label": facts["labels"][kind], "confidence": sure, "box": box}
        for box, sure, kind in zip(
            (boxes * (2 * image.size)).tolist(), confidences.tolist(), classes.tolist(), strict=True
        )
    ]


def free_port():
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def whole(module, arguments, cwd, log, env):
    """Start a whole process, whose own ones are its children, and not a forked one."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=file, stderr=subprocess.STDOUT)


def processes_of(pid, module):
    """Process ids of a module's processes below a process."""
    found = []
    listed = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    for child in " ".join(listed).split():
        if f"valora_serve.engine.{module}" in Path(f"/proc/{child}/cmdline").read_text():
            found.append(int(child))
        found += processes_of(int(child), module)
    return found


class Process:
    """A ``valora-serve`` process.

    Args:
        arguments: Arguments of the command.
        cwd: Working directory.
        start: Starts it; benches measure a whole process, and not a forked one.
    """

    def __init__(self, *arguments, cwd, start=Forked):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(cwd) / f"log-{self.port}.txt"
        settings = {
            **ENVIRONMENT,
            "VALORA_PORT": str(self.port), "VALORA_COST_FOLDER": str(Path(cwd) / "costs"),
            "VALORA_PROFILE": "false",
        }  # fmt: skip
        self.process = start("valora_serve.cli", arguments, cwd, self.log, os.environ | settings)

    def ready(self, seconds=120):
        """Wait until it answers; gives itself."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if httpx.get(f"{self.url}/ready", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def end(self, how=signal.SIGTERM, seconds=60):
        """Stop it; gives its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        return self.process.wait(seconds)

    def __enter__(self):
        return self.ready()

    def __exit__(self, *_):
        self.end()

    def post(self, path, key=SECRET, seconds=60, **body):
        """Ask a route, as an administrator."""
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=headers, timeout=seconds)

    def chat(self, model="tiny", text="what is this?", **options):
        messages = [{"role": "user", "content": text}]
        return self.post("chat/completions", model=model, messages=messages, **options)

    def look(self, domain, image, **fields):
        """Answer of a domain to an image's content."""
        url, files = f"{self.url}/v1/vision/{domain}", {"image": image}
        answer = httpx.post(url, files=files, data=fields, headers=HEADERS, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["results"][0]

    def names(self):
        """Names of what is served."""
        listed = httpx.get(f"{self.url}/v1/models", headers=HEADERS, timeout=60).json()["data"]
        return {model["id"] for model in listed}

    def said(self, pattern):
        """Return the match of a pattern in the log."""
        return re.search(pattern, self.log.read_text())
