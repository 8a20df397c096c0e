"""The command line's answers to mistakes: one sentence, non-zero exit, nothing half-written."""

import errno
import re
import socket
import sqlite3
from importlib.metadata import version

import pytest
from hydra.errors import MissingConfigException
from PIL import Image
from safetensors import SafetensorError

from tests.support.detection_sets import coco_domain
from valora_train import cli
from valora_train.errors import SettingsError
from valora_train.removed import removed
from valora_train.settings import SourceSettings


def left_behind(folder):
    """Files, without locks and the remembered hashes of the source's files."""
    files = [p for p in folder.rglob("*") if p.is_file() and ".lock" not in p.name]
    return [p for p in files if p.parent.name != "hashes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["task=2024"], "unknown task '2024': choose from"),
        (["fusion=best"], "unknown fusion 'best': choose from affinity, first_fit, joint, paper"),
        (["+tracking.also=[wandb]"], "tracking.also was removed: MLflow has every run"),
        (["domains.person.of_teacher=0.9", "experiment=paper"],
         "experiment=paper asks for the paper's figures alone, but domain person must also keep"),
        (["proceses=1"], "bad setting proceses=1: there is no such setting, did you mean proc"),
        (["experimant=paper"], "did you mean experiment?"),
        (["seed=1"], "did you mean train.seed?"),
        (["+domain@domains.no=coco", "task=own", "domains.no.name=no", "domains.no.labels=[no,yes]",
          "task.only=[no]", "domains.no.source.path=x"], "domains.no.source.path=x does not exist"),
        (["paths.work=/dev/null/It's Übung"], "=/dev/null/It's Übung: /dev/null is a file"),
        (["task.only=[Übung]"], "put text in quotes, as in 'task.only=[\"Übung\"]'"),
        (["paths.work=/tmp/\udcff"], "surrogates not allowed: mend this"),
        (["paths.work=a,b"], "To use it as string, quote the value"),
        (["model.device=99"], "model.device=cuda:99: this machine"),
        (["task.name=2024"], "for this text, write 'task.name=\"2024\"'"),
        (["paths.wrok=http://me:se/cret@host"], "bad setting paths.wrok='http://***@host'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence_with_a_remedy(valora_train, tmp_path, arguments, message):
    status, said = valora_train(*arguments)
    last = said.strip().splitlines()[-1]
    assert (status, last[:7]) == (1, "error: ")
    assert message in last
    assert not list(tmp_path.iterdir()), "nothing is half-written"


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("sqlite:///{}/text.db", "file is not a database): it is damaged: move it away"),
        ("sqlite:////dev/null/x.db", "File exists: '/dev/null'): move it away"),
        ("ftp://me:secret@host/store", "got unsupported URI 'ftp://***@host/store'"),
        ("mssql+none://me:se/cret@host/store?password=secret", "Can't load plugin"),
        ("http://me:secret@127.0.0.1:{port}", "start it, or correct its address"),
    ],
)
def test_a_store_of_mlflow_is_tried_before_any_work(
    valora_train, tmp_path, monkeypatch, store, message
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    (tmp_path / "text.db").write_text("no database at all" * 99)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = store.format(tmp_path, port=silent.getsockname()[1])
        status, said = valora_train("task=detection", f"paths.tracking='{uri}'")
    assert status == 1
    assert said.startswith("error: MLflow's store ") and message in said and "cret" not in said
    assert not list(tmp_path.glob(".valora/data-*"))


def test_mistakes_in_data(valora_train, tmp_path):
    def spoil(content):  # one fault among many images is left out, and recorded
        content["annotations"][3]["bbox"] = [40, 40, 30, 30]

    overrides = [*coco_domain(tmp_path / "cats", spoil), "command=distill"]
    assert valora_train(*overrides)[0] == 0
    (record,) = tmp_path.rglob("faults.json")
    assert "outside" in record.read_text()
    before = set(left_behind(tmp_path))
    status, said = valora_train(*overrides, "+domains.cat.source.max_faulty=0")
    last = said.strip().splitlines()[-1]
    assert (status, last[:7], "outside" in last) == (1, "error: ", True)
    assert set(left_behind(tmp_path)) == before


def test_a_file_that_is_no_teacher(valora_train, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "best.pt", "PNG")
    overrides = coco_domain(tmp_path / "cats")
    status, said = valora_train(*overrides, "domains.cat.teacher=best.pt", "command=teach")
    assert status == 1
    assert "best.pt" in said.strip().splitlines()[-1]
    assert not list(tmp_path.glob(".valora/data-*")), "it is loaded before the data is read"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a/b"), "on device: '/a/b'"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "No space left on"),
        (sqlite3.OperationalError("database or disk is full"), "disk is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "allocate memory"),
        (MemoryError("9 GB"), "MemoryError: 9 GB"),
    ],
)
def test_errors_of_the_machine_are_one_sentence(error, shown):
    outer = ValueError("a library's own")
    outer.__cause__ = error
    said = cli.sentence(outer)
    assert shown in said and said.endswith("mend this and run the same command again")


