"""What a script writes beside itself must stay with the job, on a real engine."""

import textwrap

import pytest

WRITES = textwrap.dedent("""
    import os, pathlib, sys, helper
    count = pathlib.Path("count")
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(helper.__file__, sorted(os.listdir()))
    if os.environ["RANK"] == "0":
        assert count.exists() == (generation > 0)
        count.write_text(str(generation))
        pathlib.Path("runs").mkdir(exist_ok=True)
        pathlib.Path("runs/events").write_text("as TensorBoard writes them")
        pathlib.Path("model.pt").write_text("a new model")
        sys.exit(generation == 0)
""")


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["own nodes", "cluster"])
def test_what_a_script_writes_beside_itself_must_stay_with_the_job(cli, docker_engine, nothing_left, kind):
    (cli.folder / "train.py").write_text(WRITES)
    (cli.folder / "helper.py").write_text("")
    (cli.folder / "model.pt").write_text("an old model")
    if kind == "cluster":
        assert cli("up", "--trainers", "1", "--gpus", "none", "--set", "warm=false").returncode == 0
    done = cli("run", "--trainers", "1", "--gpus", "none", "train.py")
    assert done.returncode == 0, done.stderr
    work_folder = cli.run_dir() / "work"
    assert f"\nthe workers wrote 3 files: {work_folder.resolve().parents[1] / 'work'}\n" in done.stderr
    report = cli.report()
    assert (report["generations"], report["written"]) == (2, ["count", "model.pt", "runs/events"])
    assert report["working_directory"] == str(cli.run_dir().resolve() / "work")
    files = [path for path in work_folder.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(work_folder)) for path in files) == report["written"]
    assert (work_folder / "count").read_text() == "1"
    assert (cli.folder / "model.pt").read_text() == "an old model"
    assert "work/helper.py" in cli.log(1)
    if kind == "cluster":
        assert cli("down", "cluster").returncode == 0
