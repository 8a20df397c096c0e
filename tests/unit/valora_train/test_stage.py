"""Stages: named by content, atomic, resumable, never half-written."""

import errno
import multiprocessing
import os
import sqlite3

import pytest
from safetensors import SafetensorError

from valora_data.hashing import hash_path
from valora_train.errors import StageError
from valora_train.stage import Stage, digest, intact, read_json, was_killed


def stage(resumable=False, **settings):
    return Stage("work-a", 1, settings, {"x": "1"}, resumable)


def write(folder):
    (folder / "result").write_text("42")


def test_the_same_work_is_done_once(tmp_path):
    folder, reused = stage(a=1).run(tmp_path, write)
    assert not reused
    assert (folder / "result").read_text() == "42"
    assert read_json(folder / "stage.json")["settings"] == {"a": 1}
    again, reused = stage(a=1).run(tmp_path, lambda _: pytest.fail("built again"))
    assert (again, reused) == (folder, True)


@pytest.mark.parametrize(
    "other",
    [
        Stage("work-a", 1, {"a": 2}, {"x": "1"}),
        Stage("work-a", 2, {"a": 1}, {"x": "1"}),
        Stage("work-a", 1, {"a": 1}, {"x": "2"}),
        Stage("work-b", 1, {"a": 1}, {"x": "1"}),
    ],
)
def test_other_settings_version_or_inputs_are_other_work(other):
    assert other.key != stage(a=1).key


def test_a_failed_build_leaves_nothing_that_counts(tmp_path):
    def fail(folder):
        write(folder)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        stage().run(tmp_path, fail)
    assert not stage().folder(tmp_path).exists()
    seen = []
    stage().run(tmp_path, lambda folder: seen.extend(folder.iterdir()))
    assert seen == []  # it starts afresh


def test_a_resumable_build_finds_what_it_left(tmp_path):
    def fail(folder):
        write(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage(resumable=True).run(tmp_path, fail)
    seen = []
    stage(resumable=True).run(tmp_path, lambda f: seen.extend(p.name for p in f.iterdir()))
    assert seen == ["result"]


def test_a_full_disk_is_one_sentence(tmp_path):
    def fill(folder):
        write(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StageError, match="no space left on the disk for stage work-a"):
        stage().run(tmp_path, fill)
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG,
    errno.EMFILE, errno.EDQUOT, errno.EIO, errno.ENOMEM])  # fmt: skip
@pytest.mark.parametrize("resumable", [False, True])
def test_any_fault_of_the_machine_is_one_sentence(tmp_path, number, resumable):
    def fail(folder):
        write(folder)
        raise OSError(number, os.strerror(number), str(folder / "x"))

    with pytest.raises(StageError, match=r"for stage work-a in .*: .* and run the same") as said:
        stage(resumable).run(tmp_path, fail)
    assert ".partial/x)" in str(said.value)
    left = [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"]
    assert bool(left) == resumable  # progress is kept where it can be


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (SafetensorError('I/O error: "No space left on device" (os error 28)'), "no space left"),
        (SafetensorError("Error: Permission denied (os error 13)"), "permission denied"),
        (RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing"),
         "no space left"),
        (sqlite3.OperationalError("attempt to write a readonly database"), "read-only"),
        (sqlite3.OperationalError("database or disk is full"), "no space left"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
         "memory"),
        (MemoryError(), "memory"),
    ],
)  # fmt: skip
def test_faults_that_libraries_report_in_words(tmp_path, error, cause):
    def fail(_):
        raise ValueError from error

    with pytest.raises(StageError, match=cause):
        stage().run(tmp_path, fail)


def test_errors_of_the_code_are_not_taken_for_faults(tmp_path):
    for error in (KeyError("x"), ValueError("no"), OSError("no number"), StageError("mine")):

        def fail(_, error=error):
            raise error

        with pytest.raises(type(error), match=str(error)):
            stage().run(tmp_path, fail)


