"""The sbatch script must request from Slurm what the job needs, and restart the job when it fails.

Slurm's commands are fake here; see test_slurm.py for a real Slurm.
"""

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.odd_text import odd
from support.waiting import eventually

from orchestrate.errors import UsageError
from orchestrate.export.slurm import slurm
from orchestrate.files.paths import NODE, PACKAGE
from orchestrate.spec.layers import resolve
from orchestrate.spec.spec import JobSpec


def test_sbatch_options_must_be_whole_numbers_and_limited_to_what_the_job_needs():
    script = slurm(resolve({"trainers": 0, "cpus": 1.5, "max_run": "61s", "grace": "1.5s"}), "x", "venv")
    for option in ("nodes=1", "ntasks-per-node=1", "cpus-per-task=2", "time=2", "signal=B:TERM@32"):
        assert f"#SBATCH --{option}\n" in script
    assert " --wait=12 " in script
    plain = slurm(resolve({"max_run": "1s"}), "x", "venv")
    assert "#SBATCH --time=1\n" in plain
    assert not any(f"#SBATCH --{name}=" in plain for name in ("mem", "gpus-per-node"))
    workers = slurm(resolve({"nproc_per_node": 8}), "x", "venv")
    assert "#SBATCH --cpus-per-task=8\n" in workers and " --cpus-per-task=8 --cpu-bind=none " in workers
    assert "--time=" not in slurm(resolve(), "x", "venv")


def test_options_of_the_job_must_be_options_of_sbatch():
    given = {"partition": "gpu", "time": "2h", "exclusive": True, "requeues": 3}
    script = slurm(resolve({"slurm": given, "max_run": "9h"}), "x", "venv")
    options = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"partition=gpu", "time=120", "exclusive"} < {*options} and "requeues" not in script


@pytest.mark.parametrize("value", ["gpu --output=/tmp/x", "a b", 'a"', "a'", "a#b", "a\\b", "a\tb"])
def test_a_value_that_sbatch_would_split_or_cut_must_be_refused(value):
    with pytest.raises(UsageError, match="slurm.partition: .* cannot be in a #SBATCH line"):
        slurm(JobSpec(slurm={"partition": value}), "x", "venv")


def test_an_image_that_no_machine_could_get_must_be_refused_and_a_file_be_used_as_it_is(monkeypatch):
    for form in ("apptainer", "pyxis"):
        with pytest.raises(UsageError, match=f"{form} cannot get orchestrate-node:0.1"):
            launched(form, "orchestrate-node:0.1", monkeypatch)
    for image in ("/shared/torch.sif", "./torch.sif", "oras://a/b:1"):
        assert image in launched("apptainer", image, monkeypatch)


COMMAND = ["train.py", "two words", "$HOME", "it's"]


def launched(form: str, image: str, monkeypatch, folder: str = "/my-code", arguments: list[str] = COMMAND) -> list[str]:
    """The arguments that start a node on each machine, as bash parses them."""
    monkeypatch.setattr("orchestrate.export.batch_text.code_folder", lambda command: folder)
    script = slurm(resolve({"command": arguments, "image": image}), "x", form)
    (launch,) = script.split("--wait=40 ")[1:]
    shell = f"JOB_DIR='/job dir/x'; printf '%s\\0' {launch.partition(' &')[0]}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_a_node_must_be_started_with_the_exact_command(monkeypatch):
    ours, other = "registry.example/orchestrate-node:0.1", "mine:1;$(a)',$JOB_DIR:$JOB_DIR"
    mounts = "/my-code:/my-code,/job dir/x:/job dir/x"
    node = ["python", "/opt/orchestrate/node", *COMMAND]
    assert launched("venv", ours, monkeypatch) == [sys.executable, str(NODE), *COMMAND]
    apptainer = ["apptainer", "exec", "--nv", "--pwd", "/my-code", "--bind"]
    assert launched("apptainer", ours, monkeypatch) == [*apptainer, mounts, f"docker://{ours}", *node]
    with_node = f"{mounts},{PACKAGE}:/opt/orchestrate"
    assert launched("apptainer", other, monkeypatch) == [*apptainer, with_node, f"docker://{other}", *node]
    for image, name, mounted in ((ours, "registry.example#orchestrate-node:0.1", mounts), (other, other, with_node)):
        assert launched("pyxis", image, monkeypatch) == [
            f"--container-image={name}",
            f"--container-mounts={mounted}",
            "--container-workdir=/my-code",
            *node,
        ]


