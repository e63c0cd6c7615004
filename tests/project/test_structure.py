"""The structure of the project: allowed imports, sizes, and documents that must agree with the code."""

import ast
import graphlib
import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator

from support.optional import not_none
from support.repo import ROOT

from orchestrate import __version__
from orchestrate.node.ranks import CONTRACT
from orchestrate.spec.causes import CAUSES, RULES
from orchestrate.spec.spec import IMAGE

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


DRAWING = [f"orchestrate/show/{name}.py" for name in ("document", "live", "render", "top")]  # may import rich


def forbidden(path) -> set[str]:
    """The imports of a file that the rules of ARCHITECTURE.md forbid."""
    names, where = imports(path), str(path.relative_to(ROOT))
    tops = {name.split(".")[0] for name in names}
    if where.startswith("app/"):
        return tops & {"orchestrate", "docker"}
    host = "orchestrate/node/programs/tcpstore.py"  # runs like a worker
    allowed = {
        "rich": DRAWING,
        "obstore": ["orchestrate/storage/remote.py"],
        "torch": [host, "orchestrate/api/function.py"],
        "app": [],
    }
    found = {name for name, files in allowed.items() if name in tops and where not in files}
    if "docker" in tops and not where.startswith(("orchestrate/engines/docker/", "orchestrate/engines/swarm/")):
        found.add("docker")
    if where.startswith("orchestrate/supervise/"):
        found |= {name for name in names if name.startswith("orchestrate.show")}
    if where.startswith("orchestrate/node/") and where != host:
        others = {name.split(".")[0] for name in names if not name.startswith("orchestrate.node")}
        found |= others - sys.stdlib_module_names
    if where.startswith("orchestrate/node/programs/"):
        found |= tops & {"orchestrate"}
    return found


def test_modules_must_import_only_what_is_allowed():
    assert {str(path): found for path in FILES if (found := forbidden(path))} == {}


def long_functions(path) -> dict[str, int]:
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return {node.name: size for node in functions if (size := not_none(node.end_lineno) - node.lineno + 1) > 60}


def test_modules_and_their_functions_must_be_short():
    files = [*FILES, *ROOT.glob("tests/**/*.py")]
    assert {str(path): size for path in files if (size := path.read_text().count("\n")) > 400} == {}
    assert {str(path): found for path in FILES if (found := long_functions(path))} == {}


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
    "host",
    "spec",
    "plan",
    "record",
    "show",
    "pages",
    "storage",
    "engines",
    "supervise",
    "api",
    "testing",
    "export",
    "doctor",
    "cli",
    "__main__",
)


def layer(name: str) -> int:
    """The index of a module's layer; modules that all others may use are in the layer above `node`."""
    _, package, *rest = [*name.split("."), ""]
    return LAYERS.index(package if package in LAYERS and (rest or package == "__main__") else "")


def higher(name: str) -> set[str]:
    """The modules of higher layers that a module imports."""
    found = {other for other in modules_of(MODULES[name]) & {*MODULES} if other.startswith("orchestrate")}
    return {other for other in found if layer(other) > layer(name)}


def test_modules_must_import_nothing_from_a_higher_layer():
    names = [name for name in MODULES if name.startswith("orchestrate")]
    assert {name: found for name in names if (found := higher(name))} == {}


def test_the_architecture_must_list_the_folders_from_top_to_bottom():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = re.findall(r"^\| `(\w+)/` \| .* \|$", text, re.M)
    assert packages == [package for package in reversed(LAYERS) if package not in ("", "__main__")]


def test_names_that_benchmarks_import_from_the_project_must_exist():
    for path in ROOT.glob("benchmarks/*.py"):
        for module, name in imported(path):
            if module.split(".")[0] in ("app", "orchestrate") and name:
                found = importlib.import_module(module)
                assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), path


def test_modules_other_than_console_must_not_print():
    files = [path for path in ROOT.glob("orchestrate/**/*.py") if path.name != "console.py"]
    assert [path for path in files if re.search(r"\bprint\(", path.read_text())] == []


def test_the_tag_of_the_image_must_be_the_version():
    version = ".".join(__version__.split(".")[:2])
    assert f"orchestrate-node:{version}" == IMAGE
    assert (ROOT / "docker-compose.yml").read_text().count("orchestrate-node:") == 2
    assert (ROOT / "docker-compose.yml").read_text().count(f"${{NODE_IMAGE:-{IMAGE}}}") == 2


def test_the_documented_contract_must_match_the_code():
    text = (ROOT / "docs" / "environment.md").read_text()
    table = text[: text.index("Besides these")]
    assert set(re.findall(r"`([A-Z][A-Z_]+)`", table)) == CONTRACT | {"OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE"}


def test_every_failure_in_the_table_must_have_an_existing_test_or_a_reason():
    text = (ROOT / "docs" / "failures.md").read_text()
    rows = re.findall(r"^\| F(\d+) .*\| (.+) \|$", text, re.M)
    assert [int(number) for number, _ in rows] == list(range(19, 63))
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


def test_the_documented_causes_must_match_the_code():
    text = (ROOT / "docs" / "restarts.md").read_text()
    table = re.findall(r"^\| `([a-zA-Z ]+)` \| (.+) \| `(\w+)` \|$", text, re.M)
    rules = {rule["cause"]: rule["action"] for rule in RULES}
    assert table == [(cause, meaning, rules.get(cause, "count")) for cause, meaning in CAUSES.items()]


def test_files_that_documents_and_comments_name_must_exist():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *FILES]
    named = {name for path in texts for name in re.findall(r"\btests/[\w/]+\.py\b", path.read_text())}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_tests_of_jobs_that_do_not_always_run_must_be_listed():
    text, named = (ROOT / "CONTRIBUTING.md").read_text(), set()
    for path in ROOT.glob("tests/e2e/**/test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(
                "exhaustive" in ast.unparse(one) for one in node.decorator_list
            ):
                named.add(node.name)
    table = text[text.index("Only `make test-all` runs") : text.index("Other tests, and other test runs")]
    assert named == {*re.findall(r"`(test_\w+)`", table)}


def test_a_folder_must_have_at_most_twenty_modules():
    """Except that of commands, each of which is a module."""
    folders = [
        path.parent for path in FILES if path.name != "__init__.py" and path.is_relative_to(ROOT / "orchestrate")
    ]
    assert {folder.name for folder, count in Counter(folders).items() if count > 20} <= {"commands"}