def test_a_work_folder_that_is_a_file(tmp_path):
    (tmp_path / "work").write_text("")
    with pytest.raises(StageError, match="a file is where a folder should be"):
        stage().run(tmp_path / "work", write)
    with pytest.raises(StageError, match="a file is where a folder should be"):
        stage().run(tmp_path / "work" / "deeper", write)


def test_names_with_dots_do_not_share_a_folder(tmp_path):
    one, two = (Stage(f"fuse-{name}", 1, {}, {}) for name in ("a.b", "a.c"))
    assert one.partial(tmp_path) != two.partial(tmp_path)


def test_a_shared_output_is_found_under_another_name(tmp_path):
    one, two = (Stage(f"work-{name}", 1, {"a": 1}, {}, shared=True) for name in ("a", "b"))
    folder, _ = one.run(tmp_path, write)
    assert two.run(tmp_path, lambda _: pytest.fail("built again")) == (folder, True)
    assert Stage("work-b", 1, {"a": 1}, {}).folder(tmp_path) != folder


def test_parts_are_checked(tmp_path):
    folder, _ = stage(a=1).run(tmp_path, write)
    assert digest(folder / "result") == hash_path(folder / "result")
    assert intact(folder / "result") == folder / "result"
    assert intact(tmp_path / "elsewhere") == tmp_path / "elsewhere"
    (folder / "result").write_text("43")
    with pytest.raises(StageError, match=f"result is not what was written.: delete {folder} and"):
        intact(folder / "result")
    (folder / "result").unlink()
    with pytest.raises(StageError, match=f"result is missing.: delete {folder} and"):
        stage(a=1).run(tmp_path, write)


def _hold(folder, entered, leave):
    def build(_):
        entered.set()
        leave.wait(20)

    stage().run(folder, build)


def test_two_processes_do_not_make_the_same(tmp_path):
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path, entered, leave))
    other.start()
    try:
        assert entered.wait(60)
        with pytest.raises(StageError, match="another process"):
            stage().run(tmp_path, write)
    finally:
        leave.set()
        other.join()
    assert stage().run(tmp_path, write)[1]


def test_digest_follows_content(tmp_path):
    (tmp_path / "a.json").write_text("1")
    one = digest(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("2")
    assert digest(tmp_path / "a.json") != one
    whole = digest(tmp_path)
    (tmp_path / "b.txt").write_text("")
    assert digest(tmp_path) != whole
    second = digest(tmp_path)
    os.utime(tmp_path / "b.txt", (1, 1))  # times do not count
    assert digest(tmp_path) == second
    (tmp_path / "b.txt").write_text("1")
    assert digest(tmp_path) != second


def test_a_stage_was_killed_if_its_lock_is_there_and_free(tmp_path):
    one, other = Stage("teach-cat", 1, {}, {}), Stage("teach-dog", 1, {}, {})
    assert not was_killed(tmp_path, one.key)  # this folder knows nothing of it
    seen = []
    one.run(tmp_path, lambda _: seen.append(was_killed(tmp_path, one.key)))
    assert seen == [False]
    assert was_killed(tmp_path, one.key)
    assert not was_killed(tmp_path, other.key)


def test_another_machine_was_done_first_and_a_network_folder_showed_it_late(tmp_path):
    """Its output counts; the content is the same, as the key is."""

    def build(folder):
        write(folder)
        if not stage().folder(tmp_path).exists():
            other = stage().folder(tmp_path)
            other.mkdir()
            (other / "result").write_text("of the other machine")
            (other / "stage.json").write_text('{"parts": {"result": "1"}}')

    folder, _ = stage().run(tmp_path, build)
    assert (folder / "result").read_text() == "of the other machine"
    assert not stage().partial(tmp_path).exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(number, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StageError, match=r"the file system .*: mount it with locks \(NFSv4\), or"):
        stage().run(tmp_path, write)
    assert not stage().folder(tmp_path).exists()
