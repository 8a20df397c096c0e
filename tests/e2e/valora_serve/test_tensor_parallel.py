"""``valora-serve --tensor-parallel 2`` as users run it: answers, and a killed process."""

import os
import signal
import threading
import time

import pytest

from tests.e2e.valora_serve.serving import Process, processes_of, whole

pytestmark = pytest.mark.slow


def test_a_server_whose_process_is_killed_answers_and_exits(tmp_path):
    server = Process("--device", "cpu", "--tensor-parallel", "2", cwd=tmp_path, start=whole)
    try:
        server.ready(240)
        answer = server.chat(max_tokens=3)
        assert answer.status_code == 200, answer.text
        late = {}

        def ask():
            late["answer"] = server.chat(max_tokens=1500, ignore_eos=True)

        asking = threading.Thread(target=ask)
        asking.start()
        time.sleep(1.0)
        (worker,) = processes_of(server.process.pid, "workers")
        os.kill(worker, signal.SIGKILL)
        asking.join(30)
        assert late["answer"].status_code >= 500
        assert "was killed by SIGKILL: restart the server" in late["answer"].text
        assert server.process.wait(60) == 1
        log = server.log.read_text()
        assert "error: process 1 of the tensor-parallel group of 2 was killed by SIGKILL" in log
        assert "Traceback" not in log
    finally:
        server.end(signal.SIGKILL)
