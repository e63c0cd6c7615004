"""Code of a job from a folder, or from a revision of a Git repository; what a report says of it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from orchestrate.errors import ResourceError, UsageError
from orchestrate.spec import source, worktree
from orchestrate.spec.layers import resolve
from orchestrate.spec.redact import Mask

OPTIONS = ("--trainers", "1", "--gpus", "none")


def git(folder, *arguments: str) -> str:
    env = os.environ | {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(["git", "-C", str(folder), *arguments], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(cli, tmp_path, monkeypatch):
    """A repository with two commits and a tag of the first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cli.env["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    folder = tmp_path / "repository"
    (folder / "train").mkdir(parents=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    for number in (1, 2):
        (folder / "train" / "say.py").write_text(f"print('version {number}')\n")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "--message", f"version {number}")
        git(folder, "tag", f"v{number}")
    return folder


@pytest.mark.any_engine
def test_a_revision_must_be_run_and_reported(cli, engine, repository):
    commit = git(repository, "rev-parse", "v1")
    url = f"git+file://{repository}@v1#train"
    done = cli("run", "--engine", engine, *OPTIONS, "--source", url, "say.py")
    assert done.returncode == 0, done.stderr
    assert "version 1" in done.stdout and f"source: file://{repository} at {commit[:12]}" in done.stderr
    report = cli.report()
    assert (report["commit"], report["dirty"]) == (commit, False)
    assert f"source: {url}\n" in (cli.run_dir() / "job.yaml").read_text()
    again = cli("run", "--engine", engine, *OPTIONS, "--source", f"git+file://{repository}#train", "say.py")
    assert "version 2" in again.stdout, again.stderr


def test_workers_must_not_change_the_checkout_that_later_runs_use(cli, engine, repository):
    (repository / "train" / "say.py").write_text("open('out', 'w').write('x'); open('say.py', 'a').write('#')\n")
    git(repository, "commit", "--all", "--quiet", "--message", "writes")
    commit = git(repository, "rev-parse", "HEAD")
    done = cli("run", "--engine", engine, *OPTIONS, "--source", f"git+file://{repository}#train", "say.py")
    assert done.returncode == 0, done.stderr
    cache = source.parsed(f"git+file://{repository}").cache
    checkout = cache / commit / "train"
    assert checkout.joinpath("say.py").read_text() == (repository / "train" / "say.py").read_text()
    assert not checkout.joinpath("out").exists()
    assert sorted(cli.report()["written"]) == ["out", "say.py"]


def test_a_commit_that_was_fetched_must_need_no_repository(cli, repository, nothing_left):
    commit = git(repository, "rev-parse", "v1")
    run = ("run", "--engine", "process", *OPTIONS, "--source", f"git+file://{repository}@{commit}#train", "say.py")
    assert cli(*run).returncode == 0
    repository.rename(repository.with_name("moved"))
    done = cli(*run)
    assert done.returncode == 0 and "version 1" in done.stdout, done.stderr


def test_a_folder_must_be_run_and_other_paths_must_start_at_the_current_folder(cli, repository, nothing_left):
    (cli.folder / "data").mkdir()
    (cli.folder / "data" / "a").write_text("x")
    (repository / "train" / "say.py").write_text("import os; print(os.listdir(os.environ['DATA_TRAIN']))\n")
    run = ("run", "--engine", "process", *OPTIONS, "--data", "train=data", "--source", "repository/train", "say.py")
    done = cli(*run)
    assert done.returncode == 0 and "['a']" in done.stdout, done.stderr
    report = json.loads(next(cli.folder.glob("runs/*/report.json")).read_text())
    assert (report["commit"], report["dirty"]) == (git(repository, "rev-parse", "HEAD"), True)
    assert report["code"] == str(repository / "train")
    (patch,) = cli.folder.glob("runs/*/changes.patch")
    assert "-print('version 2')\n+import os; print(os.listdir(os.environ['DATA_TRAIN']))\n" in patch.read_text()
    assert patch.stat().st_mode & 0o777 == 0o600
    assert '<a href="changes.patch">' in patch.with_name("report.html").read_text()


def test_a_resumed_job_must_have_the_changes_of_the_code_that_it_runs(cli, repository, nothing_left):
    def say(text: str) -> None:
        (repository / "train" / "say.py").write_text(text)

    def resumed() -> str:
        cli("resume")
        patch = cli.run_dir() / "changes.patch"
        return patch.read_text() if patch.exists() else ""

    say("raise SystemExit('first')\n")
    run = ("run", "--engine", "process", *OPTIONS, "--max-restarts", "0", "--source", "repository/train", "say.py")
    assert cli(*run).returncode == 1
    say("raise SystemExit('second')\n")
    assert "+raise SystemExit('second')" in (text := resumed()) and "first" not in text
    git(repository, "commit", "--all", "--quiet", "--message", "second")
    assert resumed() == "" and cli.report()["dirty"] is False


def test_files_that_git_does_not_track_must_not_make_a_folder_dirty(repository):
    (repository / "runs").mkdir()
    (repository / "runs" / "x").touch()
    assert worktree.revision(repository)() == git(repository, "rev-parse", "HEAD")


@pytest.mark.parametrize("driver", ["x", "a=b.c"])
def test_filters_that_a_repository_names_must_not_run(repository, tmp_path, driver):
    (repository / ".gitattributes").write_text(f"* filter={driver}\n")
    git(repository, "add", ".gitattributes")
    git(repository, "commit", "--quiet", "--message", "attributes")
    for key in ("clean", "process"):
        git(repository, "config", f"filter.{driver}.{key}", f"touch {tmp_path}/evil; cat")
    git(repository, "config", f"filter.{driver}.required", "true")
    (repository / "train" / "say.py").write_text("print('changed 2')\n")
    git(repository, "config", "diff.external", f"touch {tmp_path}/evil")
    git(repository, "config", "diff.y.textconv", f"touch {tmp_path}/evil; cat")
    (repository / ".git" / "info" / "attributes").write_text("* diff=y\n")
    assert worktree.revision(repository)() == git(repository, "rev-parse", "HEAD") + "-dirty"
    assert "+print('changed 2')" in worktree.changes(repository, Mask({}))
    assert not (tmp_path / "evil").exists()


def test_objects_that_a_repository_leaves_out_must_not_be_fetched(repository, tmp_path):
    (repository / "evil.sh").write_text(f"#!/bin/sh\ntouch {tmp_path}/evil\n")
    (repository / "evil.sh").chmod(0o755)
    tree = git(repository, "rev-parse", "HEAD:train")
    (repository / ".git" / "objects" / tree[:2] / tree[2:]).unlink()
    (repository / ".git" / "index").unlink()  # has a copy of the tree
    settings = {"core.repositoryFormatVersion": "1", "extensions.partialClone": "x", "remote.x.promisor": "true"}
    settings |= {"remote.x.url": "ssh://host/a", "core.sshCommand": str(repository / "evil.sh")}
    for name, value in settings.items():
        git(repository, "config", name, value)
    worktree.revision(repository)()
    assert worktree.changes(repository, Mask({})) == "" and not (tmp_path / "evil").exists()


def test_variables_of_a_git_hook_must_not_lead_to_another_repository(repository, tmp_path, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    (tmp_path / "other").mkdir()
    git(tmp_path / "other", "init", "--quiet")
    index = (repository / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_INDEX_FILE", str(repository / ".git" / "index"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    assert worktree.revision(repository)() == commit
    assert source.check_out(source.parsed(f"git+file://{repository}@v1")).is_dir()
    assert (repository / ".git" / "index").read_bytes() == index


def test_a_link_of_the_repository_must_not_lead_out_of_it(repository, tmp_path):
    (tmp_path / "private").mkdir()
    (repository / "link").symlink_to(tmp_path / "private")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "--message", "link")
    with pytest.raises(UsageError, match="link leads out of the repository"):
        source.enter(resolve({"source": f"git+file://{repository}#link"}))


def test_a_cache_that_an_interrupted_run_has_left_must_be_used(repository):
    found = source.parsed(f"git+file://{repository}")
    (found.cache / "git").mkdir(parents=True)
    assert source.check_out(found).is_dir()
    for number, name in enumerate(("shallow.lock", "index.lock")):
        (found.cache / "git" / name).touch()
        git(repository, "commit", "--quiet", "--allow-empty", "--message", f"another {number}")
        assert source.check_out(found).name == git(repository, "rev-parse", "HEAD")


def test_nodes_of_another_user_must_be_able_to_read_a_checkout_despite_a_umask(repository):
    earlier = os.umask(0o077)
    try:
        folder = source.check_out(source.parsed(f"git+file://{repository}"))
    finally:
        os.umask(earlier)
    modes = [oct(path.stat().st_mode & 0o777) for path in (folder, folder / "train", folder / "train" / "say.py")]
    assert modes == ["0o755", "0o755", "0o644"]


def test_a_checkout_must_be_known_in_a_cache_that_is_a_link(repository, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    folder = source.check_out(source.parsed(f"git+file://{repository}"))
    monkeypatch.chdir(folder / "train")
    assert worktree.revision(Path.cwd())() == git(repository, "rev-parse", "HEAD")


def test_programs_that_a_repository_names_must_not_run(repository, tmp_path):
    (repository / "evil.sh").write_text(f"#!/bin/sh\ntouch {tmp_path}/evil\n")
    (repository / "evil.sh").chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(repository / "evil.sh"))
    assert worktree.revision(repository)() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("@none", "source: git: .*none"),
        ("-none", "source: git: .*"),
        ("#none", "source: cannot enter the folder none of file:///.*/repository: No such"),
    ],
)
def test_a_source_that_does_not_exist_must_be_refused(repository, where, message):
    with pytest.raises((ResourceError, UsageError), match=message):
        source.enter(resolve({"source": f"git+file://{repository}{where}"}))


def test_a_source_without_a_script_must_be_refused(cli, repository):
    done = cli("run", "--engine", "process", "--source", str(repository))
    assert (done.returncode, "no script given, although source is set" in done.stderr) == (2, True)
