"""``valora-serve --tensor-parallel 2`` as users run it: answers, a killed process, bad input."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.valora_serve.serving import ROOTS, Process

pytestmark = pytest.mark.slow


def followers(pid):
    """Process ids of a server's followers."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    lines = {int(child): Path(f"/proc/{child}/cmdline").read_text() for child in children}
    return [child for child, line in lines.items() if "valora_serve.engine.follower" in line]


def running(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_whose_process_is_killed_answers_and_exits(tmp_path):
    server = Process("--device", "cpu", "--tensor-parallel", "2", cwd=tmp_path)
    try:
        server.ready(240)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=body | {"max_tokens": 3}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        late = {}

        def ask():
            more = body | {"max_tokens": 1500, "ignore_eos": True}
            late["answer"] = httpx.post(f"{server.url}/v1/chat/completions", json=more, timeout=60)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1.0)
        (follower,) = followers(server.process.pid)
        os.kill(follower, signal.SIGKILL)
        asking.join(30)
        assert late["answer"].status_code >= 500
        assert "was killed by SIGKILL: restart the server" in late["answer"].text
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert "error: process 1 of the tensor-parallel group of 2 was killed by SIGKILL" in log
        assert "Traceback" not in log
    finally:
        server.end(signal.SIGKILL)


def test_followers_end_with_their_leader(tmp_path):
    server = Process("--device", "cpu", "--tensor-parallel", "2", cwd=tmp_path).ready(240)
    (follower,) = followers(server.process.pid)
    server.end(signal.SIGKILL)
    end = time.monotonic() + 20
    while running(follower) and time.monotonic() < end:
        time.sleep(0.1)
    assert not running(follower)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--tensor-parallel", "3"], "3 GPUs cannot share base model tiny"),
        (["--device", "cuda", "--tensor-parallel", "99"], "99 GPUs are asked for, and this"),
        (["--tensor-parallel", "2", "--lora-parallel", "both"], "lora_parallel: expected one of"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, arguments, said):
    done = subprocess.run(
        [sys.executable, "-m", "valora_serve.cli", "--port", "0", *arguments],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ROOTS},
    )  # fmt: skip
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert "Traceback" not in done.stderr
