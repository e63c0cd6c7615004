"""Which jobs can use a cluster's nodes, and where their files are, decided by the cluster's files alone."""

import contextlib
import dataclasses
import os
import shutil
import struct
from pathlib import Path

import pytest
from support.commanded import Whole, create, end, supervised
from support.methods import raising
from support.other_user import as_user, folder_of_user
from support.plans import HERE, Site, plan

from orchestrate.api import cluster
from orchestrate.engines.base import JobState, ignoring, never
from orchestrate.errors import EngineError, OrchestrateError, UsageError
from orchestrate.host import records, users
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(trainers=2, gpus="auto")
GPUS = HERE.but(gpus=tuple(f"GPU-{number}" for number in range(6)))


def new_cluster(tmp_path: Path, spec: JobSpec = SPEC, site: Site = GPUS) -> cluster.Cluster:
    return cluster.Cluster(JobPaths(tmp_path / "c-1"), spec, plan(spec, site, "c-1", 0))


def with_job(runs: Path) -> tuple[cluster.Cluster, JobPaths]:
    """A new cluster, and a job on it that has written to its log."""
    one = new_cluster(runs)
    create(one.paths, cluster="c-1")
    mine = create(JobPaths(runs / "a-1"), cluster="c-1")
    mine.log(0).write_text("mine")
    return one, mine


def differences(one: cluster.Cluster, site: Site = GPUS, **wanted) -> list[str]:
    spec = dataclasses.replace(SPEC, **wanted)
    if not one.paths.root.exists():
        one.paths.create_cluster(users.nodes_of(one.spec.user))
    return one.differences(spec, plan(spec, (site.inventory, one.placement(site.placement, "a-1")), "a-1", 0))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "other:1"),
        ("dockerfile", "folder"),
        ("pip", ["numpy"]),
        ("data", {"train": "/data"}),
        ("memory", "2g"),
        ("cpus", 1.5),
        ("shm_size", "2g"),
        ("network", "host"),
        ("isolated", True),
        ("host_access", True),
        ("labels", {"team": "vision"}),
        ("mounts", ["/models:/models:ro"]),
        ("ports", ["127.0.0.1:6006:6006"]),
        ("grace", 7.0),
        ("encrypt", True),
        ("constraints", ["node.role == worker"]),
        ("volume", "there"),
    ],
)
def test_a_job_that_needs_differently_configured_nodes_must_not_use_a_cluster(tmp_path, key, value):
    (why,) = differences(new_cluster(tmp_path), **{key: value})
    current = "not set" if getattr(SPEC, key) is None else getattr(SPEC, key)
    assert why == f"{key} is {current} on the cluster, {value} in the job"


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"trainers": 1},
        {"trainers": 1, "spares": 1},
        {"gpus": "none", "nproc_per_node": 3},
        {"gpus": 3},
        {"name": "other", "max_restarts": 9, "command": ("x.py",), "env": {"A": "b"}},
    ],
)
def test_a_job_that_needs_less_or_differs_only_in_job_settings_must_use_the_cluster(tmp_path, wanted):
    assert differences(new_cluster(tmp_path), **wanted) == []


@pytest.mark.parametrize(
    ("site", "wanted", "why"),
    [
        (GPUS.but(engine="process", image="sha256:2"), {}, "its engine is docker"),
        (GPUS.but(image="sha256:2"), {}, "its image has been built again"),
        (GPUS.but(code="/elsewhere"), {}, "its code folder is "),
        (GPUS, {"trainers": 3}, "it has 2 trainers, the job needs 3"),
        (GPUS, {"spares": 1}, "it has 2 trainers, the job needs 3"),
        (GPUS.but(gpus=("GPU-9", "GPU-1", "GPU-2")), {}, "its nodes can access only 6 GPUs"),
    ],
)
def test_the_reason_why_a_job_cannot_use_a_cluster_must_be_reported(tmp_path, site, wanted, why):
    (found,) = differences(new_cluster(tmp_path), site, **wanted)
    assert why in found