def test_a_fault_of_the_code_keeps_its_traceback(valora_train, monkeypatch):
    monkeypatch.setattr(cli, "check", lambda _: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        valora_train("command=teach")


def test_a_file_of_settings_that_is_no_yaml(valora_train, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("a: [1\nb: }")
    status, said = valora_train(f"hydra.searchpath=[file://{tmp_path}]", "experiment=mine")
    assert (status, "mine.yaml" in said) == (1, True)
    assert said.startswith("error: a file of settings is no YAML")


def test_help_lists_the_choices_and_the_version_is_printed(valora_train):
    assert valora_train("--help")[0] in (0, None)
    assert {"detection", "rehearsal"} <= set(re.findall(r"\w+", valora_train.out))
    assert valora_train("--version") == (0, "")
    assert valora_train.out == f"valora-train {version('valora')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("hydra/launcher=submitit_local -m hydra.launcher.n_jobs=2",
         "hydra.launcher.n_jobs=2 was removed: submitit starts all jobs at once"),
        ("fusion.strategy=repack:joint",
         "fusion.strategy=repack:joint was removed: fusion.strategy=affinity, which moves"),
        ("fusion.oracle=table.json", "fusion.oracle was removed: bench_oracle says"),
        ("oracle.seeds=[0]", "oracle.seeds was removed: run python -m tests.bench.valora_train"),
        ("oracle.processes=2", "oracle.processes was removed: set fusion.processes"),
        ("+domain@domains.cat=vqa", "domain@domains.cat=vqa was removed: write a metadata.jsonl"),
        ("experiment=shelf", "experiment=shelf was removed: task=shelf is the same"),
        ("experiment=mixed", "experiment=mixed was removed: task=mixed is the same"),
        ("domains.person.relative=true", "domains.person.relative was removed: leave it out; of"),
        ("command=baselines", "command=baselines was removed: run python -m tests.bench."),
        ("hydra/sweeper=optuna -m", "hydra/sweeper=optuna was removed: let a search of"),
        ("hydra/sweeper=grid -m", "hydra/sweeper=grid was removed: leave it out"),
        ("command=estimate", "command=estimate was removed: start the run, which says"),
    ],
)  # fmt: skip
def test_a_setting_that_went_names_its_successor(arguments, message):
    assert removed(*arguments.split()).startswith(message)


def test_a_file_that_builds_on_a_removed_format_is_told_what_to_write():
    error = MissingConfigException("Could not load 'domain/vqa'.", "domain/vqa")
    assert cli.sentence(error).startswith("domain/vqa was removed: write a metadata.jsonl")
    with pytest.raises(SettingsError, match=r"kind=refcoco was removed: write a metadata\.jsonl"):
        _ = SourceSettings(kind="refcoco").format
