"""An agent must act on a request only after what protects the job, and keep nothing of a job for the next one."""

import base64
import contextlib
import hashlib
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.ends import KEY
from support.loops import ManualLoop
from support.uploads import packed, put

from orchestrate.node.agent import Agent
from orchestrate.node.messages import protocol
from orchestrate.node.messages.checks import Refused
from orchestrate.node.worker import Worker


class Idle(ManualLoop):
    """A loop whose workers are this process; a test ends them by calling `done`."""

    def __init__(self) -> None:
        super().__init__()
        self.workers, self.zygote, self.held, self.failed, self.ending = [], None, None, None, False
        self.done: list[Callable[[int], None]] = []
        self.stops: list[bool] = []

    def start(self, command, env, cwd, done, started) -> SimpleNamespace:
        self.done.append(done)
        return SimpleNamespace(pid=os.getpid(), stopping=False, kill=lambda number: None)

    def stop(self, end: bool = False) -> None:
        self.stops.append(end)

    def finish(self) -> None:
        pass

    def close_store(self) -> None:
        pass

    def changed(self) -> bool:
        return False


class Client:
    """A client that records what it gets."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def ask(tmp_path) -> Iterator[Any]:
    """Send a request to an agent; its attributes are the agent, its loop, and the client."""
    loop: Any = Idle()
    client: Any = Client()
    node = Agent(loop, KEY)

    def ask(request: str, **facts: object) -> None:
        node.receive(client, {"ask": request, **facts})

    def start(
        generation: int = 0,
        secrets: dict[str, str] | None = None,
        before: list[str] | None = None,
        log: int | None = None,
        **env: str,
    ) -> None:
        own = {"RANK": "0", "WORLD_SIZE": "2", "JOB_ID": "j", "JOB_DIR": str(tmp_path / "job")}
        own |= {"TORCHELASTIC_RESTART_COUNT": str(generation), **env}
        ask("start", command=["x.py"], env=own, inherit=False, secrets=secrets, before=before, log=log)

    yield SimpleNamespace(node=node, loop=loop, client=client, request=ask, start=start)
    for each in loop.watched:
        each.close()


def test_a_worker_that_waits_for_an_import_must_still_start_after_a_freeze(ask):
    ask.loop.workers.append(waits := Worker(["x.py"], {"RANK": "0"}, None, lambda code: None))
    ask.request("freeze")
    assert waits.poll() is None
    for end in (waits.output, waits.input):
        os.close(end)


def test_an_upload_that_cannot_be_unpacked_must_be_answered_with_the_reason(ask, tmp_path):
    data = b"not a tar file"
    piece = {"data": base64.b64encode(data).decode(), "offset": 0, "tag": hashlib.sha256(data).hexdigest()}
    ask.request("upload", folder=str(tmp_path / "job"), **piece)
    (failed,) = ask.client.sent
    assert isinstance(failed, protocol.Failed) and failed.error


def test_a_node_must_stay_up_for_its_whole_time_after_its_last_client_has_left(ask):
    ask.request("status")
    ask.node.idle_since = -1000.0
    ask.node.expire(100.0)
    ask.node.receive(ask.client, None)
    ask.node.expire(100.0)
    assert ask.loop.stops == []
    ask.node.idle_since -= 200.0
    ask.node.receive(object(), None)  # a client that has only looked whether the node listens
    ask.node.expire(100.0)
    assert ask.loop.stops == [True]


def test_a_stop_must_first_fence_the_generation_off_and_never_a_newer_one(ask, tmp_path):
    fence, found = tmp_path / "job" / "generation", []
    ask.node.alone, ask.loop.stop = True, lambda: found.append(fence.read_text())
    ask.start()
    ask.request("stop", kill=False)
    fence.write_text("7\n")
    ask.request("stop", kill=False)
    assert found == ["0 over\n", "7\n"]


def test_the_use_of_a_worker_must_be_reported_and_forgotten_with_its_generation_and_job(ask):
    for generation in range(2):
        ask.start(generation)
        assert ask.node.status().uses == {}
        ask.node.traffic.sample()
        assert ask.node.status().uses.keys() == {"0"}
    ask.loop.done[-1](0)
    assert ask.client.sent[-1].use == ask.node.status().uses["0"]
    ask.request("clean")
    assert ask.node.traffic.use(0) is None


@pytest.mark.parametrize(
    ("env", "sampled"), [({}, True), ({"WORLD_SIZE": "1"}, False), ({"CUDA_VISIBLE_DEVICES": "GPU-a"}, True)]
)
def test_only_a_worker_on_the_cpu_that_is_alone_must_not_be_sampled(ask, env, sampled):
    ask.start(**{"WORLD_SIZE": "1" if "CUDA_VISIBLE_DEVICES" in env else "2", **env})
    assert bool(ask.loop.due) == sampled


def test_secrets_must_be_written_for_this_user_only_or_the_start_be_refused_without_their_values(ask, tmp_path):
    folder = tmp_path / "secrets"
    ask.start(secrets={f"{folder}/TOKEN": "a-secret-value"})
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "TOKEN")] == [0o700, 0o400]
    with pytest.raises(Refused, match="^start: secrets: cannot write '.*: Not a directory$") as refused:
        ask.start(secrets={f"{folder}/TOKEN/below/it": "a-secret-value"})
    assert "a-secret-value" not in str(refused.value) and len(ask.loop.done) == 1


def test_a_cleaned_node_must_have_no_upload_lease_or_status_server_of_the_last_job(ask, tmp_path):
    for _ in range(2):
        put(ask.node.files, tmp_path / "job", packed(name="content"))
        ask.request("lease", relay=["127.0.0.1", 9])
        ask.start()
        assert len(ask.loop.watched) == 2 and ask.node.status().tags
        ask.request("clean")
        assert ask.client.sent[-1] == protocol.Cleaned()
        assert not ask.loop.watched and ask.node.status().tags == {}


def test_a_node_must_listen_again_once_and_for_the_same_users_after_a_job_has_removed_its_socket(ask, tmp_path):
    path, found = tmp_path / "s", []
    ask.node.listen(str(path), 0o660)
    path.rename(tmp_path / "moved")
    for _ in range(2):
        ask.request("clean")
        found.append(path.stat())
        assert len(ask.loop.watched) == 1  # the old one is closed
    assert stat.S_ISSOCK(found[0].st_mode) and stat.S_IMODE(found[0].st_mode) == 0o660
    assert os.path.samestat(*found)


def test_a_clean_must_close_the_connections_of_the_last_job_to_all_sockets(ask, tmp_path):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(6)]
        for name in "ab":
            ask.node.listen(str(tmp_path / name))
        for number, client in enumerate(clients):
            client.settimeout(5)
            client.connect(str(tmp_path / "ab"[number % 2]))
            if number < 2:  # the others wait to be accepted
                ask.loop.turn()
        ask.request("clean")
        read = [len(client.makefile("rb").read()) for client in clients]
        assert read == [33, 33, 0, 0, 0, 0]  # two nonces


def test_the_command_of_before_must_find_the_secrets_of_its_job(ask, tmp_path):
    secret, found = tmp_path / "secrets" / "TOKEN", []
    ask.loop.hold = lambda first: (found.append(secret.read_text()), first.kill(signal.SIGTERM), first.close())
    ask.loop.release = lambda code, command: found.append((code, command))
    ask.start(secrets={str(secret): "value"}, before=["sh", "a b"])
    assert found == ["value", (143, "sh 'a b'")]


def test_the_log_of_a_job_must_be_reported_even_if_the_last_job_was_not_cleaned_up(ask, tmp_path):
    ask.start(JOB_ID="last", log=0)
    ask.start(log=0)
    (tmp_path / "job" / "logs").mkdir()
    (tmp_path / "job" / "logs" / "rank-0.log").write_text("text")
    assert ask.node.files.changes(str(tmp_path / "job"), {"logs/rank-0.log": 0}).logs
