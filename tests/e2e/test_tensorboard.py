"""A job's metrics in TensorBoard."""

from support.tensorboard import curves


def test_a_job_must_be_in_tensorboard(cli, nothing_left):
    (cli.folder / "say.py").write_text("for step in range(1, 4):\n    print('loss', 1 / step)\n")
    done = cli("run", "--engine", "process", "--trainers", "0", "say.py")
    assert done.returncode == 0, done.stderr
    assert [round(value, 3) for _, value in curves(cli.run_dir())["loss"]] == [1.0, 0.5, 0.333]
