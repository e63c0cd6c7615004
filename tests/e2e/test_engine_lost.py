"""An engine that is away, or drops events: events are only hints, and the engine's state is checked."""

import os
import signal
from pathlib import Path

import pytest
from support.engines import Engine
from support.faults import Background, complete
from support.leftovers import docker
from support.waiting import eventually

from benchmarks.proxy import ENGINE, Proxy


class Faulty(Proxy):
    """A proxy between the orchestrator and the engine that breaks event streams; `mode` selects how."""

    def __init__(self, path: Path, mode: str) -> None:
        self.mode, self.streams = mode, 0
        super().__init__(path)

    def passes(self, chunk: bytes, asks: bool, connection: dict) -> bytes | None:
        if asks and b"/events?" in chunk.split(b"\r\n")[0]:
            connection["events"] = True
            self.streams += 1
        if not asks and "events" in connection:
            head, _, body = chunk.partition(b"\r\n\r\n")
            if self.mode == "silent":  # the stream stays open without any event
                return head + b"\r\n\r\n" if head.startswith(b"HTTP/") else b""
            if self.mode == "cut" and (body or not head.startswith(b"HTTP/")):
                return None  # the stream ends at the first event
        return chunk


@pytest.fixture(params=["silent", "cut"])
def proxy(request, docker_engine, tmp_path):
    if not Path(ENGINE).exists():
        pytest.skip("the engine is not at the usual socket")
    instance = Faulty(tmp_path / "proxy.sock", request.param)
    yield instance
    instance.server.close()


@pytest.mark.docker
def test_a_failure_must_be_noticed_without_the_event_stream(cli, proxy, nothing_left):
    cli.env["DOCKER_HOST"] = f"unix://{proxy.path}"
    job = Background(cli, "docker", "--", "count.py", "until-asked")
    job.until_step(15, rank=1)
    job.kill_worker(1)
    job.until("generation_started", 2)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert proxy.streams >= 1
    assert job.causes() == [(1, "killed")]
    assert all(complete(job.steps(rank)) for rank in range(3))


class Freezing(Proxy):
    """A proxy to an engine that stops responding once `frozen` is true."""

    frozen = False

    def passes(self, chunk: bytes, asks: bool, connection: dict) -> bytes | None:
        return b"" if self.frozen else chunk


@pytest.mark.docker
@pytest.mark.slow
def test_a_second_ctrl_c_must_end_a_job_whose_engine_is_frozen_and_stop_must_remove_the_rest(
    cli, docker_engine, tmp_path, nothing_left
):
    if not Path(ENGINE).exists():
        pytest.skip("the engine is not at the usual socket")
    proxy = Freezing(tmp_path / "proxy.sock")
    cli.env["DOCKER_HOST"] = f"unix://{proxy.path}"
    job = Background(cli, "docker", "--", "count.py", "100000")
    job.until_step(10, rank=1)
    proxy.frozen = True
    for _ in range(2):
        job.process.send_signal(signal.SIGINT)
        job.until("workers_stopping")
    assert job.end() == 130, job.err
    assert "hint: python -m orchestrate stop " in job.err and cli.report()["left_behind"]
    proxy.server.close()
    del cli.env["DOCKER_HOST"]
    stopped = cli("stop", cli.run_dir().name)
    assert stopped.returncode == 0, stopped.stderr


@pytest.fixture
def own_engine(docker_engine, monkeypatch):
    """A function that starts an engine with the image of nodes."""
    engines: list[Engine] = []

    def make(live_restore: bool) -> Engine:
        engine = Engine(*["--live-restore"] * live_restore, image=True)
        engines.append(engine)
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        return engine

    yield make
    for engine in engines:
        engine.remove()


def on(engine: Engine, cli, *arguments: str) -> Background:
    cli.env["DOCKER_HOST"] = engine.host
    return Background(cli, "docker", *arguments)


@pytest.mark.docker
@pytest.mark.slow
def test_a_job_must_go_on_while_its_engine_is_away_and_a_death_meanwhile_must_be_noticed(cli, own_engine):
    engine = own_engine(live_restore=True)
    job = on(engine, cli, "--", "count.py", "until-asked", "0.05")
    job.until_step(10, rank=1)
    engine.stop()
    at = job.steps(1)[-1][0]
    eventually(lambda: job.steps(1)[-1][0] > at + 20)  # the job continues while the engine is away
    engine.start()
    job.until("engine_back")
    assert len(job.events("generation_started")) == 1
    pids = docker("-H", engine.host, "top", job.node("trainer-1"), "-eo", "pid,args")
    (pid,) = [int(line.split()[0]) for line in pids.splitlines() if "count.py" in line and " worker " not in line]
    engine.stop(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    engine.start()
    job.until("generation_started", 2)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert job.causes() == [(1, "killed")]
    assert all(complete(job.steps(rank)) for rank in range(3))


@pytest.mark.docker
@pytest.mark.slow
def test_an_engine_restart_that_ends_the_workers_must_not_count_as_a_restart(cli, own_engine):
    engine = own_engine(live_restore=False)
    job = on(engine, cli, "--max-restarts", "0", "--", "count.py", "until-asked")
    job.until_step(10, rank=1)
    engine.stop()
    engine.start()
    job.until("generation_started", 2)
    cli.finish_jobs()
    assert job.end() == 0, job.err
    assert {cause for _, cause in job.causes()} == {"engine lost"}
    assert all(job.steps(rank)[-1][1] > 0 for rank in range(3))


@pytest.mark.docker
@pytest.mark.slow
def test_a_user_must_be_able_to_stop_a_job_while_the_engine_is_away(cli, own_engine):
    engine = own_engine(live_restore=True)
    job = on(engine, cli, "--", "count.py", "100000")
    job.until_step(10, rank=1)
    engine.stop()
    job.until("engine_lost")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 5
    assert cli.report()["left_behind"]
    engine.start()
    stopped = cli("stop", cli.run_dir().name)
    assert stopped.returncode == 0, stopped.stderr
    assert docker("ps", "-aq") == ""
