"""Our engine beside others on one GPU, in one run, on the same checkpoint, adapters and requests.

`python -m tests.bench.valora_serve.bench_peers` writes a base model of LLaVA-1.5-7B's shape with
random weights and adapters in PEFT's format, then measures each case with each peer and prints one
table. Every engine has a process of its own, and answers all cases of the same adapters. A peer is
installed with pip beside this torch's version, or taken from a folder of packages (`--peer
vllm=FOLDER`); where it cannot be installed, imported or run, its row says why. Peers try all
settings that `peers/` has for them, and the fastest is reported. `--device cpu --layers 2 --width
256 --requests 4` tries the program where there is no GPU.

The cases `language` and `attention` have S-LoRA's lengths (its Table 3: uniform in [8, 512] both
ways), all requests at once and adapters of rank 64; `pictures` a new picture of 640 × 480 in each
request; `decode` is (T128 − T1)/127 for prompts of 32 tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tests.bench.valora_serve.peers.base import Answer, Ask, Job
from tests.bench.valora_serve.peers.registry import PEERS, find

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[3]
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LANGUAGE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
DISTINCT = 16
"""Adapters with matrices of their own; further ones have other scalings."""
CANNOT_IMPORT = ("ModuleNotFoundError", "ImportError")
"""How the reason begins why a peer's package is of no use here."""
HEAD = 128
"""Width of a head; the widths of models are multiples of it."""
NEWEST = datetime.timedelta(days=7)
"""How long a release that was installed counts as the newest."""
CLOSING = 10.0
"""Seconds that a peer may take to end after it has answered."""
STEPS = (1, 128)
"""Answers whose difference in time is that of decode steps."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured.

    Attributes:
        title: First column of the table.
        adapters: Number of adapters, uniformly popular.
        modules: Linears that they change.
        pictures: Whether each request has a picture.
        batches: Batch sizes of decode steps; none to measure throughput.
    """

    title: str
    adapters: int = 0
    modules: tuple[str, ...] = ATTENTION
    pictures: bool = False
    batches: tuple[int, ...] = ()

    def adapter_of(self, number: int, seed: int = 1) -> str | None:
        """Name of the adapter that a request asks for."""
        if not self.adapters:
            return None
        if self.batches:
            return f"adapter-{number % self.adapters}"
        return f"adapter-{np.random.default_rng((seed, number)).integers(self.adapters)}"

    def rounds(self, count: int, words: int) -> dict[str, list[Ask]]:
        """The requests that are measured.

        Args:
            count: Requests of a throughput case.
            words: Token ids are below this.
        """
        if self.batches:
            return {
                f"{batch}/{tokens}": [
                    Ask(tokens_of(i, 32, words), tokens, self.adapter_of(i)) for i in range(batch)
                ]
                for batch in self.batches
                for tokens in STEPS
            }
        g = np.random.default_rng(0)
        if self.pictures:
            texts, outputs = g.integers(8, 129, count), g.integers(8, 257, count)
            asks = [
                Ask(f"<image>{text_of(i, int(texts[i]))}", int(outputs[i]), self.adapter_of(i), i)
                for i in range(count)
            ]
        else:
            inputs, outputs = g.integers(8, 513, count), g.integers(8, 513, count)
            asks = [
                Ask(tokens_of(i, int(inputs[i]), words), int(outputs[i]), self.adapter_of(i))
                for i in range(count)
            ]
        return {"all": asks}


CASES = {
    "base": Case("no LoRA"),
    "attention-5": Case("5 on q, k, v, o", 5),
    "attention-100": Case("100 on q, k, v, o", 100),
    "language-5": Case("5 on all linears", 5, LANGUAGE),
    "language-100": Case("100 on all linears", 100, LANGUAGE),
    "pictures": Case("pictures, no LoRA", pictures=True),
    "pictures-16": Case("pictures, 16 on q, k, v, o", 16, pictures=True),
    "decode": Case("decode, no LoRA", batches=(1, 8, 32, 64)),
    "decode-16": Case("decode, 16 on q, k, v, o", 16, batches=(8, 32, 64)),
}


def tokens_of(seed: int, count: int, words: int) -> list[int]:
    """Random token ids, none of which is special."""
    return np.random.default_rng(seed).integers(10, words, count).tolist()


def text_of(seed: int, words: int) -> str:
    """Random words."""
    letters = np.random.default_rng(seed).integers(97, 123, (words, 4)).astype(np.uint8)
    return "".join(" " + bytes(word).decode() for word in letters)


# ---------------------------------------------------------------------- base model and adapters


