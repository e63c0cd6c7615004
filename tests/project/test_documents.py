"""Documents must link only to what exists, name what is there, and have one sentence per line."""

import json
import re
import subprocess

import pytest
from support.repo import ROOT

from benchmarks.document import RESULTS, changed, documents, heading

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.M | re.S)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings: lower case, without punctuation, and with `-` for spaces."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_must_lead_to_files_and_headings_that_exist(path):
    for found in LINK.finditer(CODE.sub("", path.read_text())):
        address, _, anchor = (found[1] or found[2]).partition("#")
        if "://" in address:
            continue
        target = (path.parent / address).resolve() if address else path
        assert target.exists(), found[0]
        assert not anchor or anchor in anchors(target.read_text()), found[0]


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/**/*.svg")), ids=lambda path: path.name)
def test_pictures_must_load_nothing(path):
    text = path.read_text()
    addresses = {*re.findall(r"\w+://[^\s\"')]+", text)} - {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not addresses and "@import" not in text and "<script" not in text


def test_the_two_commands_must_be_make_targets():
    for target in ("run", "test"):
        assert f"make {target}" in README
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_the_file_tree_must_match_the_project():
    tree = README[README.index("## Project layout") :]
    named = set(re.findall(r"^([\w./-]+?)/? {2,}\S", tree, re.M))
    assert named and all((ROOT / name).exists() for name in named)
    top = {path.name for path in ROOT.iterdir() if path.name in {"app", "orchestrate", "tests", "examples", ".ci"}}
    assert top <= {name.split("/")[0] for name in named}


def test_markdown_must_have_one_sentence_per_line():
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)
        for line in text.splitlines():
            if not line.startswith(("|", "#")):
                assert not re.search(r"[a-z)`][.!?] [A-Z]", line), f"{path.name}: {line}"


def test_the_pages_of_performance_must_show_the_results_and_mark_what_has_changed_since():
    """After a new measurement, or a change of what was measured: python -m benchmarks.document."""
    results, mark = json.loads(RESULTS.read_text()), "Out of date: what it measures has changed since.\n\n"
    for name, text in documents(results).items():
        assert (ROOT / "docs" / name).read_text().replace(mark, "") == text.replace(mark, "")
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("performance.md", "performance-gpu.md"))
    for name, result in results.items():
        section = pages.partition(f"## {heading(name)}\n")[2].partition("\n## ")[0]
        assert mark in section or not changed(name, result["machine"]["commit"]), name
