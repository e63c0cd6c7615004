"""Run directories that come with a project, such as a cloned repository, must have no effect."""

import json
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.commanded import NOT_OURS, Commands, create, end, supervised
from support.memory import peak
from support.scripted import ALL_WELL
from support.victims import facts

from orchestrate.engines import sockets
from orchestrate.engines.docker.client import Daemon
from orchestrate.errors import EngineError, UsageError
from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec


def forged(folder: Path, victim: Path, name: str = "cluster-e95b") -> JobPaths:
    """A cluster that was created elsewhere, with links to folders of the victim."""
    paths = create(JobPaths(folder / name), cluster=name)
    shutil.rmtree(paths.nodes)
    paths.nodes.symlink_to(victim / "nodes")
    paths.sockets.symlink_to(victim / "sockets")
    (paths.root / ".key").write_bytes(bytes(32))
    records.forget(paths.root)
    return paths


def make_huge(paths: JobPaths) -> None:
    with paths.plan.open("r+b") as file:
        file.truncate(300 << 30)


def change_types(paths: JobPaths) -> None:
    paths.plan.write_text(json.dumps(json.loads(paths.plan.read_text()) | {"gpus": [[]]}))


def leave_unchanged(paths: JobPaths) -> None:
    """Keep a valid plan."""


PLANS = [leave_unchanged, make_huge, change_types]


@pytest.mark.parametrize("edit", PLANS)
def test_commands_must_not_use_a_cluster_that_came_with_the_project(do: Commands, victim, tmp_path, edit):
    do.runs = tmp_path / "runs"
    paths, before = forged(do.runs, victim), facts(victim)
    edit(paths)
    do.engine.generations, do.engine.things = [[ALL_WELL]], ["container cluster-e95b-master-1"]
    code, out, err = do("down", paths.root.name)
    assert (code, out, err[0]) == (2, [], f"error: no such cluster: {paths.root.name}")
    assert do.engine.calls == [] and paths.root.exists()  # nor is the engine's container with the same name touched
    assert do("ps") == (0, ["NAME  ENGINE  NODES  STATE  RUN"], [])
    code, out, err = do("plan", "--", "-m", "app.train")
    assert code == 0 and "cluster-e95b" not in "\n".join(out + err)
    with supervised(paths.root):  # its lock is held
        assert do("run", "--trainers", 2, "--", "-m", "app.train")[0] == 0
    (plan,) = do.runs.glob("app-*/plan.json")
    assert json.loads(plan.read_text())["placement"]["cluster"] == ""
    assert facts(victim) == before and (victim / "nodes" / "file").read_text() == "mine"


@pytest.mark.parametrize("edit", PLANS)
@pytest.mark.parametrize("has_ended", [True, False])
def test_a_job_that_came_with_the_project_must_only_be_displayed(do: Commands, paths, edit, has_ended):
    if has_ended:
        end(paths)
    edit(paths)
    records.forget(paths.root)
    shown = has_ended and edit is leave_unchanged
    code, _, err = do("logs", "a-1")
    assert code == (0 if shown else 2)
    if not shown:
        assert ("does not contain a job that can continue" if has_ended else NOT_OURS) in err[0]
    for command in ("attach", "stop"):
        assert do(command, "a-1")[0] == 2
    assert do("wait", "a-1")[0] == (0 if has_ended else 5)
    assert do("rm", "a-1") == (0, [], ["a-1 removed"])
    assert do.engine.calls == []


def test_a_job_must_not_run_on_a_cluster_that_came_with_the_project(do: Commands, victim, tmp_path):
    do.runs = tmp_path / "runs"
    forged(do.runs, victim)
    (victim / "nodes" / "a-1").mkdir()
    paths = JobPaths(do.runs / "a-1")
    create(paths)
    shutil.rmtree(paths.shared)
    paths.shared.symlink_to("../cluster-e95b/nodes/a-1")
    plan = json.loads(paths.plan.read_text())
    plan["placement"]["cluster"] = "cluster-e95b"
    records.write(paths.plan, json.dumps(plan))
    code, _, err = do("attach", "a-1")
    assert code == 2 and f"{do.runs / 'cluster-e95b'} {NOT_OURS}" in "\n".join(err)
    assert do.engine.calls == [] and not (do.runs / "cluster-e95b" / "supervisor.lock").exists()


