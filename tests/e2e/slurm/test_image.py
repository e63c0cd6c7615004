"""The engine `slurm` with a container image: Apptainer or Pyxis, where the cluster has one; see CONTRIBUTING.md."""

import pytest
from e2e.slurm.test_engine import Jobs, report
from e2e.slurm.test_export import Slurm
from support.cli import Cli
from support.faults import complete
from support.waiting import eventually

pytestmark = [pytest.mark.docker, pytest.mark.slow]
LOOKS = """import os
import pathlib
import sys

found = pathlib.Path(os.environ["DATA_WORDS"], "word").read_text()
print(sys.executable, pathlib.Path("/in-the-image").exists(), found, pathlib.Path.cwd().name, flush=True)
"""


@pytest.fixture(scope="module")
def image(machines):
    """An image without torch: a folder for Apptainer, a file for Pyxis."""
    pyxis = "--container-image" in machines("srun", "--help")
    if not pyxis and not machines("which", "apptainer"):
        pytest.skip("this cluster has neither Apptainer nor Pyxis")
    image = machines.folder / "image"
    for name in ("tmp", "proc", "sys", "dev", "root", "run", "var/tmp", "opt"):
        (image / name).mkdir(parents=True)
    (image / "in-the-image").touch()
    what = "bin etc lib lib64 sbin usr"
    machines("sh", "-c", f"tar -C / -c {what} | tar -C {image} -x && ln -sf python3 {image}/usr/bin/python")
    if not pyxis:
        return image
    machines("mksquashfs", str(image), f"{image}.sqsh", "-noI", "-noD", "-noF", "-noX")
    return image.with_suffix(".sqsh")


@pytest.fixture
def jobs(machines, folder, nothing_left):
    yield Jobs(machines, folder)
    machines.settle()


def test_nodes_must_run_in_the_image_with_their_data(jobs, image):
    (jobs.folder / "looks.py").write_text(LOOKS)
    (jobs.folder / "words").mkdir()
    (jobs.folder / "words" / "word").write_text("hello")
    arguments = ["--image", str(image), "--set", "data.words=words"]
    code, out, err = jobs("run", "--engine", "slurm", "--nodes", "2", *arguments, "--", "looks.py")
    assert code == 0, err
    (run,) = jobs.folder.glob("runs/*")
    for rank in range(2):
        assert (run / "logs" / f"rank-{rank}.log").read_text() == "/usr/bin/python True hello work\n"
    assert f"image {image}" in err


def test_a_killed_worker_in_an_image_must_restart_the_gang(jobs, image):
    run = jobs.detach("--nodes", "2", "--image", str(image), "--", "count.py", "until-restarted")
    eventually(lambda: len(jobs.steps(run, 1)) > 25)
    assert jobs("exec", run.name, "--rank", "1", "--", "ls", "/in-the-image")[1] == "/in-the-image\n"
    jobs.cluster.kill(jobs.pid(run, 1), "n2")
    assert jobs("attach", run.name)[0] == 0
    found = report(run)
    assert (found["outcome"], found["generations"], found["failures"][0]["cause"]) == ("succeeded", 2, "killed")
    assert all(complete(jobs.steps(run, rank)) for rank in range(2))


def test_an_exported_script_must_run_its_nodes_in_the_image(machines, image, folder, nothing_left):
    slurm = Slurm(Cli(folder), machines)
    (folder / "looks.py").write_text(LOOKS)
    (folder / "words").mkdir()
    (folder / "words" / "word").write_text("hello")
    form = "apptainer" if image.is_dir() else "pyxis"
    variables = ["-e", f"DATA_WORDS={folder}/words"]
    job = slurm.submit("--form", form, "--image", str(image), *variables, "--", "looks.py")
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED"))
    assert slurm.state(job) == "COMPLETED", slurm.output()
    for rank in range(2):
        assert slurm.log("looks", rank) == f"/usr/bin/python True hello {folder.name}\n"
    machines.settle()
