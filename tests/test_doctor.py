"""What `doctor` finds on hosts; see test_swarm.py for real ones, which have the same clock."""

import io
import time

import pytest

from orchestrate import doctor


class Host:
    """A host whose clock differs by some seconds."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def reach(self, node: str) -> "Host":
        return self

    def converse(self, ask: str, **facts: object) -> dict[str, float]:
        return {"time": time.time() + self.ahead}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("ahead", "told"), [(0.0, ""), (3600.0, "+3600.0 s"), (-3600.0, "-3600.0 s")])
def test_a_clock_that_differs_must_be_told(monkeypatch, ahead, told):
    monkeypatch.setattr(doctor, "give", lambda *_: None)
    found = [finding.what for finding in doctor._ask(Host(ahead), "master", "host-1", io.BytesIO())]
    assert [text for text in found if "clock" in text] == ([f"host-1: its clock differs by {told}"] if told else [])
