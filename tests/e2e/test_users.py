"""Users of nodes, on a real engine."""

import os

import pytest

from orchestrate.host import users

NODE = users.without_account()


@pytest.mark.docker
@pytest.mark.skipif(os.getuid() != 0, reason="must be root to choose a user")
@pytest.mark.parametrize(("setting", "user"), [("auto", NODE[0]), ("4242:4243", 4242), ("root", 0)])
def test_workers_must_run_as_the_given_user_and_their_files_lose_set_user_id_bits(
    cli, docker_engine, nothing_left, setting, user
):
    (cli.folder / "who.py").write_text(
        "import os\npath = os.environ['JOB_DIR'] + '/file'\n"
        "open(path, 'w').close()\nos.chmod(path, 0o6755)\nprint('user', os.getuid(), oct(os.stat(path).st_mode))\n"
    )
    options = ("--engine", "docker", "--gpus", "none", "--trainers", "0", "--set", f"user={setting}")
    done = cli("run", *options, "--", "who.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(0) == f"user {user} 0o106755\n"
    status = (cli.run_dir() / "job" / "file").stat()
    assert (status.st_uid, status.st_mode) == (user, 0o100755)
