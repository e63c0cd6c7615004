"""The structure of the project: allowed imports, sizes, and documents that must agree with the code."""

import ast
import graphlib
import importlib
import re
import sys
from collections.abc import Iterator

import pytest
from conftest import ROOT
from support.optional import not_none

from orchestrate import __version__
from orchestrate.job.outcomes import CAUSES, RULES
from orchestrate.job.spec import IMAGE
from orchestrate.node.ranks import CONTRACT

FILES = sorted([*ROOT.glob("orchestrate/**/*.py"), *ROOT.glob("app/**/*.py")])


def imported(path) -> Iterator[tuple[str, str]]:
    """The imports of a file: each module, and the name that is imported from it, or an empty string."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def imports(path) -> set[str]:
    return {module for module, _ in imported(path)}


DRAWING = [f"orchestrate/view/{name}.py" for name in ("live", "render", "top")]  # may import rich


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_must_import_only_what_is_allowed(path):
    names, tops = imports(path), {name.split(".")[0] for name in imports(path)}
    where = path.relative_to(ROOT)
    if where.parts[0] == "app":
        assert "orchestrate" not in tops and "docker" not in tops
    else:
        assert "torch" not in tops and "app" not in tops
        assert "rich" not in tops or str(where) in DRAWING
        assert "obstore" not in tops or str(where) == "orchestrate/storage/store.py"
        assert "docker" not in tops or str(where.parent) in ("orchestrate/engines/docker", "orchestrate/engines/swarm")
    if where.parts[1] == "node":
        others = {name.split(".")[0] for name in names if not name.startswith("orchestrate.node")}
        assert others <= sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_and_its_functions_must_be_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert {node.name: size for node in functions if (size := not_none(node.end_lineno) - node.lineno + 1) > 60} == {}


def modules_of(path) -> set[str]:
    """The modules that a file imports, or the packages of names that are not modules."""
    return {full if (full := f"{module}.{name}") in MODULES else module for module, name in imported(path)}


def named(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {named(path): path for path in FILES}


def test_modules_must_not_import_each_other_in_a_cycle():
    """Imports for type checking count, too."""
    graph = {name: modules_of(path) & {*MODULES} - {name} for name, path in MODULES.items()}
    assert [*graphlib.TopologicalSorter(graph).static_order()]  # raises CycleError


# The layers of the host's code, from bottom to top; `__main__` imports the command line.
LAYERS = (
    "node",
    "",
    "files",
    "job",
    "view",
    "pages",
    "storage",
    "engines",
    "supervise",
    "export",
    "doctor",
    "cli",
    "__main__",
)


def layer(name: str) -> int:
    """The index of a module's layer; modules that all others may use are in the layer above `node`."""
    _, package, *rest = [*name.split("."), ""]
    return LAYERS.index(package if package in LAYERS and (rest or package == "__main__") else "")


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("orchestrate")])
def test_a_module_must_import_nothing_from_a_higher_layer(name):
    found = {other for other in modules_of(MODULES[name]) & {*MODULES} if other.startswith("orchestrate")}
    assert {other for other in found if layer(other) > layer(name)} == set()


def test_the_architecture_must_list_each_package_and_module():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = re.findall(r"^\| `(\w+)/` \| (.*) \|$", text, re.M)
    order = [layer(f"orchestrate.{package}.x") for package, _ in packages]
    assert order == sorted(order, reverse=True) and {package for package, _ in packages} >= {*LAYERS} - {"", "__main__"}
    about = dict(packages) | {"engines": text[text.index("| `engines/`") : text.index("## How a node works")]}
    for name in MODULES:
        _, package, *module = [*name.split("."), ""]
        if package in about and package not in ("node", "export") and name.startswith("orchestrate") and module[0]:
            assert re.search(rf"`[\w/]*\b{[*filter(None, module)][-1]}`", about[package]), name


@pytest.mark.parametrize("path", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda path: path.name)
def test_names_that_a_benchmark_imports_from_the_project_must_exist(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("app", "orchestrate"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_other_than_console_must_not_print(path):
    if path.relative_to(ROOT).parts[0] == "orchestrate" and path.name != "console.py":
        assert not re.search(r"\bprint\(", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_must_be_small(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_tag_of_the_image_must_be_the_version():
    version = ".".join(__version__.split(".")[:2])
    assert f"orchestrate-node:{version}" == IMAGE
    assert (ROOT / "docker-compose.yml").read_text().count("orchestrate-node:") == 2
    assert (ROOT / "docker-compose.yml").read_text().count(f"${{NODE_IMAGE:-{IMAGE}}}") == 2


def test_the_documented_contract_must_match_the_code():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    table = text[text.index("## The contract") : text.index("## What may import what")]
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", table)) == CONTRACT | {"OMP_NUM_THREADS"}


def test_every_failure_in_the_table_must_have_an_existing_test_or_a_reason():
    text = (ROOT / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| F(\d+) .*\| (.+) \|$", text, re.M)
    assert [int(number) for number, _ in rows] == list(range(19, 63))
    tests = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_documented_causes_must_match_the_code():
    text = (ROOT / "docs" / "restarts.md").read_text()
    table = re.findall(r"^\| `([a-zA-Z ]+)` \| (.+) \| `(\w+)` \|$", text, re.M)
    rules = {rule["cause"]: rule["action"] for rule in RULES}
    assert table == [(cause, meaning, rules.get(cause, "count")) for cause, meaning in CAUSES.items()]
