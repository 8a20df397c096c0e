"""Who may import whom (design.md): a serving box has no Hydra, MLflow or Ultralytics."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "valora_data": "data/valora_data",
    "valora_teachers": "teachers/valora_teachers",
    "valora_train": "valora_train",
    "valora_kernels": "kernels/valora_kernels",
    "valora_serve": "valora_serve",
}
OURS = {
    "valora_data": set(),
    "valora_kernels": set(),
    "valora_teachers": {"valora_data"},
    "valora_train": {"valora_data", "valora_teachers"},
    "valora_serve": {"valora_data", "valora_kernels"},
}
NOT_WHEN_SERVING = {"hydra", "omegaconf", "mlflow", "ultralytics"}
KERNELS_MAY = {"torch", "triton", "numpy", "rich", *sys.stdlib_module_names}


def imports(package):
    for file in sorted((ROOT / FOLDERS[package]).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: relative import"
                names = [node.module]
            else:
                continue
            for name in names:
                yield file.relative_to(ROOT), name.split(".")[0]


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_packages_import_only_what_they_may(package):
    for file, name in imports(package):
        if name in FOLDERS:
            assert name == package or name in OURS[package], f"{file} imports {name}"
        if package in ("valora_serve", "valora_data", "valora_kernels"):
            assert name not in NOT_WHEN_SERVING, f"{file} imports {name}"
        if package == "valora_kernels" and name != package:
            assert name in KERNELS_MAY, f"{file} imports {name}"


def test_source_roots_are_no_packages():
    for folder in ("kernels", "data", "teachers"):
        assert not (ROOT / folder / "__init__.py").exists()
