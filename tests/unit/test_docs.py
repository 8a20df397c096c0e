"""README and docs: links lead somewhere, commands exist, code parses, named files are there."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from valora_serve import cli as serve
from valora_train.cli import config_folder
from valora_train.settings import from_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:tests|docs|conf|valora_\w+|data|kernels|teachers)/[\w./-]+)`")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [text for kind, text in found if kind == language]


def commands(page: Path) -> list[list[str]]:
    """Words of every shell command, comments and continuation lines resolved."""
    found = []
    for block in blocks(page, "bash"):
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


@pages
def test_links_lead_somewhere(page):
    for groups in LINK.findall(prose(page)):
        target = groups[0] or groups[1]
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file), re.MULTILINE)
            assert anchor in map(slug, headings), f"{page.name}: {target}"


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
            elif words[0].endswith("valora-train") and "-m" not in words:
                yield words[1:]


@pytest.mark.parametrize("given", list(overrides()), ids=" ".join)
def test_settings_of_the_factory_compose(given):
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        from_config(compose("config", overrides=given))


def served():
    for page in PAGES:
        for words in commands(page):
            if words[0] == "valora-serve" and words[1] not in ("key", "bench"):
                yield words[1:]


@pytest.mark.parametrize("given", list(served()), ids=" ".join)
def test_options_of_the_server_are_read(given):
    bundles, *_ = serve.read(given)
    assert bundles


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
