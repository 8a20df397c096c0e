"""Runs that are ended in the middle: by SIGTERM, and by a disk that is really full.

Each ends with one sentence, leaves no MLflow run running, and the same command continues.
"""

import os
import signal
import sqlite3
import subprocess
import time
from contextlib import closing, contextmanager

import psutil
import pytest

from tests.support.forked import Forked
from tests.support.stores import new_store
from valora_data.contract.bundle import read_bundle

pytestmark = pytest.mark.slow

LABELS = "domains.sign_type.teacher=labels"
COUNTS = "{train:64,unlabelled:32,val:50,test:16}"


def start(cwd, base, *more, gate=False):
    arguments = [
        f"model.id={base}", "task=classification",
        "task.only=[sign_type]", f"domains.sign_type.source.counts={COUNTS}",
        "domains.sign_type.required=0.01", "fusion.of_dedicated=null", "fusion.head_only=false",
        "fusion.margin=0",
        "train.steps=4", "train.probe_steps=4", "train.lora.rank=4", "train.threads=1", *more,
    ]  # fmt: skip
    # Only one run reaches the gate in a process of its own: it is interrupted there.
    return Forked("valora_train.cli", arguments, cwd, cwd.parent / "said.txt", gate=gate)


def said(process, expected):
    """All that a process said, in one line; it must end with this status."""
    text = " ".join(process.communicate(timeout=300)[0].split())
    assert process.returncode == expected, text
    return text


def wait_for(process, happened):
    end = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def said_to(process):
    """Command line of a process, of which nothing is left if it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a zombie's error, too
        return []


def runs(cwd):
    """Status of every MLflow run by its id, read beside a process that writes them."""
    if not (cwd / "mlflow.db").is_file():
        return {}
    with closing(sqlite3.connect(f"file:{cwd}/mlflow.db?mode=ro", uri=True)) as store:
        try:
            return dict(store.execute("select run_uuid, status from runs"))
        except sqlite3.OperationalError:  # the tables are being made
            return {}


def ended_by_sigterm(process):
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    text = said(process, 128 + signal.SIGTERM)
    assert text.endswith("interrupted: run the same command again to continue")
    assert "Traceback" not in text
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_sigterm_while_a_teacher_is_trained(tmp_path, random_llava):
    arguments = [
        "command=teach", "+teacher.options.epochs=300", "+teacher.options.size=32",
        "+teacher.options.width=8",
    ]  # fmt: skip

    def training():
        return "RUNNING" in runs(tmp_path).values()

    new_store(tmp_path)
    process = start(tmp_path, random_llava, *arguments)
    wait_for(process, training)
    ended_by_sigterm(process)
    ((run, status),) = runs(tmp_path).items()
    assert status == "KILLED"
    # Killed outright, it stays running until the next command, of any stage.
    process = start(tmp_path, random_llava, *arguments)
    wait_for(process, training)
    process.send_signal(signal.SIGKILL)
    said(process, -signal.SIGKILL)
    assert runs(tmp_path) == {run: "RUNNING"}
    said(start(tmp_path, random_llava, "command=fuse", LABELS), 0)
    assert runs(tmp_path)[run] == "KILLED"
    said(start(tmp_path, random_llava, *arguments), 0)
    after = runs(tmp_path)
    assert after[run] == "FINISHED"
    assert set(after.values()) == {"FINISHED"}


@contextmanager
def small_disk(folder, megabytes):
    """A disk of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk, left):
    """Leave some bytes of a disk."""
    status = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        file.write(bytes(max(0, status.f_bavail * status.f_frsize - left)))


def test_a_full_disk_in_every_stage_and_sigterm_in_the_gate(tmp_path, random_llava):
    small = ["+teacher.options.epochs=2", "+teacher.options.size=32", "+teacher.options.width=8"]
    stages = [
        (["command=teach", LABELS], 20_000),  # the data stage alone
        (["command=teach"], 60_000),
        (["command=fuse"], 100_000),
        (["command=export"], 50_000),
    ]
    with small_disk(tmp_path / "disk", 96) as disk:
        for arguments, left in stages:
            fill(disk, left)
            text = said(start(disk, random_llava, *small, *arguments), 1)
            assert "Traceback" not in text
            sentence = text[text.rindex("error: ") :]
            assert "space" in sentence
            assert sentence.endswith(("run the same command again", "what is trained is kept"))
            assert not list((disk / "bundles").glob("*"))
            (disk / "filler").unlink()
            if arguments == ["command=export"]:
                break
            said(start(disk, random_llava, *small, *arguments), 0)
            assert set(runs(disk).values()) <= {"FINISHED"}

        process = start(disk, random_llava, *small, *arguments, gate=True)
        checked = psutil.Process(process.pid)
        wait_for(process, lambda: any("gate" in str(said_to(c)) for c in checked.children()))
        ended_by_sigterm(process)
        assert list((disk / "bundles").glob("**/*")) == []
        assert set(runs(disk).values()) == {"FINISHED"}
        said(start(disk, random_llava, *small, *arguments), 0)
        assert read_bundle(disk / "bundles" / "classification").domains["sign_type"]["head"]
