"""Stages: named by content, atomic, resumable, never half-written."""

import errno
import multiprocessing

import pytest

from valora_train.errors import StageError
from valora_train.stage import Stage, digest, read_json


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
