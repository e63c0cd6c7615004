"""From a spec to a report: a job's name, its files, and the output while it runs."""

import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
from support.commanded import SPEC, create, end
from support.optional import not_none

from orchestrate.api.check_script import check_script
from orchestrate.errors import OrchestrateError, UsageError
from orchestrate.files import folder
from orchestrate.files.folder import Folder
from orchestrate.host import records
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.spec import JobSpec


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (JobSpec(), "digits"),
        (JobSpec(name="mine"), "mine"),
        (JobSpec(command=("-m", "my.module", "x")), "my-module"),
        (JobSpec(command=("-m", "app.train")), "app-train"),
        (JobSpec(command=("scripts/Train_MNIST.py", "x")), "train-mnist"),
        (JobSpec(command=("bash", "scripts/go.sh")), "go"),
        (JobSpec(command=("python", "-c", "x.py")), "python"),
        (JobSpec(command=("./tool", "x.py")), "x"),
        (JobSpec(name="  A  B!  "), "a-b"),
        (JobSpec(name="a" * 31 + "-b"), "a" * 31),
        (JobSpec(name="-" * 40 + "b"), "b"),
        (JobSpec(name="日本"), "job"),
    ],
)
def test_a_job_must_have_a_name_that_is_valid_for_docker_and_dns(tmp_path, spec, name):
    assert run_dir.slug(spec) == name
    first, second = (run_dir.new_paths(spec, tmp_path).root.name for _ in range(2))
    assert first != second and first.startswith(f"{name}-") and len(first) == len(name) + 7


def test_a_job_must_not_get_the_name_of_another_one(tmp_path, monkeypatch):
    (tmp_path / "a-000000").mkdir()
    (tmp_path / "a-000001").symlink_to("none")
    numbers = itertools.count()
    monkeypatch.setattr("secrets.token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
    assert run_dir.new_paths(JobSpec(name="a"), tmp_path).root == tmp_path / "a-000002"


def test_a_script_path_must_be_relative_to_the_code_folder(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").touch()
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path)
    spec = check_script(JobSpec(command=(f"{tmp_path}/sub/../sub/train.py", "a", "/b"), trainers=5))
    assert (spec.command, spec.trainers) == (("sub/train.py", "a", "/b"), 5)
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "sub")
    (tmp_path / "outside.py").touch()
    with pytest.raises(UsageError, match="is outside") as error:
        check_script(JobSpec(command=(f"{tmp_path}/outside.py",)))
    assert error.value.hint.endswith(f"cd {tmp_path}")


@pytest.mark.parametrize(("chdir", "kept"), [("a/b", "a/b"), ("./a//b/", "a/b"), ("link", "a/b"), (".", "")])
def test_paths_of_a_command_must_start_where_workers_start(tmp_path, monkeypatch, chdir, kept):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a/b")
    for place in (tmp_path, tmp_path / "a", tmp_path / "a" / "b"):
        (place / "train.py").touch()
    above = os.path.relpath(tmp_path, tmp_path / kept)
    for script in ("train.py", os.path.join(above, "a/train.py"), f"{tmp_path}/a/train.py"):
        spec = check_script(JobSpec(command=(script,), chdir=chdir))
        expected = script if script == "train.py" else os.path.relpath("a/train.py", kept or ".")
        assert (spec.command, spec.chdir) == ((expected,), kept)


@pytest.mark.parametrize("chdir", ["none", "file", "..", "/tmp", "out", "loop", "a\0b"])
def test_workers_must_start_in_a_folder_of_the_code(tmp_path, monkeypatch, chdir):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "out").symlink_to("..")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError, match="chdir: .* is no folder in ") as error:
        check_script(JobSpec(command=("file.py",), chdir=chdir))
    assert error.value.hint == "use a path relative to that folder"


def test_a_python_script_that_does_not_exist_must_be_refused_wherever_it_would_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in ("none.py", "sub/none.py", "/nowhere/none.py"):
        with pytest.raises(UsageError, match=f"the script {script} does not exist"):
            check_script(JobSpec(command=(script,)))


def test_a_script_that_looks_like_an_option_must_not_be_one_for_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-c.py").touch()
    assert check_script(JobSpec(command=("./-c.py", "-c"))).command == ("./-c.py", "-c")


def test_a_module_must_have_a_name_and_be_resolved_by_the_nodes():
    assert check_script(JobSpec(command=("-m", "nonesuch"))).command == ("-m", "nonesuch")
    with pytest.raises(UsageError):
        check_script(JobSpec(command=("-m",)))


# --- files

DEEP = pytest.param("[" * 100_000, id="deep")


@pytest.fixture
def paths(tmp_path):
    return JobPaths(tmp_path / "runs" / "a-1")


def test_a_job_must_be_loaded_from_its_files(paths):
    create(paths)
    spec, plan = run_dir.load(paths)
    assert (spec, plan.job_id, plan.command) == (SPEC, "a-1", SPEC.command)
    assert paths.logs.is_dir() and paths.checkpoints.is_dir()
    with pytest.raises(UsageError, match=f"cannot write to {paths.root}: File exists"):
        create(paths)
    assert run_dir.load(paths)[1].job_id == "a-1"  # still readable


