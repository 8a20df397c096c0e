"""The figures that the documentation cites: what measures each, and its tables there.

    python -m tests.bench.figures run [NAME …]    measure: without names, all that this machine can
    python -m tests.bench.figures write           write the tables of docs/ anew

A run keeps the tables that its command prints in ``docs/figures/NAME.json``, with command, commit,
date, machine and versions. A page has a table between ``<!-- figure NAME TABLE: COLUMNS -->`` and
``<!-- end -->``: the number of the table, from 0, and the columns to show (all without); ``0/x``
shows the rows that begin with x. What has no file yet stays as it is.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
SERVE = "tests.bench.valora_serve"
CONTEXTS = "tests.bench.valora_train.bench_context_ways --tokens 32"
DOCUMENTS = "task.only=[ledger_1,ledger_2,ledger_3,ledger_4]"
BLOCK = re.compile(
    r"<!-- figure ([\w-]+) (\d+)(?:/(\w+))?(?:: (.*?))? -->\n.*?<!-- end -->", re.DOTALL
)
PACKAGES = ("torch", "triton", "transformers", "peft", "ray", "ultralytics")


class Figure(NamedTuple):
    """A module with its arguments, and the GPUs that it needs."""

    command: str
    gpus: int = 0


FIGURES = {
    "decode": Figure(f"{SERVE}.bench_serve decode prefill", 1),
    "throughput": Figure(f"{SERVE}.bench_serve throughput", 1),
    "heads": Figure(f"{SERVE}.bench_serve heads --seconds 18", 1),
    "domains": Figure(f"{SERVE}.bench_serve domains", 1),
    "skew": Figure(
        f"{SERVE}.bench_serve skew --rate 48 32 10 --shares 0.2 0.6 0.9 --seconds 4 "
        "--policies unmerge_only dlora slora valora cost",
        1,
    ),
    "slo": Figure(f"{SERVE}.bench_serve slo --window 4", 1),
    "ablation": Figure(f"{SERVE}.bench_serve ablation --window 4", 1),
    "peft": Figure(f"{SERVE}.bench_serve packed peft", 1),
    "modes": Figure(f"{SERVE}.bench_serve switch switching starving", 1),
    "adapters": Figure(f"{SERVE}.bench_serve adapters populations", 1),
    "fp8": Figure(f"{SERVE}.bench_serve decode prefill --batches 1 32 --quantize fp8", 1),
    "nf4": Figure(f"{SERVE}.bench_serve decode prefill --batches 1 32 --quantize nf4_packed", 1),
    "documents": Figure(f"{SERVE}.bench_contexts documents --requests 500 --prompt-requests 48", 1),
    "systems": Figure(f"{SERVE}.bench_serve systems", 1),
    "systems-qwen": Figure(
        f"{SERVE}.bench_serve systems --base qwen2.5-vl-7b --systems dlora slora valora ours", 1
    ),
    "systems-13b": Figure(
        f"{SERVE}.bench_serve systems --base llava-13b --window 4 --shares 0.2 0.9", 1
    ),
    "merging": Figure(f"{SERVE}.bench_serve merging", 1),
    "kernels": Figure("tests.bench.valora_kernels.bench_atmm", 1),
    "operators": Figure("tests.bench.valora_kernels.bench_operators", 1),
    "training": Figure("tests.bench.valora_train.bench_train", 1),
    "four-bits": Figure(
        "tests.bench.valora_train.bench_fuse --limit 16 --skip serve --samples 16", 1
    ),
    "ways": Figure(
        "tests.bench.valora_train.bench_compare --seeds 0 --strategies affinity --shares 0.97 "
        "--ewc 100 --processes 2 -- task=detection"
    ),
    "tensor-parallel": Figure(f"{SERVE}.bench_tensor_parallel --ways one slora replicate_a", 2),
    "replicas": Figure(
        f"{SERVE}.bench_replicas throughput --base llava-7b --seconds 24 --clients 128 --senders 8",
        2,
    ),
    "affinity": Figure(
        f"{SERVE}.bench_replicas affinity --base llava-7b --affinity-layers 4 --seconds 24 "
        "--senders 8",
        2,
    ),
    "kill": Figure(f"{SERVE}.bench_replicas kill --tiny"),
    "fronts": Figure(
        f"{SERVE}.bench_replicas front --fronts 1 2 4 8 --seconds 8 --clients 128 --senders 4"
    ),
    "http": Figure(f"{SERVE}.bench_http"),
    "shelf": Figure(f"{SERVE}.bench_shelf --seconds 3"),
    "shelf-gpu": Figure(f"{SERVE}.bench_shelf --seconds 3 --device cuda --ways bundle yolo", 1),
    "tasks": Figure("tests.bench.valora_train.bench_tasks"),
    "sets": Figure("tests.bench.valora_train.bench_tasks --sets .valora/sets"),
    "quantized": Figure(f"{SERVE}.bench_quantized"),
    "oracles": Figure("tests.bench.valora_train.bench_oracle"),
    "contexts": Figure(
        f"{CONTEXTS} --methods question_alone truncated bm25 next_token adapter memory_tokens "
        f"memory_tokens_adapter prefix -- {DOCUMENTS}"
    ),
    "contexts-paper": Figure(
        f"{CONTEXTS} --methods paper paper_no_reconstruction paper_no_tuning -- {DOCUMENTS} "
        "train.steps=400"
    ),
    "sim-gpus": Figure(
        "valora_serve.workloads.cli --workload retrieval --rates 60 --per-replica "
        "--replicas 1 2 4 --duration 60 --policies cost"
    ),
    "sim-policies": Figure(
        "valora_serve.workloads.cli --workload poisson --rates 10 32 48 --skews 0.2 0.6 0.9 "
        "--duration 6 --policies cost valora unmerge_only dlora merge_only"
    ),
    "sim-systems": Figure(
        "valora_serve.workloads.cli --systems dlora punica slora valora ours --workload retrieval "
        "--rates 4 10 20 --skews 0.2 0.9 --duration 30"
    ),
    "sim-shares": Figure(
        "valora_serve.workloads.cli --rates 60 --adapters 4 --skews .7 --duration 120 "
        "--max-requests 64 --policies cost --shares"
    ),
    "sim-slora": Figure(f"{SERVE}.sim_slora"),
    "sim-azure": Figure(
        "valora_serve.workloads.cli --trace .valora/AzureLLMInferenceTrace_conv.csv --rates 3 5 "
        "--adapters 100 --slots 32 --policies cost slora"
    ),
    "sim-routers": Figure(
        f"{SERVE}.dlora_migration --replicas 4 --router affinity random least dlora --workload "
        "slora --adapters 200 --slots 32 --rates 40 60 80 --duration 60"
    ),
}


def tables(printed):
    """The tables of a text, of Markdown or drawn by rich: title, head and rows of cells."""
    found, title, open_ = [], "", False
    for line in printed.splitlines():
        cells = [one.strip() for one in re.split("[|│┃]", line.strip())[1:-1]]
        if not cells:
            if not set(line.strip()) <= set("━─┏┓┡┩├┤┼╇╈┳┻└┘┴┌┐┬╞╡╪═"):
                title = line.strip(" #")
            elif line.strip():
                continue  # a rule between rows
            open_ = False
        elif set("".join(cells)) <= {"-", ":"}:  # below the head
            continue
        elif not open_ or "┃" in line:
            found.append({"title": title, "head": cells, "rows": []})
            open_ = True
        else:
            found[-1]["rows"].append(cells)
    return found


def shown(figure, number, columns, first=None):
    """A table of a figure in Markdown, with its caption; all rows, or those that begin so."""
    table = figure["tables"][number]
    head = [one.strip() for one in columns.split(";")] if columns else table["head"]
    places = [table["head"].index(name) for name in head]
    chosen = [row for row in table["rows"] if first in (None, row[0])]
    rows = [head, ["---"] * len(head), *([row[at] for at in places] for row in chosen)]
    lines = [f"| {' | '.join(map(_plain, row))} |" for row in rows]
    caption = f"{figure['machine']}, {figure['date']}, commit {figure['commit']}"
    return "\n".join([*lines, "", f"{caption}, `make bench ARGS={figure['name']}`."])


def waits(name, number):
    """Whether a table has not been measured yet."""
    return not (FOLDER / f"{name}.json").is_file() or number >= len(_figure(name)["tables"])


def _figure(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _plain(cell):
    """A cell with 4.43e+04 as 44,300."""
    return re.sub(r"\d(\.\d+)?e\+\d+", lambda one: f"{float(one[0]):,.0f}", cell)


def written(text):
    """A page with its tables written anew from the figures' files."""

    def block(found):
        name, number, first, columns = found.groups()
        if waits(name, int(number)):
            return found[0]
        body = shown(_figure(name), int(number), columns, first)
        return f"{found[0].partition('-->')[0]}-->\n{body}\n<!-- end -->"

    return BLOCK.sub(block, text)