@pytest.mark.parametrize("folder", ["/a:b", "/a,b", "/a^b", "/a\\", '/a"b', "/$(a)", "/a\nb", "/ a", "/it's"])
def test_a_folder_that_slurms_containers_cannot_mount_must_be_refused(monkeypatch, folder):
    assert launched("venv", "mine:1", monkeypatch, folder)
    for form in ("apptainer", "pyxis"):
        with pytest.raises(UsageError, match=f"{re.escape(ascii(folder))} cannot be mounted") as caught:
            launched(form, "mine:1", monkeypatch, folder)
        assert caught.value.hint


@pytest.mark.parametrize("user", ["root", "7:8"])
def test_another_user_must_be_refused_since_slurm_runs_a_job_as_its_submitter(user):
    with pytest.raises(UsageError, match=f"user is {user}, but Slurm runs a job as the user who submits it"):
        slurm(resolve({"user": user}), "x", "venv")


def test_a_folder_that_is_not_utf_8_must_be_refused(monkeypatch):
    with pytest.raises(UsageError, match="udcff' is not UTF-8"):
        launched("venv", "mine:1", monkeypatch, "/a\udcff")


def test_a_script_must_have_no_line_breaks_or_control_characters_from_values(monkeypatch):
    """sbatch refuses DOS line breaks, and a terminal would interpret control characters."""
    monkeypatch.setattr("orchestrate.export.batch_text.code_folder", lambda command: "/a\r\nb\x1b")
    arguments = odd(300)
    spec = resolve(
        {"command": ["train.py", *arguments], "env": {f"A_{number}": text for number, text in enumerate(arguments)}}
    )
    assert all(line.isprintable() for line in slurm(spec, "x", "venv").split("\n"))


def test_each_argument_of_the_command_must_pass_through_bash_unchanged(monkeypatch):
    arguments = ["train.py", *odd(300)]
    for form in ("venv", "apptainer", "pyxis"):
        assert (
            launched(form, "a.example/orchestrate-node:1", monkeypatch, arguments=arguments)[-len(arguments) :]
            == arguments
        )


# --- the script, run

SCONTROL = "#!/bin/bash\nprintf 'n%s\\n' 1 2\n"
SRUN = """\
#!/bin/bash
# Records how it was called; exits with the next code in the file `codes`, or waits for a signal if there is none.
cat /proc/$$/environ > "$HERE/environment"
pwd > "$HERE/where"
cd "$HERE"
printf '%s' "$A" > value
echo "$TORCHELASTIC_RESTART_COUNT $MASTER_PORT $MASTER_ADDR $JOB_DIR $(cat "$NODE_FAILED" 2> /dev/null)" >> calls
read -r code failed rest < codes || code=wait
sed -i 1d codes
[ "$code" != wait ] || { touch started; read -r code < asked; failed=; }
[ -z "$failed" ] || echo -n "$failed" > "$NODE_FAILED"
[ -z "${AFTER:-}" ] || eval "$AFTER"
exit "$code"
"""
SCANCEL = '#!/bin/bash\ncd "$HERE"\necho "$@" > cancelled\necho 7 > asked\n'


