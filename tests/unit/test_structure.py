"""The shape of the code, as docs/architecture.md states it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_grpo"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# The table of docs/architecture.md, from top to bottom: what each layer may import.
LAYERS = {
    "cli": "all below",
    "training": "all below",
    "refit": "rollout, algorithms, parallel, config",
    "policy": "models, algorithms, parallel, config",
    "rollout": "observability, config, types",
    "models": "parallel, config",
    "algorithms": "parallel, config",
    "environments": "config, types",
    "data": "config, types",
    "observability": "config",
    "parallel": "nothing",
    "config": "nothing",
    "types": "nothing",
}
# Where a large dependency may be imported; everything else stays free of it.
DEPENDENCIES = {
    "megatron": {"training", "policy", "parallel"},
    "vllm": {"refit"},
    "transformers": {"data"},
    "reasoning_gym": {"data", "environments"},
    "jax": {"algorithms"},
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if first == "__main__" else first


def imported_modules(path: Path) -> Iterator[str]:
    """Dotted names of everything that the file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import; name the module in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below(layer: str) -> set[str]:
    order = list(LAYERS)
    return set(order[order.index(layer) + 1 :])


def allowed(layer: str) -> set[str]:
    text = LAYERS[layer]
    return below(layer) if text == "all below" else set() if text == "nothing" else set(text.split(", "))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_downward_only(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    own = [m.split(".") for m in imported_modules(path) if m.split(".")[0] == "megatron_grpo"]
    assert {parts[1] for parts in own} - {layer} <= allowed(layer)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_large_dependencies_stay_where_they_belong(path: Path) -> None:
    used = {module.split(".")[0] for module in imported_modules(path)} & DEPENDENCIES.keys()
    assert {name for name in used if layer_of(path) not in DEPENDENCIES[name]} == set()


def test_the_layers_are_all_there_is_and_stand_in_order() -> None:
    assert {layer_of(path) for path in SOURCES} - {"__init__"} == set(LAYERS)
    assert [layer for layer in LAYERS if not allowed(layer) <= below(layer)] == []


def test_the_documentation_has_the_same_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|.*\| ([^|]*) \|$", page, re.MULTILINE)
    assert rows == list(LAYERS.items())


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["config"], {"torch", "megatron", "vllm", "jax"}),
        (["cli", "training.preflight"], {"torch", "megatron", "vllm", "jax"}),
        (["algorithms.jax.loss", "algorithms.jax.advantages"], {"torch", "megatron", "vllm"}),
        (["algorithms.loss.loss_functions", "algorithms.advantage_estimator"], {"jax"}),
    ],
    ids=["config", "plan", "jax algorithms", "torch algorithms"],
)
def test_imports_without(modules: list[str], absent: set[str]) -> None:
    imported = ", ".join(f"megatron_grpo.{module}" for module in modules)
    program = f"import sys, {imported}; print(sorted({absent} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_files_are_of_readable_size_and_named_for_what_they_hold() -> None:
    assert {name_of(p): n for p in SOURCES if (n := len(p.read_text().splitlines())) > 400} == {}
    assert [name_of(p) for p in SOURCES if re.search(r"util|helper|misc|common", p.stem)] == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_and_their_public_names_have_docstrings(path: Path) -> None:
    module = ast.parse(path.read_text())
    public = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name != "main"  # what a program does is said by its module
    ]
    assert [node.name for node in public if not ast.get_docstring(node)] == []
    if module.body and path.name != "__main__.py":
        assert ast.get_docstring(module)


def test_files_that_the_pages_name_exist() -> None:
    roots = [ROOT, PACKAGE, ROOT / "docs"]
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"[`(]((?:[\w-]+/)+[\w-]+\.(?:py|md|sh|sbatch|txt|yaml))\b", page.read_text()))
        assert {path for path in named if not any((root / path).exists() for root in roots)} == set(), (
            page.name
        )
