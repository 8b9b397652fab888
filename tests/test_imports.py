"""The architecture, kept by a test: one table says which folder may import which."""

import ast
import sys
from pathlib import Path

import pytest

import overtone

ROOT = Path(overtone.__file__).parent
# Each folder of src/overtone, and the folders that it may import besides itself. "core" is the files at the top.
MAY_IMPORT: dict[str, set[str]] = {
    "coding": {"core"},  # of which only errors.py: the test of import cycles sees to it
    "world": {"core", "coding"},
    "exchange": {"core", "coding"},
    "swarm": {"core", "exchange", "coding"},
    "core": {"exchange", "coding", "world", "sim", "swarm"},
    "sim": {"core", "exchange", "swarm"},
    "common": {"core", "exchange"},
    "tasks": {"core", "coding", "common"},
    "runs": {"core", "exchange", "coding", "world", "sim", "swarm", "common", "tasks"},
    "report": {"core", "sim", "common", "tasks", "runs"},
    "cli": {"core", "exchange", "coding", "world", "sim", "swarm", "common", "tasks", "runs", "report", "bench"},
    "bench": {"core", "exchange", "coding", "world", "sim", "common", "tasks", "runs"},
}
SCIENCE = ("core", "coding", "exchange", "world", "sim", "swarm")  # needs nothing but torch
# Of the extra "swarm", imported when a store is used: the storage, and the format of snapshots.
STORES = {"swarm.bucket": {"obstore"}, "swarm.records": {"safetensors"}}
FLAT = {"methods", "rules", "codec", "replica", "transport", "ledger", "errors", "version", "__init__", "__main__"}
# Who may import torch.distributed: whoever joins a world of processes or carries messages in it.
TOUCHES_DISTRIBUTED = {"world.process_group", "world.join"}
# Optional: the same functions as `in_torch`, where numba is installed.
COMPILED = {
    f"coding.kernels.{name}"
    for name in (
        "in_numba",
        "compiled",
        "numba_codec",
        "numba_fused",
        "numba_select",
        "numba_sums",
        "numba_transforms",
    )
}


def modules() -> dict[str, Path]:
    """Every file of the package by its name below `overtone`; a folder's own name is that of its __init__.py."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def folder_of(module: str) -> str:
    return module.split(".")[0] if (ROOT / module.split(".")[0]).is_dir() else "core"


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, by full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: Path) -> set[str]:
    """The files of the package that a file imports; of a folder and a file in it, the file."""
    found = {name.removeprefix("overtone.") for name in imports(path)} & MODULES.keys()
    return {name for name in found if not any(other.startswith(f"{name}.") for other in found)}


def test_every_folder_is_in_the_table() -> None:
    assert {folder_of(module) for module in MODULES} == set(MAY_IMPORT)


def test_at_the_top_lies_what_a_user_of_the_library_reads() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} == FLAT


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_what_the_table_allows(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    for module, path in MODULES.items():
        if folder_of(module) == folder and module != "__main__":
            for other in own(path):
                assert folder_of(other) in allowed, f"{module} imports {other}"


def test_science_needs_torch_only() -> None:
    allowed = {"torch", "overtone", *sys.stdlib_module_names}
    for module, path in MODULES.items():
        if folder_of(module) in SCIENCE and module not in COMPILED:
            for name in imports(path):
                assert name.split(".")[0] in allowed | STORES.get(module, set()), f"{module} imports {name}"


def test_no_file_imports_itself_by_a_detour() -> None:
    """Nothing is imported inside a function to hide a cycle, either."""
    graph = {module: own(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " imports ".join((*above[above.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_only_transports_touch_torch_distributed() -> None:
    for module, path in MODULES.items():
        if module not in TOUCHES_DISTRIBUTED:
            assert not any(name.startswith("torch.distributed") for name in imports(path)), module


def test_nothing_compares_method_names() -> None:
    names = set(overtone.METHODS)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                for side in (node.left, *node.comparators):
                    assert not (isinstance(side, ast.Constant) and side.value in names), f"{path}:{node.lineno}"