class Checkpoints:
    """Base models and adapters in a folder, written when they are first asked for."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given = given
        self.folder = folder

    def base(self, text_only: bool) -> Path:
        """Folder of the base model, or of its language model alone."""
        from tests.bench.valora_serve.split_models import save_base, save_language

        place = self.folder / "base"
        if not place.exists():
            given = self.given
            save_base(place, given.device, given.layers, given.width, vision=True)
            release(given.device)
        if not text_only:
            return place
        text = self.folder / "language"
        if not text.exists():
            save_language(place, text)
        return text

    def adapters(self, case: Case) -> dict[str, str]:
        """Folders of the case's adapters, by name."""
        from tests.bench.valora_serve.split_models import save_adapters

        if not case.adapters:
            return {}
        given = self.given
        place = self.folder / f"adapters-{len(case.modules)}"
        if not place.exists():
            ranks = [given.rank] * DISTINCT
            save_adapters(place, given.layers, given.width, ranks, case.modules)
        for number in range(DISTINCT, case.adapters):
            copy_adapter(place, number)
        return {f"adapter-{i}": str(place / f"adapter-{i}") for i in range(case.adapters)}


def release(device: str) -> None:
    """Give the memory of what was made on a device back: the engines are in other processes."""
    import gc

    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def copy_adapter(folder: Path, number: int) -> None:
    """Write an adapter with the matrices of another, as a link, and a scaling of its own."""
    source, target = folder / f"adapter-{number % DISTINCT}", folder / f"adapter-{number}"
    if target.exists():
        return
    target.mkdir()
    weights = "adapter_model.safetensors"
    os.link(source / weights, target / weights)
    config = json.loads((source / "adapter_config.json").read_text())
    config["lora_alpha"] = config["r"] * (1 + number / 1000)
    (target / "adapter_config.json").write_text(json.dumps(config))


# ---------------------------------------------------------------------- peers in their processes


