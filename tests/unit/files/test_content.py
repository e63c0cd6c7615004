"""A file that is read whole must be limited by the memory that it takes."""

import json

import pytest

from orchestrate.files import folder
from orchestrate.node.messages import checks


@pytest.mark.parametrize(("text", "size"), [("a" * 80, 80), ("a" * 81, None), ("ä" * 10, 10), ("ä" * 11, None)])
def test_text_that_takes_more_memory_must_have_a_lower_limit(tmp_path, monkeypatch, text, size):
    monkeypatch.setattr(folder, "MAX_FILE", 80)
    (tmp_path / "report.json").write_text(text)
    if size:
        assert len(folder.content(tmp_path / "report.json")) == size
    else:
        with pytest.raises(OSError, match="larger than"):
            folder.content(tmp_path / "report.json")


@pytest.mark.parametrize(
    ("text", "fits"), [("a" * 60, True), ("ä" + "a" * 53, True), ("中" + "a" * 40, False), ("😀", True)]
)
def test_json_must_be_limited_by_the_memory_that_its_texts_take(monkeypatch, text, fits):
    monkeypatch.setattr(checks, "MAX_TEXT", 64)
    for ascii in (True, False):
        data = json.dumps([text], ensure_ascii=ascii).encode()
        if fits and (ascii or text.isascii()):
            checks.limit_values(data, 10)
        elif not fits:
            with pytest.raises(ValueError, match="its text takes too much memory"):
                checks.limit_values(data, 10)