def machine(gpus):
    """What this machine is, in words, for a figure that needs GPUs or none."""
    import torch

    if count := gpus and torch.cuda.device_count():
        name = torch.cuda.get_device_name()
        return f"{count} × {name}" if count > 1 else name
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def keep(name, printed, **facts):
    """Write the file of a figure, from what its command has printed."""
    known = {one: version(one) for one in PACKAGES if _is_installed(one)}
    figure = {
        "name": name, "command": f"python -m {FIGURES[name].command}", **facts,
        "versions": {"python": platform.python_version()} | known, "tables": tables(printed),
    }  # fmt: skip
    text = json.dumps(figure, indent=1, ensure_ascii=False) + "\n"
    text = re.sub(r"\[\s+(\"[^\[\]{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", text)
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def _is_installed(package):
    try:
        return bool(version(package))
    except ModuleNotFoundError:
        return False


def run(names):
    """Measure figures; the number of those that failed."""
    import torch

    gpus, failed = torch.cuda.device_count(), 0
    told = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    for name in names or [name for name, figure in FIGURES.items() if figure.gpus <= gpus]:
        print(f"== {name}: python -m {FIGURES[name].command}", flush=True)
        made = subprocess.Popen(
            [sys.executable, "-m", *FIGURES[name].command.split()], cwd=ROOT,
            env=os.environ | {"COLUMNS": "400"}, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        printed = ""
        for line in made.stdout:
            print(line, end="", flush=True)
            printed += line
        if made.wait() or not (found := tables(printed)) or not all(one["rows"] for one in found):
            print(f"== {name} failed, or has printed no table", flush=True)
            failed += 1
        else:
            where = machine(FIGURES[name].gpus)
            keep(name, printed, commit=commit, date=time.strftime("%Y-%m-%d"), machine=where)
    return failed


def main(given=None):
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["run", "write"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}")
    found = parser.parse_args(given)
    if unknown := set(found.names) - {*FIGURES}:
        parser.error(f"there is no figure {sorted(unknown)[0]}: name one of {', '.join(FIGURES)}")
    failed = run(found.names) if found.action == "run" else 0
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        text = page.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
