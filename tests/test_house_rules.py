"""The limits that keep the code readable, enforced on every Python file of the project."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cache_store", "model", "pipeline", "jobs", "benchmarks", "tests")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "common", "helpers", "misc"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_the_limits(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert path.stem not in FORBIDDEN_NAMES
    assert len(source.splitlines()) <= 400, "split the file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"
            arguments = node.args
            count = len(arguments.args) + len(arguments.posonlyargs) + len(arguments.kwonlyargs)
            is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
            assert is_kernel or count <= 9, f"{node.name} takes {count} parameters (self included)"


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda p: p.name)
def test_job_names_shadow_no_module(path: Path) -> None:
    # `python jobs/train.py` puts jobs/ first on sys.path, where jobs/inspect.py would hide the standard library's.
    forbidden = {"evaluate", "inspect", "logging", "types", "datasets", "ray", "torch", "model", "pipeline"}
    assert path.stem not in forbidden