def test_files_must_not_be_moved_to_a_run_directory_that_came_with_the_project(do: Commands, paths, tmp_path):
    cluster = create(JobPaths(tmp_path / "c-1"), cluster="c-1")
    on_it = create(JobPaths(tmp_path / "b-1"), cluster="c-1")
    records.forget(on_it.root)
    with pytest.raises(OSError, match=NOT_OURS):
        run_dir.move_from_cluster(on_it)
    assert on_it.shared.is_symlink() and (cluster.nodes / "b-1").is_dir()


# --- in our own run directories


@pytest.mark.parametrize("edit", PLANS[1:])
def test_a_plan_that_is_too_large_or_has_wrong_types_must_be_refused(paths, edit):
    edit(paths)
    with pytest.raises(UsageError, match="does not contain a job that can continue"):
        run_dir.load(paths)


@pytest.mark.parametrize("name", ["report.json", "job.yaml"])
def test_a_huge_file_must_not_be_read(do: Commands, paths, name):
    with (paths.root / name).open("ab") as file:
        file.truncate(300 << 30)
    assert run_dir.ended(paths) is None and do("wait", "a-1")[0] == 5
    if name == "job.yaml":
        assert do("logs", "a-1")[0] == 2


@pytest.mark.parametrize("name", ["job", "sockets", "nodes"])
def test_nodes_must_mount_only_folders(paths, victim, name):
    path = paths.root / name
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(victim)
    with pytest.raises(UsageError, match=f"{name} is not a folder"):
        run_dir.load(paths)


def test_sockets_must_not_be_shared_through_a_link(tmp_path, victim):
    before = facts(tmp_path)
    (tmp_path / "link").symlink_to(victim / "sockets")
    with pytest.raises(EngineError, match="cannot create the folder for node sockets"):
        sockets.share(tmp_path / "link", "1234:1234")
    (tmp_path / "link").unlink()
    assert facts(tmp_path) == before
    for _ in range(2):  # the second time, it exists
        sockets.share(tmp_path / "made", f"{os.geteuid()}:{os.getegid()}")
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_attributes_set_on_the_socket_folder_must_not_affect_the_next_job(tmp_path):
    (tmp_path / "sockets").mkdir(0o777)
    for name in ("kept", "left"):
        (tmp_path / "sockets" / name).touch()
    os.setxattr(tmp_path / "sockets", "user.note", b"of job a")
    sockets.tidy(tmp_path / "sockets", {"kept"})
    assert [path.name for path in (tmp_path / "sockets").iterdir()] == ["kept"]
    assert os.listxattr(tmp_path / "sockets") == [] and stat.S_IMODE((tmp_path / "sockets").stat().st_mode) == 0o700


def test_nodes_must_not_run_as_the_owner_of_a_link_target(tmp_path, victim):
    (tmp_path / "job").symlink_to(victim)
    daemon: Any = SimpleNamespace(info={})
    with pytest.raises(EngineError, match="job is not a folder"):
        Daemon.user(daemon, tmp_path / "job", JobSpec())
    assert Daemon.user(daemon, victim, JobSpec(user=str(os.geteuid()))) == f"{os.geteuid()}:{os.getegid()}"


@pytest.mark.parametrize("name", ["plan.json", "events.jsonl", "times.jsonl"])
def test_files_with_many_values_must_not_be_parsed(do: Commands, paths, monkeypatch, name):
    """Parsed, they would take twenty-five times their size."""
    few = 50_000  # of which a plan may have five times as many
    monkeypatch.setattr("orchestrate.node.messages.checks.MAX_VALUES", few)
    end(paths)
    records.forget(paths.root)
    many, parts = "[]," * 400_000, [range(start, start + 20_000) for start in range(0, 60_000, 20_000)]
    rows = [json.dumps({"time": 1.5, "read": dict.fromkeys(ranks, 1)}) for ranks in parts]
    text = {
        "plan.json": f'{{"more": [{many}0], {paths.plan.read_text()[1:]}',
        "events.jsonl": f'{{"event": "job_ended", "time": 1.0, "seconds": 1.0, "more": [{many}0]}}\n',
        "times.jsonl": "\n".join(rows),
    }[name]
    (paths.root / name).write_text(text)
    command = ("logs", "a-1", "--timestamps") if name == "times.jsonl" else ("report", "a-1")
    _, most = peak(lambda: do(*command))
    assert most < 5 * len(text) + 2_000_000
