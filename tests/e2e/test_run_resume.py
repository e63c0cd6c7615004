"""`run --resume`, and `resume` in the background."""


def test_run_must_resume_a_job(cli, nothing_left):
    (cli.folder / "fails.py").write_text("import os, sys; sys.exit(os.path.exists('fail'))\n")
    (cli.folder / "fail").touch()
    run = ("run", "--engine", "process", "--trainers", "0", "--max-restarts", "0")
    assert cli(*run, "fails.py").returncode == 1
    (cli.folder / "fail").unlink()
    refused = cli("run", "--resume", "latest", "fails.py")
    assert (refused.returncode, "uses the script and the settings of the job" in refused.stderr) == (2, True)
    done = cli("run", "--resume", "latest")
    assert done.returncode == 0, done.stderr
    assert cli.report()["generations"] == 2


def test_a_job_must_be_resumed_in_the_background(cli, nothing_left):
    (cli.folder / "fails.py").write_text("import os, sys; sys.exit(os.path.exists('fail'))\n")
    run = ("run", "--engine", "process", "--trainers", "0", "--max-restarts", "0")
    for resume in (("resume", "--detach"), ("run", "--resume", "latest", "--detach")):
        (cli.folder / "fail").touch()
        assert cli(*run, "fails.py").returncode == 1
        (cli.folder / "fail").unlink()
        done = cli(*resume)
        assert (done.returncode, len(done.stdout.splitlines())) == (0, 1), done.stderr
        assert (cli.folder / done.stdout.strip() / "events.jsonl").exists() and "attach" in done.stderr
        assert cli("wait", done.stdout.strip()).returncode == 0


def test_a_job_must_have_the_same_folder_after_the_nodes_that_it_was_started_on(cli, docker_engine, nothing_left):
    """Libraries keep paths in checkpoints."""
    (cli.folder / "fails.py").write_text(
        "import os, sys; folder = os.environ['JOB_DIR']; file = open(f'{folder}/folders', 'a')\n"
        "print(folder, os.getcwd(), file=file); sys.exit(file.tell() < 3 * len(folder))\n"
    )
    run = ("run", "--keep", "5m", "--gpus", "none", "--trainers", "0", "--max-restarts", "0", "fails.py")
    assert cli(*run).returncode == 1
    assert cli("down").returncode == 0
    done = cli("resume")
    assert done.returncode == 0, done.stderr
    first, second = (cli.run_dir() / "job" / "folders").read_text().splitlines()
    assert first == second