def install(name: str, folder: Path, seconds: float) -> str | None:
    """Install a peer and all that it needs into a folder, beside this torch's version.

    Returns:
        Why that was not possible, in one line; None if it was.
    """
    kind = find(name)
    torch = importlib.metadata.version("torch").partition("+")[0]
    marker, today = folder / "installed", datetime.date.today()
    wanted = [f"{kind.requirement} beside torch {torch}", *kind.pins]
    with contextlib.suppress(OSError, ValueError):
        *made, day = marker.read_text().splitlines()
        age = today - datetime.date.fromisoformat(day)
        if made == wanted and age <= NEWEST:
            print(f"[{name} was installed on {day}; delete {folder} to install the newest]")
            return None
    shutil.rmtree(folder, ignore_errors=True)  # of another torch, or not installed to its end
    folder.mkdir(parents=True)
    pins = folder / "constraints.txt"
    pins.write_text("\n".join((f"torch=={torch}", *kind.pins)) + "\n")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--only-binary=:all:", "--retries", "1", "--timeout", "15", "--target", str(folder),
        "--constraint", str(pins), str(kind.requirement),
    ]  # fmt: skip
    print(f"[installing {kind.requirement} beside torch {torch} into {folder}]", flush=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"not installed: pip took more than {seconds:.0f} s"
    if done.returncode:
        return f"not installed: {reason_of(done.stderr, str(kind.requirement), torch)}"
    marker.write_text("\n".join((*wanted, today.isoformat())) + "\n")
    return None


def reason_of(errors: str, requirement: str, torch: str) -> str:
    """Why pip installed nothing, in one line."""
    if "conflicting dependencies" in errors:
        return f"no release of {requirement} goes with torch {torch}"
    if "Failed to establish a new connection" in errors or "Name or service" in errors:
        return "pip reaches no package registry"
    said = [line.removeprefix("ERROR: ") for line in errors.splitlines() if line[:6] == "ERROR:"]
    return (said or errors.splitlines() or ["pip says nothing"])[-1]


def programs_of(packages: Path | None) -> str:
    """PATH with the programs of a folder of packages, and of this Python, such as ninja."""
    own = [str(packages / "bin")] if packages else []
    return os.pathsep.join([*own, os.environ.get("PATH", ""), sysconfig.get_path("scripts")])


def run(job: Job, packages: Path | None, log: Path, seconds: float) -> Answer:
    """Measure a job in a process of its own, with a folder of packages before all others."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job.as_json()))
        path = [str(packages)] if packages else []
        path += [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        command = [
            sys.executable, "-m", "tests.bench.valora_serve.peers.worker",
            str(folder / "job.json"), str(folder / "answer.json"),
        ]  # fmt: skip
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env=os.environ | {
                    "PYTHONPATH": os.pathsep.join(filter(None, path)),
                    "PATH": programs_of(packages),
                },
            )  # fmt: skip
            end = time.monotonic() + seconds
            place = folder / "answer.json"
            try:
                while process.poll() is None and not place.exists() and time.monotonic() < end:
                    time.sleep(0.1)
                if place.exists():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(CLOSING)
                code = process.poll()
            finally:
                # Also ends what the peer has left: engines that run in processes of their own.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if place.exists():
            return Answer(**json.loads(place.read_text()))
        ended = f"took more than {seconds:.0f} s" if code is None else f"ended with status {code}"
        return Answer(f"{ended}; see {log}", flags=job.options)


# ---------------------------------------------------------------------- the table


def figures(case: Case, asks: Mapping[str, list[Ask]], answer: Answer) -> dict[str, float]:
    """What the seconds of an answer say of a case: the unit of each row, and its figure.

    Args:
        case: The case.
        asks: Its rounds.
        answer: The seconds of each round, by its label in the job.
    """
    middle = {label: statistics.median(answer.seconds[f"{case.title}/{label}"]) for label in asks}
    if case.batches:
        short, long = STEPS
        return {
            f"ms a step, batch {batch}": 1e3
            * (middle[f"{batch}/{long}"] - middle[f"{batch}/{short}"])
            / (long - short)
            for batch in case.batches
        }
    seconds, tokens = middle["all"], sum(ask.tokens for ask in asks["all"])
    return {"requests/s": len(asks["all"]) / seconds, "output tokens/s": tokens / seconds}


@dataclass(frozen=True, slots=True)
class Row:
    """A case of a peer: the figures of its fastest settings, or why there are none."""

    case: Case
    peer: str
    answer: Answer
    found: dict[str, float]


def fastest(rows: list[Row]) -> Row:
    """The best of a peer's settings; the first one if none could be measured."""
    measured = [row for row in rows if not row.answer.error]

    def speed(row: Row) -> float:
        key, value = next(iter(row.found.items()))
        return -value if key.startswith("ms") else value

    return max(measured, key=speed) if measured else rows[0]


def table(rows: list[Row]) -> list[str]:
    """Markdown: a line for each figure, or one that says why there is none."""
    lines = [
        "| case | peer | version | unit | median | ours / theirs in speed | ready, s | settings |",
        "|---" * 8 + "|",
    ]
    ours = {(row.case, unit): v for row in rows if row.peer == "valora"
            for unit, v in row.found.items()}  # fmt: skip
    for row in rows:
        answer = row.answer
        settings = ", ".join(f"{key}={value}" for key, value in sorted(answer.flags.items()))
        version = "–" if answer.version is None else f"{answer.version}, torch {answer.torch}"
        start = [row.case.title, find(row.peer).title, version]
        if answer.error:
            cells = [*start, "–", cell(answer.error), "–", "–", cell(settings)]
            lines.append("| " + " | ".join(cells) + " |")
        for unit, value in row.found.items():
            mine = ours.get((row.case, unit))
            ratio = mine and (value / mine if unit.startswith("ms") else mine / value)
            cells = [*start, unit, f"{value:.4g}", f"{ratio:.2f}" if ratio else "–",
                     f"{answer.ready or 0:.0f}", cell(settings)]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
            settings = "the same"
    return lines


def cell(text: str) -> str:
    """A text that does not end a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


# ---------------------------------------------------------------------- the program


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    made.add_argument("--peer", action="append", default=[], metavar="NAME[=FOLDER]",
                      help=f"of {', '.join(PEERS)}, with its packages; all by default")  # fmt: skip
    made.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    made.add_argument("--layers", type=int, default=32)
    made.add_argument("--width", type=int, default=4096)
    made.add_argument("--rank", type=int, default=64)
    made.add_argument("--requests", type=int, default=400, help="of a throughput case")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--variants", type=int, help="most settings of a peer that are tried")
    made.add_argument("--limit", type=float, default=900, help="seconds for an engine")
    made.add_argument("--install-limit", type=float, default=1800, help="seconds for pip")
    made.add_argument("--packages", type=Path, default=ROOT / ".valora" / "peers",
                      help="where peers are installed")  # fmt: skip
    made.add_argument("--keep", type=Path, help="folder to keep base model and adapters in")
    made.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench-peers")
    return made


def check(given: argparse.Namespace) -> None:
    """End with a sentence if nothing can be measured so, before anything is installed."""
    unknown = [name for name in given.cases if name not in CASES]
    if unknown:
        sys.exit(f"expected cases of {', '.join(CASES)}, got {unknown[0]}")
    for name in ("layers", "width", "rank", "requests", "repeats", "variants"):
        value = getattr(given, name)
        if value is not None and value < 1:
            sys.exit(f"--{name} {value}: expected 1 or more")
    if given.width % HEAD:
        sys.exit(f"--width {given.width}: expected a multiple of {HEAD}, the width of a head")
    if given.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("no GPU: see `valora-serve --check`, or --device cpu")


def chosen_peers(given: argparse.Namespace) -> dict[str, Path | None]:
    """Peers and their folders of packages, ours first."""
    named: dict[str, Path | None] = {}
    for text in given.peer or PEERS:
        name, _, folder = text.partition("=")
        if name not in PEERS:
            sys.exit(f"--peer: expected one of {', '.join(PEERS)}, got {name}")
        if folder and not Path(folder).is_dir():
            sys.exit(f"--peer {name}: {folder} is no folder of packages")
        named[name] = Path(folder).resolve() if folder else None
    return {"valora": None} | named


def main() -> None:
    """Measure the cases, and write the table and all times."""
    given = parser().parse_args()
    # As Ctrl-C, which ends the peer, too: it would go on, with most of the GPU's memory.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    peers = chosen_peers(given)
    check(given)
    cases = [CASES[name] for name in given.cases or CASES]
    missing: dict[str, str] = {}
    for name, folder in peers.items():
        if folder is None and find(name).requirement:
            place = given.packages / name
            reason = install(name, place, given.install_limit)
            if reason:
                missing[name] = reason
            peers[name] = place.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        checkpoints = Checkpoints(given, given.keep or Path(temporary))
        rows = []
        for group, (name, folder) in product(grouped(cases), peers.items()):
            found = measure(given, checkpoints, group, name, folder, missing.get(name))
            rows += found
            if (found[0].answer.error or "").startswith(CANNOT_IMPORT):
                missing[name] = str(found[0].answer.error)  # nor can the next case
    rows.sort(key=lambda row: cases.index(row.case))
    lines = ["", f"GPU {gpu_name()}." if given.device == "cuda" else "CPU.", "", *table(rows)]
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "bench_peers.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def grouped(cases: list[Case]) -> list[list[Case]]:
    """Cases with the same adapters together, in the order of the first of each group."""
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.adapters, case.modules), []).append(case)
    return list(groups.values())


def measure(
    given: argparse.Namespace, checkpoints: Checkpoints, cases: list[Case], name: str,
    folder: Path | None, missing: str | None,
) -> list[Row]:  # fmt: skip
    """Measure cases of the same adapters with all settings of a peer; the best row of each."""
    if missing:
        return [Row(case, name, Answer(missing), {}) for case in cases]
    kind = find(name)
    tried: dict[Case, list[Row]] = {case: [] for case in cases}
    for text_only in dict.fromkeys(kind.text_only and not case.pictures for case in cases):
        some = [case for case in cases if (kind.text_only and not case.pictures) is text_only]
        for row in _tried(given, checkpoints, some, name, folder, text_only):
            tried[row.case].append(row)
    return [fastest(rows) for rows in tried.values()]


def _tried(
    given: argparse.Namespace, checkpoints: Checkpoints, cases: list[Case], name: str,
    folder: Path | None, text_only: bool,
) -> Iterator[Row]:  # fmt: skip
    """A row of every case with every setting of a peer; one engine answers all the cases."""
    kind, first = find(name), cases[0]
    base, adapters = checkpoints.base(text_only), checkpoints.adapters(first)
    asks = {case: case.rounds(given.requests, words_of(base)) for case in cases}
    rounds = {f"{case.title}/{label}": one for case in cases for label, one in asks[case].items()}
    for number, options in enumerate(
        kind.variants(first.adapters, first.modules)[: given.variants]
    ):
        job = Job(
            name, str(base), adapters, given.rank, [*first.modules], options, rounds,
            device=given.device, repeats=given.repeats,
        )  # fmt: skip
        words = re.sub(r"[^a-z0-9]+", "-", first.title.lower())
        answer = run(job, folder, given.out / f"{name}-{words}-{number}.log", given.limit)
        for case in cases:
            row = Row(case, name, answer, {} if answer.error else figures(case, asks[case], answer))
            shown = answer.error or {unit: round(value, 2) for unit, value in row.found.items()}
            print(f"{case.title}, {kind.title}, {options}: {shown}", flush=True)
            with (given.out / "bench_peers.jsonl").open("a") as file:
                line = {"case": case.title, "peer": name, "options": options,
                        "error": answer.error, "version": answer.version, "flags": answer.flags,
                        "ready": answer.ready, "seconds": answer.seconds,
                        "figures": row.found, "counters": answer.counters}  # fmt: skip
                file.write(json.dumps(line, default=str) + "\n")
            yield row
        if (answer.error or "").startswith(CANNOT_IMPORT):
            break


def words_of(base: Path) -> int:
    """Token ids that prompts draw from: those that the tokenizer knows."""
    from tokenizers import Tokenizer

    return int(Tokenizer.from_file(str(base / "tokenizer.json")).get_vocab_size())


def gpu_name() -> str:
    """Name of the GPU that is measured."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


if __name__ == "__main__":
    main()
