"""Trials: the same in one process and in several, and continued after a kill."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.trial_inputs import trial_inputs
from valora_data.errors import ValoraError
from valora_train.trials import __main__ as main_module
from valora_train.trials import pool
from valora_train.trials.inputs import pack_inputs, read_inputs
from valora_train.trials.oracle import oracle_trials
from valora_train.trials.pool import Progress, run_trials
from valora_train.trials.store import RESULTS, Trial, TrialStore


@pytest.fixture
def inputs(tmp_path, random_llava, one_thread):
    return trial_inputs(tmp_path / "in", random_llava)


def without_time(results):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in results]


def test_every_subset_for_every_seed():
    trials = oracle_trials(["b", "a", "c"], [4, 7])
    assert len(set(map(str, trials))) == len(trials) == 2 * (3 + 7)
    assert Trial("joint", ("a", "b", "c"), 7) in trials
    assert Trial("head_only", ("c",), 4) in trials
    pairs = oracle_trials(["b", "a", "c"], [4], largest=2)
    assert sorted(len(one.domains) for one in pairs) == [1, 1, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_processes_find_what_one_finds(inputs, tmp_path):
    trials = oracle_trials(list(read_inputs(inputs).domains), [1, 2], largest=2)
    seen = []
    alone = run_trials(
        inputs, trials, TrialStore(tmp_path / "one"), 1,
        lambda trial, result, progress: seen.append((trial, progress.done, progress.count)),
    )  # fmt: skip
    assert {trial.name for trial, _, _ in seen} == {trial.name for trial in trials}
    assert [done for _, done, _ in seen] == [*range(1, len(trials) + 1)]
    many = run_trials(inputs, trials[::-1], TrialStore(tmp_path / "two"), 2)
    assert without_time(many[::-1]) == without_time(alone)
    for trial, result in zip(trials, alone, strict=True):
        assert (tuple(result["domains"]), result["seed"]) == (trial.domains, trial.seed)
        assert set(result["accuracy"]) == set(trial.domains)
        for found in result["accuracy"].values():
            assert 0 <= found["val"] <= 1
            assert 0 <= found["test_map"] <= 1
    # Seeds and groups differ.
    joint = [json.dumps(row["accuracy"]) for row in alone if row["method"] == "joint"]
    assert len(set(joint)) > 1


def test_what_is_done_is_not_done_again(inputs, tmp_path, monkeypatch):
    store = TrialStore(tmp_path / "out")
    trials = oracle_trials(["sky", "apple"], [0])
    first = run_trials(inputs, trials, store)
    # A process was killed while it wrote the last result.
    file = store.folder / RESULTS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    seen = []
    again = run_trials(inputs, trials, store, on_done=lambda trial, *_: seen.append(trial.name))
    assert len(seen) == 1
    assert without_time(again) == without_time(first)
    monkeypatch.setattr(pool, "Worker", None)  # would fail if it were called
    assert run_trials(inputs, trials, store, 1) == again
    # Only what is new is trained, also if more domains are asked for.
    seen.clear()
    monkeypatch.undo()
    run_trials(inputs, oracle_trials(["sky", "leaf", "apple"], [0], 1), store,
               on_done=lambda trial, *_: seen.append(trial.name))  # fmt: skip
    assert sorted(seen) == ["head_only leaf, seed 0", "joint leaf, seed 0"]


def test_a_trial_that_another_command_computes_is_waited_for(inputs, tmp_path, monkeypatch):
    store = TrialStore(tmp_path / "out")
    (trial,) = oracle_trials(["sky"], [0])[:1]
    key = read_inputs(inputs).key(trial)
    naps = []

    def other_command_ends(_):
        naps.append(1)
        if len(naps) == 2:
            holder.__exit__(None, None, None)
            accuracy = {"sky": {"val": 0.5, "test": 0.5}}
            told = {"method": "head_only", "domains": ["sky"], "seed": 0, "accuracy": accuracy}
            store.add(key, told | {"seconds": 0.1, "mark": 5})

    monkeypatch.setattr(pool.time, "sleep", other_command_ends)
    holder = store.claim(key)
    assert holder.__enter__()
    (found,) = run_trials(inputs, [trial], store)
    assert found["mark"] == 5
    assert len(naps) == 2


def test_a_training_that_diverges_reaches_nothing(tmp_path, random_llava, one_thread):
    inputs = trial_inputs(tmp_path / "in", random_llava, lr=1e30, clip=1e30, head_lr=1e30)
    found = run_trials(inputs, [Trial("joint", ("apple", "sky"), 0)], TrialStore(tmp_path / "out"))
    assert found[0]["accuracy"]["sky"] == {"val": None, "test": None}


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--compare", "--seeds", "1"], 2, "leave out --seeds"),
        (["--compare", "--only", "sky"], 2, "leave out --only"),
        (["--largest", "-1"], 2, "--largest must be at least 0"),
        (["--processes", "0"], 2, "--processes must be at least 1"),
        (["--only", "sky", "moon"], 1, "error: unknown domain moon: choose from "),
        ([], 1, "12 domains takes 4,095 trainings a seed: choose at most 10 domains (--only), or"),
    ],
)
def test_mistakes_on_another_machine_are_one_sentence(
    inputs, monkeypatch, capsys, arguments, status, message
):
    known = read_inputs(inputs)
    many = {f"d{n}": known.domains["sky"] for n in range(12)}
    domains = known.domains if arguments else many
    monkeypatch.setattr(main_module, "read_inputs", lambda _: replace(known, domains=domains))
    monkeypatch.setattr(main_module, "complete_inputs", lambda *_: pytest.fail("began"))
    try:
        ended = main_module.main([str(inputs.parent), *arguments])
    except SystemExit as stop:
        ended = stop.code
    assert ended == status
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_packed_inputs_give_the_same_results(inputs, tmp_path):
    packed = pack_inputs(read_inputs(inputs), tmp_path / "packed")
    trial = Trial("joint", ("apple", "leaf"), 3)
    (here,) = run_trials(inputs, [trial], TrialStore(tmp_path / "a"))
    # A machine without the libraries of the whole pipeline.
    program = (
        "import sys\n"
        "for name in ('hydra', 'omegaconf', 'mlflow', 'ultralytics', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "from valora_train.trials.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(packed.parent), "--out", str(tmp_path / "b"),
         "--seeds", "3", "--only", "apple", "leaf", "--processes", "1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "5/5 after" in done.stdout
    there = TrialStore(tmp_path / "b").results()[read_inputs(packed).key(trial)]
    assert without_time([there]) == without_time([here])


@pytest.mark.slow
def test_signals_end_all_processes_and_the_rest_is_done_later(inputs, tmp_path):
    command = [sys.executable, "-m", "valora_train.trials", str(inputs.parent), "--out",
               str(tmp_path / "out"), "--seeds", "0", "--processes", "2"]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first = running.stdout.readline()
    assert first.startswith("1/10 after"), running.communicate()
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert said == "interrupted: run the same command again to continue\n"
    store = TrialStore(tmp_path / "out")
    known = len(store.results())
    assert 1 <= known < 10
    trials = oracle_trials(["sky", "apple", "leaf"], [0])
    seen = []
    whole = run_trials(inputs, trials, store, on_done=lambda trial, *_: seen.append(trial))
    assert len(seen) == 10 - known
    alone = run_trials(inputs, trials, TrialStore(tmp_path / "alone"))
    assert without_time(whole) == without_time(alone)


@pytest.mark.slow
def test_workers_end_with_a_killed_parent(inputs, tmp_path):
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from valora_train.trials import pool\n"
        "from valora_train.trials.oracle import oracle_trials\n"
        "from valora_train.trials.store import TrialStore\n"
        "def on_done(*_):\n"
        "    import multiprocessing\n"
        "    print(*[c.pid for c in multiprocessing.active_children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        f"    pool.run_trials(Path({str(inputs)!r}), oracle_trials(['sky', 'apple'], range(90)),\n"
        f"                    TrialStore(Path({str(tmp_path / 'out')!r})), 2, on_done)\n"
    )
    (tmp_path / "main.py").write_text(program)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "main.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.slow
def test_errors_of_workers_are_one_sentence(inputs, tmp_path):
    content = json.loads(inputs.read_text())
    content["domains"]["apple"]["samples"]["taught"] = "nowhere"
    inputs.write_text(json.dumps(content))
    with pytest.raises(ValoraError, match="nowhere is not a readable data set") as caught:
        run_trials(inputs, oracle_trials(["apple", "sky"], [0]), TrialStore(tmp_path / "o"), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"version": 99}', '{"version": 1}'])
def test_damaged_inputs_are_one_sentence(tmp_path, damage):
    (tmp_path / "inputs.json").write_text(damage)
    with pytest.raises(ValoraError, match=r"inputs\.json is.*write it again") as caught:
        read_inputs(tmp_path)
    assert "\n" not in str(caught.value)


def test_time_left_follows_the_steps(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: now[0])
    progress = Progress({"a": 30, "b": 60, "c": 10}, done=4)
    assert progress.seconds_left is None
    now[0] += 12
    progress.finish("b")
    assert progress.seconds_left == pytest.approx(12 * 40 / 60)
    assert (progress.done, progress.count) == (5, 7)
