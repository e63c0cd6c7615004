"""Times of lines must take a limited amount of memory."""

import json

from orchestrate.record import times


def test_of_too_many_notes_some_must_be_left_out_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(times, "MAX_NOTES", 100)
    rows = [json.dumps({"time": 1e9 + number, "read": {"0": 10 * number, "1": 5}}) for number in range(1, 1001)]
    (tmp_path / "times.jsonl").write_text("".join(f"{row}\n" for row in rows))
    found = times.Times(tmp_path / "times.jsonl", 2)
    assert found.count <= 100 and len(found.notes[1]) == 1  # a log that does not grow has one
    for offset in (0, 4000, 9900):
        assert 0 < (found.at(0, offset) or 0) - 1e9 - offset / 10 <= 32