class Slurm:
    """A folder with fake Slurm commands, and what they have recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.more: dict[str, str] = {}  # more of the script's environment
        (folder / "bin").mkdir()
        for name, text in {"scontrol": SCONTROL, "srun": SRUN, "scancel": SCANCEL}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        os.mkfifo(folder / "asked")

    def start(self, *codes: str, **values: object) -> subprocess.Popen[str]:
        """Run the script; each of `codes` is srun's exit code and, if any, that of the worker that failed first."""
        (self.folder / "codes").write_text("".join(f"{code}\n" for code in codes))
        script = self.folder / "job.sh"
        script.write_text(slurm(resolve({"command": "train.py", "trainers": 1}, values), "digits", "venv"))
        variables = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(self.folder), "SLURM_JOB_NODELIST": "n[1-2]"}
        env = {"PATH": f"{self.folder}/bin:{os.environ['PATH']}", "HERE": str(self.folder), **variables}
        return subprocess.Popen(
            ["bash", str(script)], env=env | self.more, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def calls(self) -> list[list[str]]:
        """For each call of srun: generation, port, master, job folder, and what an earlier call has left."""
        return [line.split() for line in (self.folder / "calls").read_text().splitlines()]


@pytest.fixture
def scheduler(tmp_path):
    return Slurm(tmp_path)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def test_a_job_that_succeeds_must_run_once(scheduler):
    assert ended(scheduler.start("0")) == (0, "")
    ((generation, _, master, folder),) = scheduler.calls()
    assert (generation, master, folder) == ("0", "n1", f"{scheduler.folder}/runs/digits")
    assert Path(folder).is_dir()


def test_the_run_directory_must_be_private_and_reusable_by_another_submission(scheduler):
    for count in (1, 2):
        assert ended(scheduler.start("0")) == (0, "")
        assert len(scheduler.calls()) == count
    assert stat.S_IMODE((scheduler.folder / "runs" / "digits").stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["runs", "runs/digits"])
@pytest.mark.parametrize("kind", ["a link", "a dangling link", "a file", "another user's"])
def test_a_folder_that_is_not_the_submitters_own_must_be_refused(scheduler, tmp_path, name, kind):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    path = scheduler.folder / name
    path.parent.mkdir(exist_ok=True)
    if kind == "another user's":
        if os.getuid():
            pytest.skip("must be root to make a folder of another user")
        path.mkdir()
        os.chown(path, 12345, 12345)
    elif kind == "a file":
        path.touch()
    else:
        path.symlink_to(elsewhere if kind == "a link" else elsewhere / "none")
    code, stderr = ended(scheduler.start("0"))
    assert code == 2 and f"error: {path} is not a folder that you own" in stderr and "--name" in stderr
    assert not (scheduler.folder / "calls").exists() and not [*elsewhere.iterdir()]


def test_a_folder_that_a_generation_has_replaced_with_a_link_must_be_refused(scheduler, tmp_path):
    (elsewhere := tmp_path / "elsewhere").mkdir()
    scheduler.more = {"AFTER": f'mv "$JOB_DIR" "$JOB_DIR.old"; ln -s {elsewhere} "$JOB_DIR"'}
    code, stderr = ended(scheduler.start("1", "0"))
    assert code == 2 and "runs/digits is not a folder that you own" in stderr
    assert len(scheduler.calls()) == 1 and not [*elsewhere.iterdir()]


@pytest.mark.parametrize("text", ["link", "fifo", "folder", "canary", "3 canary", "0000", "999", "1234", "-1", ""])
def test_content_planted_in_the_failure_file_must_neither_be_shown_nor_block(scheduler, tmp_path, text):
    (tmp_path / "secret").write_text("canary")
    how = {"link": f"ln -sf {tmp_path}/secret", "fifo": "mkfifo", "folder": "mkdir"}.get(text, f"echo -n '{text}' >")
    scheduler.more = {"AFTER": f'{how} "$NODE_FAILED"'}
    code, stderr = ended(scheduler.start("9", max_restarts=0))
    assert (code, stderr) == (9, "generation 0 ended with exit code 9\n")


def test_a_link_that_came_with_the_code_must_be_refused_at_export(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert slurm(resolve({}), "digits", "venv")
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    assert slurm(resolve({}), "digits", "venv")  # to resume from its checkpoints with other settings
    (tmp_path / "runs" / "digits").rmdir()
    (tmp_path / "runs" / "digits").symlink_to("elsewhere")
    with pytest.raises(UsageError, match="runs/digits is a link") as error:
        slurm(resolve({}), "digits", "venv")
    assert "--name" in error.value.hint
    assert slurm(resolve({}), "other", "venv")
    (tmp_path / "runs").rename(tmp_path / "others")
    (tmp_path / "runs").symlink_to("others")
    with pytest.raises(UsageError, match="runs is a link"):
        slurm(resolve({}), "other", "venv")


def test_the_jobs_environment_and_folder_must_be_used_literally(scheduler, monkeypatch):
    code = scheduler.folder / "it's $HOME; my code"
    code.mkdir()
    monkeypatch.setattr("orchestrate.export.batch_text.code_folder", lambda command: code)
    assert ended(scheduler.start("0", env={"A": "two words; $HOME 'and' \\"})) == (0, "")
    assert (scheduler.folder / "value").read_text() == "two words; $HOME 'and' \\"
    assert (scheduler.folder / "where").read_text() == f"{code}\n"
    code.rmdir()
    assert ended(scheduler.start("0"))[0] == 2


def test_each_variable_must_reach_the_nodes_unchanged_and_not_affect_the_script(scheduler):
    texts = dict(enumerate(odd(300)))
    env = {f"ODD_{number}": text for number, text in texts.items()}
    env |= dict.fromkeys(("UID", "IFS", "PS4", "stop", "code", "step", "attempt", "_"), "0x")
    env |= {"SHELLOPTS": "posix", "BASH_ENV": "/dev/null", "PATH": "/usr/bin:/bin"}  # without Slurm's commands
    assert ended(scheduler.start("1", "0", env=env)) == (0, "generation 0 ended with exit code 1\n")
    entries = (scheduler.folder / "environment").read_bytes().decode().split("\0")
    assert {name: value for name, _, value in (line.partition("=") for line in entries) if name in env} == env


def test_secrets_must_come_from_the_environment_of_sbatch(scheduler):
    env = {"A": "b", "HF_TOKEN": "canary", "URL": "https://me:canary@host"}
    script = slurm(resolve({"env": env}), "digits", "venv")
    assert "canary" not in script and "HF_TOKEN" in script.splitlines()[3]
    code, stderr = ended(scheduler.start("0", env=env))
    assert code and "HF_TOKEN: set HF_TOKEN in the environment of sbatch" in stderr
    assert not (scheduler.folder / "calls").exists()
    scheduler.more = {"HF_TOKEN": "it's $HOME\n", "URL": "a"}
    assert ended(scheduler.start("0", env=env)) == (0, "")
    assert "\0HF_TOKEN=it's $HOME\n\0" in (scheduler.folder / "environment").read_text()


def test_a_failure_must_start_another_generation_on_a_new_port(scheduler):
    code, stderr = ended(scheduler.start("137 3", "1", "0"))
    assert code == 0
    assert "generation 0 ended with exit code 3" in stderr  # of the worker that failed first, not of srun
    assert "generation 1 ended with exit code 1" in stderr  # of srun, if no worker reports one
    calls = scheduler.calls()
    assert [call[0] for call in calls] == ["0", "1", "2"]
    assert all(len(call) == 4 for call in calls)  # the last generation's failure file is removed
    ports = {int(call[1]) for call in calls}
    assert len(ports) == 3 and all(20000 <= port < 40000 for port in ports)


def test_a_job_must_restart_at_most_max_restarts_times(scheduler):
    code, stderr = ended(scheduler.start("1 5", "1 6", "1 7", "0", max_restarts=2))
    assert code == 7 and len(scheduler.calls()) == 3
    assert stderr.count("ended with exit code") == 3
    scheduler.folder.joinpath("calls").unlink()
    assert ended(scheduler.start("4", "0", max_restarts=0))[0] == 4
    assert len(scheduler.calls()) == 1


@pytest.mark.parametrize("code", [2, 64, 78, 126, 127])
def test_a_permanent_failure_must_end_the_job(scheduler, code):
    assert ended(scheduler.start(f"1 {code}", "0")) == (code, "")
    assert len(scheduler.calls()) == 1


def test_a_job_requeued_by_slurm_must_get_later_generations(scheduler):
    scheduler.more = {"SLURM_RESTART_COUNT": "2"}
    assert ended(scheduler.start("1", "0", max_restarts=4))[0] == 0
    assert [call[0] for call in scheduler.calls()] == ["10", "11"]


def test_the_time_limit_must_reach_the_nodes_and_start_no_other_generation(scheduler):
    process = scheduler.start("wait", "0")
    try:
        eventually(lambda: (scheduler.folder / "started").exists() or process.poll() is not None)
        process.terminate()
        assert ended(process) == (7, "")  # of the nodes, whatever bash was waiting for
    finally:
        if not (scheduler.folder / "cancelled").exists():  # so srun is still waiting
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (scheduler.folder / "cancelled").read_text() == "--signal=TERM 7\n"
    assert len(scheduler.calls()) == 1
