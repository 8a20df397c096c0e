"""Reads the local files of Weights & Biases: records of protobuf in LevelDB's log format."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7


def _records(file: Path):
    data, at, record = file.read_bytes(), 7, b""  # after ":W&B" and its version
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # whole, or last part
            yield Record.FromString(record)
            record = b""


@dataclass
class Found:
    """A run as its file tells it; `history` has (step, value) by metric."""

    project: str = ""
    group: str = ""
    name: str = ""
    notes: str = ""
    exit_code: int | None = None
    config: dict = field(default_factory=dict)
    history: dict = field(default_factory=dict)


def read_runs(folder: Path) -> dict[str, Found]:
    """Runs by id; files of one run, written by several processes, are read in their order."""
    runs: dict[str, Found] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        run = runs.setdefault(file.stem.removeprefix("run-"), Found())
        for record in _records(file):
            told = record.run
            if record.HasField("run"):
                run.project, run.group = told.project, told.run_group
                run.name, run.notes = told.display_name, told.notes
            for item in (*told.config.update, *record.config.update):
                run.config[item.key] = json.loads(item.value_json)
            values = {
                "/".join([item.key, *item.nested_key] if item.key else item.nested_key):
                json.loads(item.value_json)
                for item in record.history.item
            }  # fmt: skip
            for key, value in values.items():
                if not key.startswith("_") and key != "step":
                    run.history.setdefault(key, []).append((values.get("step"), value))
            if record.HasField("exit"):
                run.exit_code = record.exit.exit_code
    return runs
