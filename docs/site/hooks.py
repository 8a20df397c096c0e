"""What mkdocs does not do by itself: the README is the first page, and notebooks are pages.

Lines `<!-- help: valora sim -->` and `<!-- file: conf/config.yaml -->` become a command's help and
a file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).parents[1]


def on_files(files, config):
    """Add the README as the first page, and a page for each notebook."""
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    for notebook in sorted(DOCS.glob("examples/*.ipynb")):
        place = notebook.relative_to(DOCS).with_suffix(".md").as_posix()
        files.append(File.generated(config, place, content=page_of(notebook)))
    return files


def on_page_markdown(markdown, **_):
    """Fill in helps and files, and lead links to the README and to notebooks to their pages."""
    markdown = re.sub(r"^<!-- (help|file): (.+) -->$", filled, markdown, flags=re.MULTILINE)
    markdown = markdown.replace("](../README.md)", "](index.md)")
    return re.sub(r"(\]\((?:\.\./)?examples/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def filled(found: re.Match[str]) -> str:
    """What a line stands for, under a heading of its own."""
    kind, name = found.groups()
    if kind == "file":
        text = (DOCS.parent / name).read_text(encoding="utf-8")
        return f"### `{name}`\n```yaml\n{text}```\n"
    commands = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    text = subprocess.run(
        [*name.split(), "--help"], capture_output=True, text=True, check=True, timeout=100,
        env=os.environ | {"COLUMNS": "100", "PATH": commands},
    ).stdout  # fmt: skip
    return f"## `{name}`\n```text\n{text}```\n"


def page_of(notebook: Path) -> str:
    """The cells of a notebook as markdown; outputs are not in the repository."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts
    )
