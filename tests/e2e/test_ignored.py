"""What .dockerignore lists must not be in containers."""

import os

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


def test_files_must_be_hidden_whatever_their_names(cli, docker_engine, nothing_left):
    names = [
        "a:b",
        "a:ro",
        "s\x85nel",
        "s nel",
        "s\u2028line",
        "\ufeffmark",
        "it's",
        'so "so"',
        "new\nline",
        "$HOME",
        " é\x01",
    ]
    (cli.folder / ".dockerignore").write_text("*.key\n*.dir\n")
    for name in names:
        (cli.folder / f"{name}.key").write_text("secret")
        (cli.folder / f"{name}.dir").mkdir()
        (cli.folder / f"{name}.dir" / "file").write_text("secret")
    os.mkfifo(cli.folder / "pipe: a")
    script = "import pathlib\nhere = pathlib.Path('/workspace')\n"
    script += "print([path.read_text() for path in here.glob('*.key')], [*here.glob('*.dir/*')])\n"
    (cli.folder / "looks.py").write_text(script)
    done = cli("run", "--engine", "docker", "--trainers", "0", "--gpus", "none", "--", "looks.py")
    assert done.returncode == 0, done.stderr
    assert cli.log(0).splitlines() == [f"{[''] * len(names)} []"]
