"""What mkdocs does not do by itself: the README is the first page, and notebooks are pages."""

import json
import re
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
    """Lead links to notebooks to their pages."""
    return re.sub(r"(\]\(examples/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def page_of(notebook: Path) -> str:
    """The cells of a notebook as markdown; outputs are not in the repository."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts
    )
