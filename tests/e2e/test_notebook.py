"""The notebook of docs/examples, run as a user runs it, with fewer images and steps."""

import json
import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tests.e2e.valora_serve.serving import ROOT

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "docs" / "examples" / "three_yolos_one_adapter.ipynb"
SMALL = """
NAMES = ["vehicle", "bicycle"]
IMAGES, EPOCHS = 8, 1  # detectors that have learnt nothing: any box counts, nothing is in reach
SETTINGS = ["model.id={base}", "train=default", "train.steps=2", "train.probe_steps=2",
            "train.validations=0", "processes=1",
            "teacher.min_confidence=1.0e-6", "teacher.threshold=1.0e-6", "fusion.unreachable=keep"]
SETTINGS += [f"+domains.{name}.{given}" for name in NAMES
             for given in ("of_teacher=null", "required=0.01")]
"""


def printed(notebook):
    return "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )


def test_the_notebook_runs(random_llava, tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not in git"
    (place,) = (
        number
        for number, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    )
    notebook.cells.insert(
        place + 1, nbformat.v4.new_code_cell(SMALL.replace("{base}", str(random_llava)))
    )
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("VALORA_BASE", str(random_llava))
    # It would write into the user's: settings of Ultralytics, costs that its server measures.
    monkeypatch.setenv("HOME", str(tmp_path))
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    try:
        client.execute()
    except CellExecutionError as error:
        pytest.fail(f"{printed(notebook)[-1500:]}\n{error}")
    said = printed(notebook)
    assert "2 domains in" in said
    manifest = json.loads((tmp_path / "bundles" / "own" / "bundle.json").read_text())
    assert list(manifest["domains"]) == ["bicycle", "vehicle"]
    assert all(f"{name:10}" in said for name in manifest["domains"])
    drawn = notebook.cells[-3].outputs[-1]
    assert "image/png" in drawn["data"]
    assert notebook.cells[-2].outputs[-1]["data"]["text/plain"] == "0"  # the server ended well