def test_a_job_on_a_cluster_must_have_its_files_in_the_nodes_folder(paths):
    inside = paths.root.parent / "c-1" / "nodes" / "a-1"
    inside.parent.mkdir(parents=True)
    create(paths, cluster="c-1")
    assert paths.shared.is_symlink() and not paths.shared.readlink().is_absolute()
    assert {path.name for path in inside.iterdir()} == {"logs", "checkpoints"}
    run_dir.move_from_cluster(paths)
    assert not paths.shared.is_symlink() and paths.shared.is_dir() and run_dir.load(paths)[1].job_id == "a-1"
    assert not inside.exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("cluster", "target", "name"),
    [
        *((cluster, Folder, "make") for cluster in ("", "c-1", "a-1")),
        *((cluster, records, "write") for cluster in ("", "c-1", "a-1")),
        *((cluster, run_dir, "keep") for cluster in ("", "c-1", "a-1")),
        *((cluster, Path, "symlink_to") for cluster in ("", "c-1")),
    ],
)
def test_partially_created_files_of_a_job_must_be_removed(paths, monkeypatch, cluster, target, name, error):
    inside = paths.root.parent / "c-1" / "nodes"
    (inside / "b-1").mkdir(parents=True)
    original = getattr(target, name)

    def fail(*arguments, **options):
        original(*arguments, **options)
        raise error

    monkeypatch.setattr(target, name, fail)
    with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
        create(paths, cluster=cluster)
    if isinstance(error, OSError):
        assert str(raised.value) == f"cannot write to {paths.root}: No space left on device"
    assert [path.name for path in paths.root.parent.iterdir()] == ["c-1"]
    assert [path.name for path in inside.iterdir()] == ["b-1"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"inventory": []}', '{"inventory": {"cores": 1}}', "7", "\0", "[" * 100_000]
)
def test_an_invalid_plan_must_be_refused_with_its_folder(paths, text):
    create(paths)
    paths.plan.write_text(text)
    with pytest.raises(UsageError, match=f"{paths.root} does not contain a job"):
        run_dir.load(paths)


def test_a_plan_with_an_unknown_key_must_be_refused(paths):
    create(paths)
    paths.plan.write_text(json.dumps({**json.loads(paths.plan.read_text()), "later": 1}))
    with pytest.raises(UsageError):
        run_dir.load(paths)


def test_the_plan_of_another_job_and_a_missing_job_folder_must_be_refused(paths):
    create(paths)
    text = paths.plan.read_text()
    records.write(paths.plan, text.replace('"a-1"', '"b-1"'))
    with pytest.raises(UsageError, match="its plan belongs to 'b-1'"):
        run_dir.load(paths)
    records.write(paths.plan, text)
    shutil.rmtree(paths.shared)
    with pytest.raises(UsageError, match="job is missing"):
        run_dir.load(paths)


def test_a_job_folder_on_another_cluster_must_be_refused(paths):
    for name in ("c-1/nodes", "c-2/nodes/a-1"):
        (paths.root.parent / name).mkdir(parents=True)
    create(paths, cluster="c-1")
    assert run_dir.load(paths)
    paths.shared.unlink()
    paths.shared.symlink_to("../c-2/nodes/a-1")
    with pytest.raises(UsageError, match="job is not a folder"):
        run_dir.load(paths)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"succeeded"', "null", DEEP])
def test_an_invalid_report_must_not_count_as_the_end_of_a_job(paths, text):
    create(paths)
    assert run_dir.ended(paths) is None
    records.write(paths.report, text)
    assert run_dir.ended(paths) is None
    end(paths, "rescaled")
    assert run_dir.ended(paths) is None
    end(paths)
    assert not_none(run_dir.ended(paths))["outcome"] == "succeeded"
    whole = json.loads(paths.report.read_text())
    for key in ("outcome", "world_size", "failures"):
        records.write(paths.report, json.dumps({name: value for name, value in whole.items() if name != key}))
        assert run_dir.ended(paths) is None


@pytest.mark.parametrize("name", ["job.yaml", "plan.json"])
def test_a_replaced_file_must_be_refused(paths, name):
    create(paths)
    path = paths.root / name
    path.write_text(
        path.read_text().replace("engine: docker", "engine: process").replace("trainers: 2", "trainers: 1") + "\n"
    )
    with pytest.raises(UsageError, match=f"{name} has been changed"):
        run_dir.load(paths)


def test_a_replaced_report_must_not_count(paths):
    create(paths)
    end(paths)
    original = paths.report.read_text()
    paths.report.write_text(original.replace("succeeded", "failed"))
    assert run_dir.ended(paths) is None
    paths.report.write_text(original)
    assert not_none(run_dir.ended(paths))["outcome"] == "succeeded"


def test_a_job_must_be_removed_completely_or_raise_the_reason(paths):
    create(paths)
    paths.log(0).touch()
    run_dir.remove(paths)
    assert not paths.root.exists() and paths.root.parent.exists()
    with pytest.raises(OrchestrateError, match=f"cannot remove {paths.root}"):
        run_dir.remove(paths)


def test_a_job_that_cannot_be_removed_must_keep_its_record(paths, monkeypatch):
    """Otherwise its secrets would be shown, and no command could remove it."""

    def fail(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path / "file"))

    create(paths)
    monkeypatch.setattr(folder, "remove", fail)
    with pytest.raises(OrchestrateError, match=f"cannot remove {paths.root}.*Operation not permitted"):
        run_dir.remove(paths)
    assert records.find(paths.root)
