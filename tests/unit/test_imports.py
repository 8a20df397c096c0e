"""Which module may import which, read from the source: every import statement counts.

Imports inside functions and under ``TYPE_CHECKING`` count, too: a circle that only they close
still means that neither file can be read without the other. So do the ``module:attribute`` strings
with which a registry names its built-in extensions.
"""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "valora_data": "data/valora_data",
    "valora_kernels": "kernels/valora_kernels",
    "valora_teachers": "teachers/valora_teachers",
    "valora_train": "valora_train",
    "valora_serve": "valora_serve",
}
PACKAGES = {
    "valora_data": set(),
    "valora_kernels": set(),
    "valora_teachers": {"valora_data"},
    "valora_train": {"valora_data", "valora_teachers"},
    "valora_serve": {"valora_data", "valora_kernels"},
}
NOT_WHEN_SERVING = {"hydra", "omegaconf", "mlflow", "ultralytics"}
KERNELS_MAY = {"torch", "triton", "numpy", "rich", *sys.stdlib_module_names}

# Parts of a package, the lowest first; a part imports parts below it only.
SERVE = ["errors", "pauses", "toolkit", "tokens", "types", "routing", "catalogue", "orchestrator",
         "parallel", "memory", "workloads", "model", "engine"]  # fmt: skip
TRAIN = ["errors", "removed", "processes", "sweeps", "settings", "stage", "metrics", "model",
         "tasks", "fusion", "checks", "reporting", "stages", "pipeline", "cli"]  # fmt: skip
SERVER_MAY = {"server", "tokens", "types", "errors", "options", "pauses"}


@cache
def modules() -> dict[str, Path]:
    """Path of every module by its name."""
    found = {}
    for folder in FOLDERS.values():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to((ROOT / folder).parent).with_suffix("").parts
            found[".".join(part for part in parts if part != "__init__")] = file
    return found


@cache
def imported(module: str) -> frozenset[str]:
    """Names that a module imports: modules, or attributes of modules."""
    names = set()
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module_name, colon, attribute = node.value.partition(":")
            if colon and attribute.isidentifier() and module_name in modules():
                names.add(module_name)
    return frozenset(names)


@cache
def ours(module: str) -> frozenset[str]:
    """Modules of this repository that a module imports."""
    found = set()
    for name in imported(module):
        target = name if name in modules() else name.rpartition(".")[0]
        if target in modules() and target != module:
            found.add(target)
    return frozenset(found)


def part(module: str) -> str:
    """``engine`` of ``valora_serve.engine.launch``."""
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_packages_import_only_what_they_may(package):
    for module in modules():
        if module.split(".")[0] != package:
            continue
        for name in {name.split(".")[0] for name in imported(module)}:
            if name in FOLDERS:
                assert name == package or name in PACKAGES[package], f"{module} imports {name}"
            if package in ("valora_serve", "valora_data", "valora_kernels"):
                assert name not in NOT_WHEN_SERVING, f"{module} imports {name}"
            if package == "valora_kernels" and name != package:
                assert name in KERNELS_MAY, f"{module} imports {name}"


def test_no_circles():
    graph = TopologicalSorter({module: ours(module) for module in modules()})
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail("circular imports: " + " → ".join(reversed(error.args[1])))


@pytest.mark.parametrize(("package", "order"), [("valora_serve", SERVE), ("valora_train", TRAIN)])
def test_parts_import_downwards_only(package, order):
    wrong = []
    for module in modules():
        if module.split(".")[0] != package or part(module) not in order:
            continue
        below = order[: order.index(part(module)) + 1]
        wrong += [
            f"{module} imports {name}"
            for name in ours(module)
            if name.split(".")[0] == package and part(name) not in below
        ]
    assert not wrong, "\n".join(wrong)


def test_the_server_knows_no_engine_and_no_model():
    for module in modules():
        if module.startswith("valora_serve.server"):
            parts = {part(name) for name in ours(module) if name.startswith("valora_serve")}
            assert parts <= SERVER_MAY, f"{module} imports {parts - SERVER_MAY}"


def test_decisions_need_no_torch():
    starts = (
        "valora_serve.engine.settings", "valora_serve.orchestrator", "valora_serve.routing",
        "valora_serve.memory.residency", "valora_serve.workloads", "valora_train.fusion.plan",
        "valora_train.fusion.strategies",
    )  # fmt: skip
    inside = [name for name in modules() if f"{name}.".startswith(tuple(f"{s}." for s in starts))]
    assert set(starts) <= set(inside)
    for module in inside:
        assert "torch" not in {n.split(".")[0] for n in imported(module)}, f"{module} imports torch"
    code = f"import sys, {', '.join(inside)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_engine_needs_torch_transformers_safetensors_and_numpy_alone():
    others = ("pydantic", "fastapi", "uvicorn", "httpx", "rich", "yaml", "peft", "accelerate", "av")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others}));"
        "import valora_kernels.atmm, valora_kernels.tune, valora_serve.engine.engine"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_source_roots_are_no_packages():
    for folder in ("kernels", "data", "teachers"):
        assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", sorted(FOLDERS))
def test_packages_are_typed(package):
    assert (ROOT / FOLDERS[package] / "py.typed").is_file()
