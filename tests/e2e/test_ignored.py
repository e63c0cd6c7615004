"""What .dockerignore lists must not be in containers."""

from support.leftovers import leftovers

# --- on a real engine


def test_a_refusal_must_leave_no_run_directory(cli, docker_engine, nothing_left):
    (cli.folder / "work.py").touch()
    (cli.folder / ".dockerignore").symlink_to("/dev/zero")
    for arguments in (["run", "--engine", "docker", "--", "work.py"], ["up", "--engine", "docker"]):
        done = cli(*arguments)
        assert done.returncode == 2 and "it is a link" in done.stderr and "hint: replace it" in done.stderr
    assert list(cli.folder.glob("runs/*")) == [] and leftovers(cli.folder) == {}


def test_a_thousand_files_and_folders_must_be_hidden(cli, docker_engine, nothing_left):
    (cli.folder / ".dockerignore").write_text("data/*\n")
    for number in range(1000):
        (cli.folder / "data" / f"folder-{number}").mkdir(parents=True)
        (cli.folder / "data" / f"file-{number}").write_text("x")
    script = "import pathlib\ndata = pathlib.Path('/workspace/data')\n"
    script += "print(sum(path.stat().st_size for path in data.glob('file-*')))\nprint(len(list(data.iterdir())))\n"
    (cli.folder / "looks.py").write_text(script + "print(len(list(pathlib.Path('data').iterdir())))\n")
    done = cli("run", "--engine", "docker", "--trainers", "1", "--gpus", "none", "--", "looks.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(0).splitlines()[-3:] == ["0", "2000", "0"]
