"""Containers that inspect an image: interrupted and killed commands must leave none."""

import os
import signal
import threading

import pytest
from support.optional import not_none

from orchestrate.engines.docker.helper_containers import output

OLD = "orchestrate-look-0123456789abcdef"


def look(daemon, tmp_path) -> tuple[str, str]:
    return output(daemon, tmp_path, ["python"], 5, {}, image="mine:1", memory=1 << 20, config={})


def test_a_request_that_is_interrupted_must_leave_no_container(answers, daemon, tmp_path):
    main = not_none(threading.main_thread().ident)

    def interrupt(request: str) -> None:
        if request == "POST /containers/create":
            signal.pthread_kill(main, signal.SIGINT)

    answers.on_request = interrupt
    with pytest.raises(KeyboardInterrupt):
        look(daemon, tmp_path)
    name = answers.query_of("POST /containers/create")[0]["name"]
    assert answers.requests("DELETE") == [f"DELETE /containers/{name}"]


@pytest.mark.parametrize(
    ("name", "age", "owner", "removed"),
    [
        (OLD, 601, 0, True),
        (OLD, 599, 0, False),  # another command may wait for it
        (OLD, 601, 1, False),
        ("mine", 601, 0, False),  # the label is that of its image
        (f"{OLD}-1", 601, 0, False),
    ],
)
def test_a_container_of_a_killed_process_must_be_removed(answers, daemon, tmp_path, name, age, owner, removed):
    listed = {"Labels": {"orchestrate.look": str(os.geteuid() + owner)}, "State": "running"}
    answers.replies["GET /containers/made/json"] = {"Id": "made", "Config": {"Tty": False}}
    answers.containers.append({"Id": "made", "Names": ["/new"], "Created": 5000, **listed})
    answers.containers.append({"Id": "old", "Names": [f"/{name}"], "Created": 5000 - age, **listed})
    assert look(daemon, tmp_path) == ("", "")
    assert ("DELETE /containers/old" in answers.requests("DELETE")) == removed
    assert "DELETE /containers/made" in answers.requests("DELETE")