def test_standby_nodes_of_a_cluster_must_serve_a_larger_job(tmp_path):
    one = new_cluster(tmp_path, dataclasses.replace(SPEC, spares=1))
    assert differences(one, trainers=3) == []
    assert differences(one, trainers=4) == ["it has 3 trainers, the job needs 4"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to run nodes as another user")
def test_a_job_whose_nodes_would_run_as_another_user_must_not_use_a_cluster(tmp_path, monkeypatch):
    one = new_cluster(tmp_path)
    (found,) = differences(one, user="1234:5678")
    assert found == f"its nodes run as user {users.without_account()[0]}, the job needs 1234"
    local = GPUS.but(engine="process")  # whose nodes run as the caller
    assert differences(new_cluster(tmp_path, site=local), local, user="1234:5678") == []
    monkeypatch.setenv("SUDO_UID", "1001"), monkeypatch.setenv("SUDO_GID", "1001")
    assert differences(one) == [f"its nodes run as user {users.without_account()[0]}, the job needs 1001"]


@pytest.mark.parametrize(("workers", "fits"), [(1, True), (2, True), (3, False)])
def test_a_swarm_node_must_have_as_many_gpus_as_a_job_needs(tmp_path, workers, fits):
    swarm = GPUS.but(engine="swarm", gpus=tuple(f"GPU-{number}" for number in range(9)))
    one = new_cluster(tmp_path, dataclasses.replace(SPEC, nproc_per_node=2), swarm)
    wanted = {"trainers": 1, "nproc_per_node": workers}
    found = differences(one, swarm, **wanted)
    assert found == ([] if fits else ["its nodes have 2 GPUs each"])
    assert differences(one, swarm, gpus="none", **wanted) == []  # if it needs none


def test_a_cluster_in_use_must_name_the_job_and_the_process_that_use_it(tmp_path):
    one = new_cluster(tmp_path)
    one.paths.create_cluster(users.nodes_of(one.spec.user))
    with supervised(one.paths.root) as other:
        assert differences(one) == [f"it is in use by a job (process {other.pid})"]  # it has just started
    create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    create(JobPaths(tmp_path / "b-1"), cluster="c-1")
    with supervised(one.paths.root) as other, supervised(tmp_path / "b-1"):
        assert differences(one) == [f"it is in use by b-1 (process {other.pid})"]


def test_a_cluster_with_an_unfinished_job_must_not_be_given_to_another_job(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    unfinished = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    assert differences(one) == ["it is in use by a-1, which has no supervisor: attach to it or stop it"]
    end(unfinished)  # its supervisor was killed before it moved the files
    assert differences(one) == ["it still has the files of a-1, which `down` moves out of it"]
    end(unfinished, left_behind="1 file could not be copied")
    assert differences(one) == ["it still has the files of a-1, which `stop a-1` copies from its nodes"]
    run_dir.move_from_cluster(unfinished)
    assert differences(one) == []


@pytest.mark.parametrize(("engine", "folder"), [("docker", "/job/a-1"), ("swarm", "/job/a-1"), ("process", "/job")])
def test_a_job_on_a_cluster_must_write_to_its_own_folder(tmp_path, engine, folder):
    spec = dataclasses.replace(SPEC, spares=1)
    placed = new_cluster(tmp_path, spec, GPUS.but(engine=engine, keep=60.0)).placement(HERE.placement, "a-1")
    assert (placed.job_dir, placed.cluster) == (folder, "c-1")
    assert (placed.sharing, placed.keep) == (4, 60.0)  # nodes among which the memory of a host is divided


def test_clusters_must_be_listed_by_name_without_jobs_and_incomplete_ones(tmp_path):
    for name in ("c-2", "c-1", "partial"):
        create(JobPaths(tmp_path / name), cluster=name)
    create(JobPaths(tmp_path / "a-1"))
    (tmp_path / "partial" / "plan.json").unlink()
    found = cluster.found(tmp_path)
    assert [one.name for one in found] == ["c-1", "c-2"]
    assert (found[0].spec.trainers, found[0].plan.job_id) == (2, "c-1")
    assert cluster.found(tmp_path / "none") == []


def test_bringing_up_a_cluster_must_start_all_its_nodes_including_standby_nodes(tmp_path):
    engine, seen = Whole(), []

    def inventory(spec, run, run_image: bool) -> Site:
        assert run_image
        return HERE

    def up(plan, stopped=never) -> None:
        seen.append((plan.nodes, plan.project, engine.run))

    engine.inventory, engine.up = inventory, up
    one, _ = cluster.bring_up(engine, JobSpec(trainers=1, spares=1, name="mine"), tmp_path, contextlib.ExitStack())
    assert one.name.startswith("mine-")
    assert seen == [(("master", "trainer-1", "trainer-2"), one.name, tmp_path / one.name / "nodes")]
    assert one.plan.placement.code == str(Path.cwd())
    (found,) = cluster.found(tmp_path)
    assert (found.name, found.spec, found.plan) == (one.name, one.spec, one.plan)


@pytest.mark.parametrize("error", [EngineError, KeyboardInterrupt])
def test_a_cluster_that_fails_to_start_must_leave_nothing_and_report_why(tmp_path, error):
    engine = Whole()
    engine.up = raising(error("why"))
    with pytest.raises(error, match="why"):
        cluster.bring_up(engine, JobSpec(trainers=1, name="mine"), tmp_path, contextlib.ExitStack())
    assert list(tmp_path.iterdir()) == []
    assert [call.partition("-")[0] for call in engine.calls] == ["prepare", "remove mine"] and engine.graces == [0]


def test_kept_nodes_must_make_room_for_another_job_only_if_they_are_idle(tmp_path):
    def up(name: str, **site: object) -> None:
        run_dir.create(SPEC, plan(SPEC, GPUS.but(cluster=name, **site), name, 0), JobPaths(tmp_path / name))

    for name in ("idle-1", "busy-1", "supervised-1"):
        up(name, keep=60.0)
    up("cluster-1"), up("local-1", keep=60.0, engine="process")
    create(JobPaths(tmp_path / "a-1"), cluster="busy-1")  # its orchestrator has died
    engine = Whole()
    with supervised(tmp_path / "supervised-1"):
        cluster.remove_kept(engine, tmp_path)
    assert engine.calls == ["remove idle-1"]
    left = {"busy-1", "supervised-1", "a-1", "cluster-1", "local-1"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_the_files_of_a_clusters_jobs_must_be_kept_when_it_is_taken_down(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    for name in ("a-1", "b-1"):
        create(JobPaths(tmp_path / name), cluster="c-1").log(0).write_text(name)
    mine = {tmp_path / "mine": "x", one.paths.nodes / "mine": "written by a node", tmp_path / "c-1.txt": "y"}
    for path, text in mine.items():
        path.write_text(text)
    engine = Whole()
    cluster.take_down(engine, one, 7.0)
    assert (engine.calls, engine.graces) == (["remove c-1"], [7.0])
    assert {path.name for path in tmp_path.iterdir()} == {"a-1", "b-1", "mine", "c-1.txt"}
    assert (tmp_path / "mine").read_text() == "x"
    for name in ("a-1", "b-1"):
        assert not (tmp_path / name / "job").is_symlink()
        assert (tmp_path / name / "logs" / "rank-0.log").read_text() == name
        assert run_dir.load(JobPaths(tmp_path / name))[1].job_id == name


def test_the_files_of_a_cluster_must_be_kept_if_its_nodes_cannot_be_removed(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    engine = Whole()
    engine.remove = raising(EngineError("away"))
    with pytest.raises(EngineError):
        cluster.take_down(engine, one, 7.0)
    assert one.paths.spec.exists()


# --- every engine


@pytest.mark.parametrize(("run", "is_one"), [("runs/c-1/nodes", True), ("runs/nodes/a-1", False), ("runs/a-1", False)])
def test_a_cluster_must_be_distinguished_from_a_job_by_its_folder(run, is_one):
    assert JobState("x", "docker", 1, Path(run), 0).cluster is is_one


def test_keys_that_an_engine_does_not_support_must_be_named_if_they_are_set():
    keys = ("image", "memory", "shm_size", "encrypt")
    spec = JobSpec(memory="2g", encrypt=True, volume="x", optional=["encrypt", "memory"])
    assert ignoring(JobSpec(), keys, "an engine") == ""
    assert ignoring(spec, keys, "an engine") == ", ignoring memory, encrypt"
    with pytest.raises(UsageError, match="an engine does not support memory") as error:
        ignoring(dataclasses.replace(spec, optional=["encrypt"]), keys, "an engine")
    assert error.value.hint.endswith("--set optional=memory,encrypt")


def test_down_must_continue_if_a_job_has_replaced_its_folder(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    for name in ("a-1", "b-1"):
        create(JobPaths(tmp_path / name), cluster="c-1").log(0).write_text(name)
    shutil.rmtree(one.paths.nodes / "a-1")
    (one.paths.nodes / "a-1").symlink_to(tmp_path / "b-1")
    with pytest.raises(OrchestrateError, match="c-1 was removed, but the files of a-1 are lost"):
        cluster.take_down(Whole(), one, 7.0)
    assert not one.paths.root.exists() and (tmp_path / "b-1" / "logs" / "rank-0.log").read_text() == "b-1"


def test_files_next_to_the_folder_of_a_job_must_be_removed_with_it_but_no_other_job(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    ended, waiting = (create(JobPaths(tmp_path / name), cluster="c-1") for name in ("a-1", "b-1"))
    ended.log(0).write_text("mine")
    (one.paths.nodes / "kept").hardlink_to(ended.log(0))
    (one.paths.nodes / "a-2").mkdir()
    run_dir.move_from_cluster(ended)
    assert [path.name for path in one.paths.nodes.iterdir()] == ["b-1"] and waiting.log(0).parent.is_dir()
    assert ended.log(0).stat().st_nlink == 1


def test_attributes_that_a_job_sets_on_the_folder_of_its_cluster_must_be_reset(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    mine = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    no_access = struct.pack("<I" + "HHI" * 3, 2, *(part for tag in (1, 4, 32) for part in (tag, 0, 0xFFFFFFFF)))
    os.setxattr(one.paths.nodes, "system.posix_acl_default", no_access)  # of owner, group and others; see acl(5)
    os.setxattr(one.paths.nodes, "user.note", b"of job a")
    one.paths.nodes.chmod(0o2777)
    run_dir.move_from_cluster(mine)
    assert os.listxattr(one.paths.nodes) == [] and one.paths.nodes.stat().st_mode & 0o7777 == 0o755


def test_a_folder_that_a_job_has_moved_must_not_be_left_for_the_next_job(tmp_path):
    one = new_cluster(tmp_path)
    create(one.paths, cluster="c-1")
    mine = create(JobPaths(tmp_path / "a-1"), cluster="c-1")
    mine.folder.path.rename(one.paths.nodes / "elsewhere")
    (one.paths.nodes / "left").mkdir()
    with pytest.raises(FileNotFoundError):
        run_dir.move_from_cluster(mine)
    assert [*one.paths.nodes.iterdir()] == [] and mine.shared.is_dir() and not mine.shared.is_symlink()


def test_down_must_move_the_files_of_a_job_that_took_our_rights_to_its_folder(monkeypatch):
    with folder_of_user() as top:
        monkeypatch.setenv("XDG_STATE_HOME", str(top / "state"))

        def down() -> None:
            one, mine = with_job(top / "runs")
            mine.folder.path.chmod(0)
            one.paths.nodes.chmod(0)
            cluster.take_down(Whole(), one, 7.0)
            assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink()
            assert not one.paths.root.exists()

        as_user(down)


@pytest.mark.skipif(os.getuid() != 0, reason="must be root to give a folder to another user")
def test_files_that_cannot_be_moved_must_stay_with_their_cluster(monkeypatch):
    """As those of a job in a container that has given its folder to another user."""
    with folder_of_user() as top:
        monkeypatch.setenv("XDG_STATE_HOME", str(top / "state"))
        as_user(lambda: with_job(top / "runs"))
        one, mine = new_cluster(top / "runs"), JobPaths(top / "runs" / "a-1")
        there = mine.folder.path
        os.chown(there, 0, 0)

        def down() -> None:
            with pytest.raises(OSError, match="Permission denied"):
                run_dir.move_from_cluster(mine)
            with pytest.raises(
                OrchestrateError, match=f"cannot move {there} to {mine.root}: Permission denied"
            ) as error:
                cluster.take_down(Whole(), one, 7.0)
            assert "down c-1" in error.value.hint
            assert mine.log(0).read_text() == "mine" and one.jobs() == [mine]

        as_user(down)
        os.chown(there, one.paths.root.stat().st_uid, -1)
        as_user(lambda: cluster.take_down(Whole(), one, 7.0))
        assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink() and not one.paths.root.exists()


def test_a_move_that_was_interrupted_must_be_completed(tmp_path, monkeypatch):
    _, mine = with_job(tmp_path)
    unlink = Path.unlink
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "unlink", raising(KeyboardInterrupt()))
        run_dir.move_from_cluster(mine)
    assert Path.unlink is unlink and mine.shared.is_symlink() and not mine.folder.path.exists()
    run_dir.move_from_cluster(mine)
    assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink()


def test_a_link_to_a_cluster_that_comes_with_a_project_must_not_keep_it(tmp_path):
    one, mine = with_job(tmp_path)
    (tmp_path / "a-0000").mkdir()
    (tmp_path / "a-0000" / "job").symlink_to("../c-1/nodes/a-0000")
    assert one.jobs() == [mine]
    cluster.take_down(Whole(), one, 7.0)
    assert mine.log(0).read_text() == "mine" and not one.paths.root.exists()


def test_down_must_move_the_files_of_other_jobs_if_one_has_no_record(tmp_path):
    one, mine = with_job(tmp_path)
    other = create(JobPaths(tmp_path / "a-0000"), cluster="c-1")
    records.forget(other.root)
    with pytest.raises(OrchestrateError, match="cannot move .*/c-1/nodes/a-0000 to .*: .* has no record"):
        cluster.take_down(Whole(), one, 7.0)
    assert mine.log(0).read_text() == "mine" and not mine.shared.is_symlink() and other.log(0).parent.is_dir()
