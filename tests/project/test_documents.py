"""Documents must link only to what exists, name what is there, and have one sentence per line."""

import json
import re
import runpy
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


def test_the_readme_must_have_at_most_8_kb():
    assert len(README.encode()) <= 8192


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if "```console" in path.read_text()], ids=lambda p: p.name)
def test_commands_that_other_tests_run_must_name_them_and_those_that_none_runs_the_reason(path):
    for mark in re.findall(r"<!-- (.*) -->\n\n```console", path.read_text()):
        kind, _, text = mark.partition(": ")
        assert (kind == "not run" and text) or (ROOT / mark.removeprefix("run by ")).is_file(), mark


def test_each_page_must_be_in_the_contents_of_the_site():
    contents = re.findall(r"^[\w./-]+$", (ROOT / "docs" / "index.md").read_text(), re.M)
    assert sorted(contents) == sorted(
        [path.stem for path in ROOT.glob("docs/*.md") if path.stem != "index"]
        + [f"../{path.stem}" for path in ROOT.glob("*.md") if path.stem != "README"]
    )


def test_the_reference_must_match_the_code():
    """After a change of commands, keys, events or the Python interface: python docs/reference.py."""
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    for name, text in reference["pages"]().items():
        assert (ROOT / "docs" / name).read_text() == text, name


@pytest.mark.slow
def test_the_site_must_be_built_without_warnings(tmp_path):
    """Every link within the site leads to a page and a heading that exist, and nothing is loaded from elsewhere."""
    subprocess.run(["make", "docs", f"SITE={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    pages = {path: path.read_text() for path in tmp_path.glob("**/*.html")}
    assert len(pages) > 30 and (tmp_path / "docs" / "index.html") in pages and (tmp_path / "searchindex.js").exists()
    for path, text in pages.items():
        assert not re.findall(r"<(?:script|img|link)[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*", text), path


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
    for name, result in results.items():
        page = (ROOT / "docs" / f"performance{'-gpu' * name.startswith('gpu-')}.md").read_text()
        head, section = page.partition("\n## ")[0], page.partition(f"## {heading(name)}\n")[2].partition("\n## ")[0]
        assert mark in f"{head}\n{section}" or not changed(name, result["machine"]["commit"]), name
