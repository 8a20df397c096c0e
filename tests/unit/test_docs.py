"""README and docs: links lead somewhere, commands exist, code parses, named files are there."""

import argparse
import ast
import importlib
import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.bench import figures
from tests.support.configs import configured
from valora_serve import cli as serve
from valora_serve.commands import COMMANDS
from valora_serve.engine.settings import EngineSettings
from valora_serve.options import REMOVED, helps
from valora_serve.replicas.settings import ReplicaSettings
from valora_serve.server.settings import ServerSettings
from valora_train.removed import SUCCESSORS, removed
from valora_train.settings import from_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
WORDS = 22_700  # of all pages but the changelog; 25,000 at most, whatever is added
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:tests|docs|conf|valora_\w+|data|kernels|teachers)/[\w./-]+)`")
TABLE = re.compile(r"^(?:\|.*\n?){3,}", re.MULTILINE)
BY_HAND = {
    ("benchmarks.md", "case (H200)"),  # other servers' runs
    ("benchmarks.md", "case (H100)"),
    ("papers.md", "figure"),  # the papers' numbers, and ours in a word
    ("papers.md", ""),
}
"""Tables of figures that are typed: page and first column. Only fewer, please."""

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: "-".join(page.parts[-2:]))


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Words of every shell command, comments and continuation lines resolved."""
    found = []
    for block in [*blocks(page, "bash"), *blocks(page, "text")]:
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a quotation over several lines, such as a request's JSON
                continue
            if words:
                found.append(words)
    return found


def slug(heading: str) -> str:
    """Anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def linked(page: Path) -> list[str]:
    """What a page links to or shows in this repository."""
    targets = (link or picture for link, picture in LINK.findall(prose(page)))
    return [target for target in targets if not target.startswith(("http://", "https://"))]


@pages
def test_links_lead_somewhere(page):
    for target in linked(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {target}"


def test_every_page_is_two_clicks_from_the_readme():
    found = {ROOT / "README.md"}
    for _ in range(2):
        found |= {
            (page.parent / target.partition("#")[0]).resolve()
            for page in found
            if page.suffix == ".md"
            for target in linked(page)
        }
    assert set(PAGES) <= found


def test_pages_are_short_enough_to_be_read():
    """Words by hand: those with a letter, outside of code and of tables that are generated."""
    counted = {
        page: sum(
            bool(re.search(r"[^\W\d_]", word))
            for word in figures.BLOCK.sub("", prose(page)).split()
        )
        for page in PAGES
        if page.name != "changelog.md"
    }
    assert sum(counted.values()) <= WORDS, sorted(counted.items(), key=lambda item: -item[1])[:5]


def test_the_page_on_migrating_lists_what_the_code_refuses():
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    factory, server = (
        [row.split("|")[1] for row in sections[f"Settings of the {side} that went"].splitlines()
         if row.startswith("| `")]
        for side in ("factory", "server")
    )  # fmt: skip
    matched = set()
    for cell in factory:
        for given in re.findall(r"`([^`]*=[^`]*)`", cell):
            assert removed(*given.split()), given
            line = " ".join(sorted(given.split()))
            matched |= {
                pattern
                for pattern in SUCCESSORS
                if re.search(rf"(?:^|\s)[+~]*({pattern})(?:[\s=]|$)", line)
            }
    assert matched == set(SUCCESSORS)
    listed = " ".join(server)
    assert [name for name in REMOVED if name not in listed] == []


@pages
def test_named_files_exist(page):
    for name in NAMED.findall(prose(page)):
        roots = (ROOT, ROOT / "data", ROOT / "kernels", ROOT / "teachers")
        assert any((root / name).exists() for root in roots), f"{page.name}: {name}"


@pages
def test_python_parses(page):
    for block in blocks(page, "python"):
        ast.parse(block)


