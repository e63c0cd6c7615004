"""When nodes that stay up end by themselves."""

import time
from types import SimpleNamespace
from typing import cast

from support.agents import Pipe, Waiting

from orchestrate.node.agent import FIRST_JOB, Agent
from orchestrate.node.loop import Loop


def test_a_node_must_end_once_it_has_had_neither_a_job_nor_a_client(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = Waiting(folders[0], NODE_KEEP="0.2", JOB_ID="j-1")
    assert first.run(0, "pass") == 0
    first.pipe.close()  # the job has not been cleaned up: another orchestrator may ask for its result
    second = Waiting(folders[1], NODE_KEEP="0.2", JOB_ID="j-2")
    assert second.run(0, "pass") == 0
    second.pipe.ask("clean")
    assert second.pipe.until("cleaned")
    second.pipe.close()
    assert second.node.wait(timeout=60) == 0
    assert first.node.poll() is None
    client = Pipe(first.env)
    client.ask("clean")
    assert client.until("cleaned")
    client.close()
    assert first.node.wait(timeout=60) == 0
    assert "ending the node: no job has used it for 0.2 s" in first.out.read_text()


def test_a_new_node_must_wait_for_its_first_job_however_short_keep_is(monkeypatch):
    """Until the job starts, other nodes are created and files are copied."""
    ended: list[bool] = []
    loop = SimpleNamespace(after=lambda seconds, then: None, stop=lambda end: ended.append(end), zygote=None)
    node, now = Agent(cast(Loop, loop), b""), time.monotonic()
    for later, over in ((FIRST_JOB - 1, []), (FIRST_JOB + 1, [True])):
        monkeypatch.setattr(time, "monotonic", lambda: now + later)  # noqa: B023
        node.expire(0.2)
        assert ended == over
