"""Nodes must run as the user who starts the job, and as root only if root requests it."""

import grp
import os
import pwd
from collections.abc import Callable

import pytest
from support.plans import HERE, plan

from orchestrate.errors import UsageError
from orchestrate.host import users
from orchestrate.record import run_dir
from orchestrate.record.paths import JobPaths
from orchestrate.spec.layers import resolve
from orchestrate.spec.spec import JobSpec

SUDO = {"SUDO_UID": "7", "SUDO_GID": "8"}
NODE = users.without_account()


@pytest.mark.parametrize(
    ("caller", "setting", "environ", "user"),
    [
        (5, "auto", {}, None),
        (5, "auto", SUDO, None),  # not root, so SUDO_UID does not apply
        (0, "auto", {}, NODE),
        (0, "auto", SUDO, (7, 8)),
        (0, "auto", {"SUDO_UID": "0", "SUDO_GID": "0"}, NODE),  # sudo called by root
        (0, "auto", {"SUDO_UID": "7"}, NODE),
        (0, "auto", {"SUDO_UID": "4294967295", "SUDO_GID": "4294967295"}, NODE),  # to chown, it means "unchanged"
        (0, "auto", {"SUDO_UID": "99999999999", "SUDO_GID": "7"}, NODE),
        (0, "auto", {"SUDO_UID": "-1", "SUDO_GID": "x"}, NODE),
        (0, "root", SUDO, (0, 0)),
        (0, "7", {}, (7, 7)),
        (0, "7:8", {}, (7, 8)),
        (5, "5:6", {}, (5, 6)),
    ],
)
def test_nodes_must_run_as_you_or_as_an_unprivileged_user_if_you_are_root(monkeypatch, caller, setting, environ, user):
    monkeypatch.setattr(os, "geteuid", lambda: caller)
    assert users.nodes_of(setting, environ) == user


def test_the_user_of_nodes_started_by_root_must_have_no_account(monkeypatch):
    assert NODE[0] == NODE[1] and NODE[0] in range(61000, 61184)  # https://systemd.io/UIDS-GIDS
    with pytest.raises(KeyError):
        pwd.getpwuid(NODE[0])
    user, group = pwd.getpwuid(0), grp.getgrgid(0)
    users_taken, groups_taken = {61000, 61001}, {61002}

    def taken(numbers: set[int], entry: object) -> Callable[[int], object]:
        def find(number: int) -> object:
            if number in numbers:
                return entry
            raise KeyError(number)

        return find

    monkeypatch.setattr(pwd, "getpwuid", taken(users_taken, user))
    monkeypatch.setattr(grp, "getgrgid", taken(groups_taken, group))
    assert users.without_account() == (61003, 61003)
    users_taken.update(range(61000, 61184))
    with pytest.raises(UsageError, match="all user IDs from 61000 to 61183 are taken") as error:
        users.without_account()
    assert "user=UID:GID" in error.value.hint


@pytest.mark.parametrize("setting", ["root", "7", "0:5"])
def test_only_root_must_be_allowed_to_choose_another_user(monkeypatch, setting):
    monkeypatch.setattr(os, "geteuid", lambda: 5)
    with pytest.raises(UsageError, match=f"user is {setting}, but you are not root"):
        users.nodes_of(setting)


@pytest.mark.parametrize("setting", ["me", "-1", "1:", ":1", "1:2:3", "root:root", ""])
def test_an_invalid_user_must_be_refused(setting):
    with pytest.raises(UsageError, match="user"):
        resolve({"user": setting})


@pytest.mark.parametrize(
    ("mode", "kind", "readers"),
    [
        (0o700, "folder", {"owner", "root"}),
        (0o750, "folder", {"owner", "group", "root"}),
        (0o755, "folder", {"owner", "group", "other", "root"}),
        (0o744, "folder", {"owner", "root"}),  # only its file names can be read
        (0o705, "folder", {"owner", "other", "root"}),
        (0o604, "file", {"owner", "other", "root"}),
        (0o000, "file", {"root"}),
    ],
)
def test_read_access_must_be_derived_from_the_mode(tmp_path, mode, kind, readers):
    path = tmp_path / "path"
    path.mkdir() if kind == "folder" else path.touch()
    path.chmod(mode)
    status = path.stat()
    user, group = status.st_uid or 77, status.st_gid
    if not status.st_uid:
        os.chown(path, user, group)
    identities = {"owner": (user, group), "group": (5, group), "other": (5, 5), "root": (0, 0)}
    assert {name for name, (uid, gid) in identities.items() if users.can_read(path, uid, gid)} == readers


@pytest.mark.skipif(os.getuid() != 0, reason="must be root for nodes of another user")
@pytest.mark.parametrize(("engine", "owner"), [("docker", (7, 8)), ("process", (0, 0))])
def test_only_the_folders_of_nodes_in_containers_must_belong_to_their_user(tmp_path, engine, owner):
    paths = JobPaths(tmp_path / "a-1")
    spec = JobSpec(user="7:8")
    run_dir.create(spec, plan(spec, HERE.but(engine=engine), "a-1", 29500), paths)
    owned_by_nodes = {paths.shared, *paths.shared.iterdir()}
    assert {path.name for path in owned_by_nodes} == {"job", "logs", "checkpoints"}
    for path in (paths.root, *paths.root.iterdir(), *owned_by_nodes):
        status = path.lstat()
        assert (status.st_uid, status.st_gid) == (owner if path in owned_by_nodes else (0, 0)), path
