"""The commit of a folder's files, and the changes since then, as far as git may be asked."""

import hashlib
import os
import shutil
import subprocess

import pytest
from support.commanded import create
from support.memory import peak
from support.plans import HERE, plan
from support.repositories import commit

from orchestrate.host import writable
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec import worktree
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec


def test_a_folder_without_a_repository_must_have_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert worktree.revision(tmp_path)() == worktree.changes(tmp_path, Mask({})) == ""


def test_changes_must_be_shown_as_the_environment_of_the_shell_configures_git(repository, monkeypatch):
    for name, value in (("COUNT", "1"), ("KEY_0", "diff.noprefix"), ("VALUE_0", "true")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    (repository / "train.py").write_text("x\n")
    assert "\n+++ train.py\n" in worktree.changes(repository, Mask({}))


def test_no_program_that_a_repository_names_must_run_to_show_its_changes(repository, tmp_path):
    (tmp_path / "evil.sh").write_text(f"#!/bin/sh\ntouch {tmp_path}/evil\n")
    (tmp_path / "evil.sh").chmod(0o755)
    (repository / ".git" / "info" / "attributes").write_text("* diff=x filter=x\n")
    with (repository / ".git" / "config").open("a") as config:
        for name in ("[diff]external", '[diff "x"]textconv', '[filter "x"]clean', "[core]fsmonitor"):
            config.write(f"{name} = {tmp_path}/evil.sh\n")
    (repository / "train.py").write_text("x\n")
    assert "\n+x\n" in worktree.changes(repository, Mask({})) and not (tmp_path / "evil").exists()


def test_the_index_of_a_repository_must_not_be_written(repository, tmp_path):
    """A job could put a link in its place, and git would write the index to its target."""
    (repository / ".git" / "index").rename(tmp_path / "index")
    (repository / ".git" / "index").symlink_to(tmp_path / "index")
    os.utime(repository / "train.py", (1, 1))  # so that git would note the new time
    before = (tmp_path / "index").stat().st_mtime_ns
    assert len(worktree.revision(repository)()) == 40 and worktree.changes(repository, Mask({})) == ""
    assert (tmp_path / "index").stat().st_mtime_ns == before


def test_a_file_that_has_changed_in_the_second_of_its_commit_must_be_seen_as_changed(repository):
    """Git keeps seconds, so with the same size only the time of the index tells it to read the file again."""
    path, index = repository / "train.py", repository / ".git" / "index"
    path.write_text("lr = 1\n")
    os.utime(path, (9, 9))
    commit(repository)
    path.write_text("lr = 2\n")
    for each in (path, index):
        os.utime(each, (9, 9))
    assert worktree.revision(repository)().endswith("-dirty")


def test_a_configuration_that_changes_meanwhile_must_not_count(repository, tmp_path, monkeypatch):
    """A job that can write to the repository could name a program just when git looks again."""
    (repository / ".git" / "info" / "attributes").write_text("* filter=x\n")
    (tmp_path / "git").write_text(
        f"""#!/bin/sh
{shutil.which("git")} "$@"; code=$?
printf '[filter "x"]\n clean = "touch {tmp_path}/evil; cat"\n' >> {repository}/.git/config
exit $code
"""
    )
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (repository / "train.py").write_text("x\n")
    assert worktree.revision(repository)().endswith("-dirty") and "\n+x\n" in worktree.changes(repository, Mask({}))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("kind", ["link", "file"])
def test_the_repository_of_another_working_tree_must_not_be_asked(repository, tmp_path, kind):
    (tmp_path / "project").mkdir()
    git = tmp_path / "project" / ".git"
    git.symlink_to(repository / ".git") if kind == "link" else git.write_text(f"gitdir: {repository / '.git'}\n")
    assert worktree.revision(tmp_path / "project")() == worktree.changes(tmp_path / "project", Mask({})) == ""


@pytest.mark.parametrize("part", ["alternates", "ref", "object"])
def test_a_repository_with_parts_of_another_one_must_not_be_asked(repository, tmp_path, part):
    shutil.copytree(repository, tmp_path / "project")
    of, git = repository / ".git", tmp_path / "project" / ".git"
    if part == "alternates":
        (git / "objects" / "info" / "alternates").write_text("../../../there/.git/objects\n")
    else:
        path = next((git / "objects").glob("??/*" if part == "object" else "../refs/heads/*"))
        path.unlink()
        path.symlink_to(of / path.relative_to(git))
    (tmp_path / "project" / "train.py").write_text("changed")
    assert worktree.revision(tmp_path / "project")() == worktree.changes(tmp_path / "project", Mask({})) == ""


@pytest.mark.parametrize("name", ["there", "a:b"])  # of which git takes the second for two folders
def test_the_repository_around_a_broken_one_must_not_be_asked(repository, tmp_path, name):
    around = repository.rename(tmp_path / name)
    for below in ("objects", "refs"):
        (around / "project" / ".git" / below).mkdir(parents=True)
    (around / "train.py").write_text("private")
    assert worktree.revision(around / "project")() == worktree.changes(around / "project", Mask({})) == ""


def test_the_repository_of_a_submodule_must_be_asked(repository, tmp_path):
    git = ["git", "-C", str(repository), "-c", "protocol.file.allow=always", "submodule", "--quiet", "add"]
    shutil.copytree(repository, tmp_path / "other")
    subprocess.run([*git, str(tmp_path / "other"), "below"], check=True)
    (repository / "below" / "train.py").write_text("x\n")
    assert worktree.revision(repository / "below")().endswith("-dirty")


@pytest.mark.parametrize("kind", ["sha1", "sha256", "worktree", "subfolder", "split index", "touched"])
def test_the_commit_must_be_known_and_whether_tracked_files_are_changed(repository, tmp_path, kind):
    git = ["git", "-C", str(repository)]
    if kind == "sha256":
        shutil.rmtree(repository / ".git")
        subprocess.run(["git", "init", "--quiet", "--object-format=sha256"], cwd=repository, check=True)
        commit(repository)
    (repository / "deep").mkdir()
    folder = {"worktree": tmp_path / "tree", "subfolder": repository / "deep"}.get(kind, repository)
    if kind == "worktree":
        subprocess.run([*git, "worktree", "add", "--quiet", str(folder)], check=True)
    if kind == "split index":
        subprocess.run([*git, "update-index", "--split-index"], check=True)
    file = (folder if kind == "worktree" else repository) / "train.py"
    if kind == "touched":
        os.utime(file, (1, 1))
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    (repository / "new.txt").touch()
    assert worktree.revision(folder)() == head and worktree.changes(folder, Mask({})) == ""
    file.write_text("x\n")
    assert worktree.revision(folder)() == f"{head}-dirty" and "\n+x\n" in worktree.changes(folder, Mask({}))


def test_lines_that_git_converts_and_a_changed_mode_must_count_as_git_counts_them(repository):
    git = ["git", "-C", str(repository)]
    (repository / "lines.txt").write_bytes(b"a\n")
    commit(repository)
    subprocess.run([*git, "config", "core.autocrlf", "true"], check=True)
    (repository / "lines.txt").write_bytes(b"a\r\n")
    assert not worktree.revision(repository)().endswith("-dirty")
    (repository / "train.py").chmod(0o755)
    assert worktree.revision(repository)().endswith("-dirty")
    subprocess.run([*git, "config", "core.filemode", "false"], check=True)
    assert not worktree.revision(repository)().endswith("-dirty")


def test_changes_must_be_kept_without_secrets_and_up_to_a_limit(repository, tmp_path):
    (repository / "train.py").write_text("login('hunter22')\n" + "x\n" * worktree.MAX_CHANGES)
    paths, spec = create(JobPaths(tmp_path / "a-1")), JobSpec(env={"A_TOKEN": "hunter22"})
    run_dir.keep_changes(spec, plan(spec, HERE.but(code=str(repository), revision="a-dirty"), "a-1"), paths)
    text = paths.patch.read_text()
    assert "\n+login('***')\n" in text and text.endswith("\n(and more)\n")
    assert len(text) < worktree.MAX_CHANGES + 100
    run_dir.keep_changes(spec, plan(spec, HERE.but(code=str(repository), revision="a"), "a-1"), paths)
    assert not paths.patch.exists()


def test_changes_that_are_cut_must_end_with_no_part_of_a_secret(repository, tmp_path, monkeypatch):
    (repository / "train.py").write_text("a" * 2000 + "hunter22" + "b" * 2000)
    whole = worktree.changes(repository, Mask({}))
    monkeypatch.setattr(worktree, "MAX_CHANGES", whole.index("hunter22") + 6)
    assert worktree.changes(repository, Mask({"A_TOKEN": "hunter22"})).endswith("aaa\n(and more)\n")


def test_changes_must_be_those_of_the_repository_and_not_of_a_folder_that_it_names(repository, tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "train.py").write_text("the host's\n")
    with (repository / ".git" / "config").open("a") as config:
        config.write(f"[core]\n worktree = {tmp_path}/secret\n")
    assert worktree.changes(repository, Mask({})) == ""
    (repository / "train.py").write_text("mine\n")
    assert "+mine\n" in (found := worktree.changes(repository, Mask({}))) and "host" not in found
    assert worktree.revision(repository)().endswith("-dirty")


@pytest.mark.parametrize("name", ["../secret", "{}/secret", ".git/secret", "a/../../secret"])
def test_files_outside_of_the_working_tree_must_not_be_shown_whatever_the_index_says(repository, tmp_path, name):
    """Git checks no path when it reads an index."""
    name = name.format(tmp_path)
    place = "x/" * (len(name) // 2 - 1) + "y" * (len(name) % 2 + 2)
    (repository / place).parent.mkdir(parents=True, exist_ok=True)
    (repository / place).write_text("the host's\n")
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    assert "+the host's" in worktree.changes(repository, Mask({}))
    index = repository / ".git" / "index"
    changed = index.read_bytes()[:-20].replace(place.encode(), name.encode())
    index.write_bytes(changed + hashlib.sha1(changed).digest())
    for secret in (tmp_path / "secret", repository / ".git" / "secret"):
        secret.write_text("the host's\n")
    (repository / "a").mkdir()
    assert "host" not in worktree.changes(repository, Mask({}))


def test_a_repository_that_a_job_could_write_must_not_be_asked(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (repository / "train.py").write_text("x\n")
    assert worktree.revision(repository)()
    writable.note([repository])
    assert worktree.revision(repository)() == worktree.changes(repository, Mask({})) == ""


def test_a_large_difference_must_not_be_read_whole(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (repository / "train.py").write_bytes(b"x\n" * (32 << 20))
    found, most = peak(lambda: worktree.changes(repository, Mask({})))
    assert len(found) < worktree.MAX_CHANGES + 100 and most < 16 * worktree.MAX_CHANGES
