"""Every built-in task fused with its defaults: accuracy by domain, adapters and attempts.

`--sets` fuses the data sets below a folder, one in Ultralytics' format in each of its folders, in
their place, into one adapter. `--work` keeps the stages' results, so that a run which was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tests.bench.valora_serve.harness import table

TASKS = (
    "detection", "classification", "vqa", "grounding", "counting", "caption", "video", "context",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "valora-tasks"))
    parser.add_argument("--sets", type=Path, help="folder of data sets to fuse instead")
    options = parser.parse_args()
    domains, tasks = [], []
    for task in ("own",) if options.sets else options.tasks:
        work = options.work / task
        paths = {"work": "work", "bundles": "bundles"}
        given = [f"paths.{name}={work / folder}" for name, folder in paths.items()]
        given.append(f"paths.tracking=sqlite:///{work.resolve()}/mlflow.db")
        given += sets(options.sets) if options.sets else ()
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "valora_train.cli", f"task={task}", *given]
        subprocess.run(command, check=True, stdout=sys.stderr)
        manifest = json.loads((work / "bundles" / task / "bundle.json").read_text())
        domains += [[task, name, *cells(facts)] for name, facts in manifest["domains"].items()]
        tasks.append([
            task, len(manifest["adapters"]), manifest["attempts"], len(manifest["rejected"])
        ])  # fmt: skip
    table("Accuracy on test",
          ["task", "domain", "required", "without LoRA", "with LoRA (95 % interval)", "adapter",
           "teacher"], domains)  # fmt: skip
    table("Fusions", ["task", "adapters", "attempts", "rolled back"], tasks)


def sets(folder):
    """Settings that fuse all data sets of a folder into one adapter."""
    given = ["fusion=joint", "fusion.head_only=false", "fusion.unreachable=keep"]
    for file in sorted(folder.resolve().glob("*/data.yaml")):
        names, domain = yaml.safe_load(file.read_text())["names"], f"domains.{file.parent.name}"
        labels = list(names.values()) if isinstance(names, dict) else names
        given += [f"+domain@{domain}=yolo", f"{domain}.name={file.parent.name}"]
        given.append(f"{domain}.required=0.01")  # so that none is rolled back
        given += [f"{domain}.labels=[{','.join(labels)}]", f"{domain}.source.path={file}"]
    return given


def cells(facts):
    """A domain's figures, from its bundle."""
    found = facts["accuracy"]
    low, high = found["test_ci95"]
    name = facts["adapter"]
    reached = f"{found['test']:.3f} ({low:.3f}–{high:.3f})"
    before, teacher = (found.get(key) for key in ("head_only", "teacher"))
    return [
        f"{facts['required']:.3f}", "–" if before is None else f"{before:.3f}",
        reached if name else "takes none", name.removeprefix("adapter-") if name else "–",
        "–" if teacher is None else f"{teacher:.3f}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
