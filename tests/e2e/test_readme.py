"""A new user's path: commands of the README and the first tutorials, in a clone without anything.

Every block of these pages is replayed, so that a new command fails the test until somebody has
decided. What is not as for a new user:

- packages come from the environment of this checkout, because a new one takes minutes and
  gigabytes: `make VENV=…`, and for the wheel a new environment that sees it;
- servers listen on a free port (`VALORA_PORT`) instead of 8000;
- `bundles/detection` is the bundle of `valora demo`, and trainings, tests and MLflow's pages are
  shown (`make -n`) instead of run; other tests run them.
"""

import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import httpx
import pytest

from tests.e2e.valora_serve.serving import ROOT, free_port
from tests.unit.test_docs import blocks

pytestmark = pytest.mark.slow

README = ROOT / "README.md"
TUTORIALS = [ROOT / "docs" / "tutorials" / name for name in ("first-bundle.md", "serve.md")]
INSTALLED = " ".join(f"-o {sys.prefix}/.{name}" for name in ("ready", "factory", "server"))
MAKE = f"make VENV={sys.prefix} {INSTALLED}"


def run(command, folder, **settings):
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, capture_output=True, text=True,
        check=False, timeout=240, env=environment(folder) | settings,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment(folder):
    roots = os.pathsep.join(str(folder / part) for part in ("", "data", "kernels", "teachers"))
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    kept["PATH"] = f"{sys.prefix}/bin{os.pathsep}{kept['PATH']}"
    return kept | {
        "HOME": str(folder), "PYTHONPATH": roots, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def lines(block):
    """Commands of a block without comments; what is continued is one command."""
    text = re.sub(r"\s+# .*$", "", block, flags=re.MULTILINE).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def ignored(folder, names):
    """Names in a folder that git leaves out; git itself may be missing where tests run."""
    found = {".git"}
    for line in (ROOT / ".gitignore").read_text().splitlines():
        if not line.startswith("/") or Path(folder) == ROOT:
            found.update(fnmatch.filter(names, line.strip("/")))
    return found


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git has, or would have after `git add`."""
    folder = tmp_path_factory.mktemp("path") / "valora"
    return Path(shutil.copytree(ROOT, folder, ignore=ignored))


def server(command, folder, settings, said):
    """Start a command that serves, and wait for what it says when it answers."""
    log = folder / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=settings, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + 180
    while re.search(said, log.read_text()) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    return process


def ended(process):
    os.killpg(process.pid, signal.SIGINT)
    return process.wait(60)


def test_the_wheel(clone, tmp_path):
    """`make wheel && pip install … && valora demo`, but for the packages that it depends on."""
    (line,) = lines(blocks(README, "bash")[1])
    make, install, demo = line.split(" && ")
    # hatchling is that of this environment.
    run(make.replace("make", MAKE), clone, PIP_NO_INDEX="1", PIP_NO_BUILD_ISOLATION="0")
    assert install == 'pip install "$(ls dist/valora-*.whl)[serve]"'
    (wheel,) = (clone / "dist").glob("*.whl")
    assert wheel.stat().st_size < 40e6
    new = tmp_path / "venv"
    venv.create(new)
    (packages,) = new.glob("lib/python*/site-packages")
    others = Path(pytest.__file__).parents[1]
    (packages / "dependencies.pth").write_text(f"{others}\n")
    pip = f"{new}/bin/python -m pip --disable-pip-version-check install --quiet --no-compile"
    run(f"{pip} --no-index --no-deps {wheel}", tmp_path)
    port = free_port()
    settings = environment(tmp_path) | {"VALORA_PORT": str(port), "PYTHONPATH": ""}
    settings |= {"PATH": f"{new}/bin:{settings['PATH']}", "BROWSER": "sh -c 'echo %s > opened'"}
    process = server(demo, tmp_path, settings, "console is at")
    try:
        url = f"http://127.0.0.1:{port}/"
        example = httpx.get(f"{url}v1/examples").json()["data"][0]
        image = httpx.get(url + example["images"][0]).content
        answer = httpx.post(f"{url}v1/vision/{example['domain']}", files={"image": image}).json()
        assert "VaLoRA" in httpx.get(url).text
    finally:
        status = ended(process)
    assert answer["results"][0]["detections"]
    assert status == 0
    where = "import valora_serve; print(valora_serve.__file__)"
    found = run(f'{new}/bin/python -c "{where}"', tmp_path, PYTHONPATH="")
    assert found.startswith(str(packages)), "the server is the wheel's"


def test_the_commands_of_a_clone(clone):
    """Every other block of shell and Python, with a server between them."""
    bundle = clone / "valora_serve" / "demo" / "bundles" / "detection"
    shutil.copytree(bundle, clone / "bundles" / "detection")
    port = free_port()
    settings = environment(clone) | {"VALORA_PORT": str(port)}
    process = server(f"{MAKE} serve TASK=detection", clone, settings, "startup complete")
    said = {}
    try:
        for block in (block for page in (README, *TUTORIALS) for block in blocks(page, "bash")):
            if "make wheel" in block:  # the test above
                continue
            if block.startswith("curl"):
                text = block.replace("localhost:8000", f"127.0.0.1:{port}")
                said[block] = run(text, clone)
                continue
            for line in lines(block):
                assert line.startswith("make "), f"not replayed: {line}"
                how = "" if line == "make help" else " -n"
                said[line] = run(f"{MAKE}{how}{line.removeprefix('make')}", clone)
        for block in (block for page in TUTORIALS for block in blocks(page, "python")):
            text = block.replace("localhost:8000", f"127.0.0.1:{port}")
            said[block] = run(f"{sys.executable} - <<'END'\n{text}\nEND", clone)
    finally:
        ended(process)
    assert "valora demo" in said["make demo"]
    assert "task=detection" in said["make fuse TASK=detection"]
    assert "List the targets" in said["make help"]
    vision, chat = (text for block, text in said.items() if block.startswith("curl"))
    assert vision.count('"detections"') == 3
    assert "data: [DONE]" in chat
    assert re.search(r'\\"colour\\": ?\\"(red|blue)\\"', chat)
    client = next(text for block, text in said.items() if "OpenAI(" in block)
    assert "'label': 'person'" in client