@pages
def test_names_that_python_imports_exist(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for name in node.names:
                    assert hasattr(module, name.name), f"{page.name}: {node.module}.{name.name}"
            elif isinstance(node, ast.Import):
                for name in node.names:
                    assert importlib.util.find_spec(name.name), f"{page.name}: {name.name}"


@pages
def test_other_blocks_parse(page):
    for block in blocks(page, "bash"):
        done = subprocess.run(
            ["bash", "-n"], input=block, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{page.name}: {done.stderr}"
    for block in blocks(page, "json"):
        json.loads(block)
    for block in blocks(page, "yaml"):
        yaml.safe_load(block)


def extras():
    for page in PAGES:
        for names in re.findall(r"valora\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            yield from names.split(",")


def test_extras_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras()) <= set(project["optional-dependencies"])


@pages
def test_make_targets_exist(page):
    targets = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    named = {w[1] for w in commands(page) if w[0] == "make" and len(w) > 1}
    named |= set(re.findall(r"`make ([a-z-]+)", prose(page)))
    assert named <= known, f"{page.name}: {named - known}"


def overrides():
    for page in PAGES:
        for words in commands(page):
            given = dict(word.split("=", 1) for word in words if re.match(r"^(TASK|ARGS)=", word))
            if words[:2] == ["make", "fuse"]:
                task = [f"task={given['TASK']}"] if "TASK" in given else []
                yield [*task, *shlex.split(given.get("ARGS", ""))]
            elif words[0] == "valora-train" or words[:2] == ["valora", "fuse"]:
                rest = words[1 if words[0] == "valora-train" else 2 :]
                if not {"-m", "--config-dir", "shelf=runs/"} & set(rest):  # the reader's folders
                    yield rest


@pytest.mark.parametrize("given", list(overrides()), ids=" ".join)
def test_settings_of_the_factory_compose(given):
    from_config(configured(*given))


def served():
    for page in PAGES:
        for words in commands(page):
            if words[0] == "valora-serve" and words[1] != "key":
                yield words[1:]


@pytest.mark.parametrize("given", list(served()), ids=" ".join)
def test_options_of_the_server_are_read(given):
    bundles, *_ = serve.read(given)
    assert bundles or "--check" in given


@pages
def test_options_that_a_text_names_exist(page):
    if page.name in ("migrating.md", "changelog.md"):
        return
    folders = ("valora_serve", "valora_train", "data", "kernels", "tests/bench", "tests/fuzz")
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    source = "\n".join(file.read_text("utf-8") for file in files)
    known = {"--hypothesis-seed", "--build-arg", "--help"}  # other programs', and every one's
    for settings in (ServerSettings, EngineSettings, ReplicaSettings):
        known |= {"--" + name.replace("_", "-") for name in helps(settings)}
    for option in re.findall(r"`(--[a-z][a-z-]+)", prose(page)):
        name = re.sub(r"^--no-", "--", option)
        assert {option, name} & known or f'"{option}"' in source, f"{page.name}: {option}"


class Parsed(BaseException):
    """The arguments of a command have been read."""


def arguments():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    scripts = project["scripts"] | {
        f"valora {name}": f"{entry.module}:{entry.attr}"
        for name, entry in COMMANDS._entries().items()
    }
    for page in PAGES:
        for words in commands(page):
            first, *given = (word for word in words if word != "&")
            name = Path(first).name
            if name == "valora":
                name, given = f"valora {given[0]}", given[1:]
            if not name.startswith("valora") or name in ("valora-train", "valora fuse"):
                continue  # those of the factory are Hydra's
            yield pytest.param(name, given, scripts[name], id=" ".join([name, *given]))


@pytest.mark.parametrize(("name", "given", "place"), list(arguments()))
def test_arguments_of_commands_are_read(name, given, place, monkeypatch):
    def parse(parser, *args):
        read(parser, *args)
        raise Parsed

    read = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [name, *given])
    module, _, function = place.partition(":")
    with pytest.raises(Parsed):
        getattr(importlib.import_module(module), function)()


def test_modules_and_scripts_that_python_runs_exist():
    for page in PAGES:
        for words in commands(page):
            if not Path(words[0]).name.startswith("python"):
                continue
            if words[1] == "-m":
                assert importlib.util.find_spec(words[2]), f"{page.name}: {words[2]}"
            else:
                assert (ROOT / words[1]).is_file(), f"{page.name}: {words[1]}"


def test_every_extension_point_is_explained():
    groups = set()
    for file in ROOT.rglob("*.py"):
        if not {".venv", "tests"} & set(file.relative_to(ROOT).parts):
            source = file.read_text(encoding="utf-8")
            if "Registry(" in source:
                groups |= set(re.findall(r'"(valora\.[a-z_]+)"', source))
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    sections = text.split("\n### ")
    for group in groups:
        assert any(group in section for section in sections), group
    for section in sections[1:]:
        lines = [line for line in section.splitlines()[1:] if line.strip()]
        assert len(lines) <= 15, section.splitlines()[0]


@pages
def test_tables_of_figures_are_those_of_their_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.written(text) == text, "run: python -m tests.bench.figures write"


def test_every_figure_has_a_file_that_says_what_measured_it() -> None:
    cited = {
        (one[1], int(one[2]))
        for page in PAGES
        for one in figures.BLOCK.finditer(page.read_text("utf-8"))
    }
    assert not [one for one in cited if figures.waits(*one)]
    files = {file.stem: json.loads(file.read_text("utf-8")) for file in figures.FOLDER.iterdir()}
    for name, figure in files.items():
        assert figure["command"] == f"python -m {figures.FIGURES[name].command}"
        assert all(figure[fact] for fact in ("commit", "date", "machine", "versions"))
        assert "dirty" not in figure["commit"]


def test_tables_of_what_was_measured_are_those_of_files() -> None:
    """A table with at least two cells that begin with a decimal number shows figures."""
    found = set()
    for page in PAGES:
        if page.name == "changelog.md":
            continue
        for table in TABLE.findall(figures.BLOCK.sub("", prose(page))):
            head, _, *rows = table.splitlines()
            cells = (cell.strip(" *") for row in rows for cell in row.split("|"))
            if sum(bool(re.match(r"[−-]?\d[\d,]*\.\d", cell)) for cell in cells) > 1:
                found.add((page.name, head.split("|")[1].strip()))
    assert found == BY_HAND
