"""The architecture, kept by a test: science imports no workshop, and only transports touch `torch.distributed`."""

import ast
import sys
from pathlib import Path

import overtone

ROOT = Path(overtone.__file__).parent
SCIENCE = {
    "agreement", "bits", "buffers", "codec", "dct", "errors", "exchange", "fingerprint", "greeting", "inner", "kernels",
    "layout", "methods", "network", "parameters", "patterns", "randomness", "record", "replica", "rules", "saving",
    "board", "joining", "ledger", "signals", "simulate", "transport", "version", "watchdog", "wire", "work",
}  # fmt: skip
TRANSPORTS = {"joining", "transport", "launch"}  # what joins a world of processes, and what starts one
COMPILED = {"kernels_numba"}  # the same functions as `kernels`, where numba is installed


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it, by full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_every_science_file_is_there() -> None:
    assert {path.stem for path in ROOT.glob("*.py")} >= SCIENCE


def test_science_imports_torch_and_science_only() -> None:
    allowed = {"torch", *sys.stdlib_module_names}
    for name in SCIENCE:
        for module in imports(ROOT / f"{name}.py"):
            top, *rest = module.split(".")
            if top != "overtone":
                assert top in allowed, f"{name} imports {module}"
            elif rest:
                assert rest[0] in SCIENCE | COMPILED, f"{name} imports the workshop: {module}"


def test_the_package_itself_needs_torch_only() -> None:
    for module in imports(ROOT / "__init__.py"):
        assert module.split(".")[0] == "overtone"
        assert module.split(".")[1:2] == [] or module.split(".")[1] in SCIENCE | {"__version__"}


def test_only_transports_touch_torch_distributed() -> None:
    for path in ROOT.rglob("*.py"):
        if path.stem not in TRANSPORTS:
            assert not any(module.startswith("torch.distributed") for module in imports(path)), path


def test_nothing_compares_method_names() -> None:
    names = set(overtone.METHODS)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                for side in (node.left, *node.comparators):
                    assert not (isinstance(side, ast.Constant) and side.value in names), f"{path}:{node.lineno}"
