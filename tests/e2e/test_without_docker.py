"""Commands must work without a Docker Engine."""


def test_commands_must_work_without_a_docker_engine(cli):
    done = cli("ps", DOCKER_HOST="unix:///nowhere.sock")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("NAME ")
