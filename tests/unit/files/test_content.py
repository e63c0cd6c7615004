"""A file that is read whole must be limited by the memory that it takes."""

import pytest

from orchestrate.files import folder


@pytest.mark.parametrize(("text", "size"), [("a" * 80, 80), ("a" * 81, None), ("ä" * 10, 10), ("ä" * 11, None)])
def test_text_that_takes_more_memory_must_have_a_lower_limit(tmp_path, monkeypatch, text, size):
    monkeypatch.setattr(folder, "MAX_FILE", 80)
    (tmp_path / "report.json").write_text(text)
    if size:
        assert len(folder.content(tmp_path / "report.json")) == size
    else:
        with pytest.raises(OSError, match="larger than"):
            folder.content(tmp_path / "report.json")
