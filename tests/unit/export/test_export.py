"""An exported job must be equivalent to the original, or be refused if the target cannot express it."""

import subprocess
from dataclasses import replace

import pytest
from support.exports import SPEC, pod_of
from support.repo import ROOT

from orchestrate.cli.main import main
from orchestrate.errors import UsageError
from orchestrate.export import carries_node, shape
from orchestrate.export.kubernetes import kubernetes
from orchestrate.export.pbs import pbs
from orchestrate.export.slurm import slurm
from orchestrate.spec.layers import read_file, resolve


@pytest.mark.parametrize(
    ("options", "workers", "gpus"),
    [
        ({}, 1, 0),
        ({"nproc_per_node": 4}, 4, 0),
        ({"gpus": "none", "nproc_per_node": 2}, 2, 0),
        ({"gpus": "all"}, 1, 1),
        ({"gpus": "all", "nproc_per_node": 4}, 4, 4),
        ({"gpus": 3}, 1, 1),
        ({"gpus": 6}, 2, 2),
        ({"gpus": 6, "nproc_per_node": 2}, 2, 2),
    ],
)
def test_workers_and_gpus_must_be_derived_from_the_job(options, workers, gpus):
    found = shape(resolve({"trainers": 2}, options), "digits")
    assert (found.nodes, found.nproc, found.gpus) == (3, workers, gpus)
    assert (found.env["NNODES"], found.env["NODE_NPROC"]) == ("3", str(workers))
    assert found.env.get("CUDA_VISIBLE_DEVICES") == (None if gpus else "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 3, "nproc_per_node": 2}, "2 workers and 1 GPUs per node"),
        ({"gpus": 6, "nproc_per_node": 1}, "1 workers and 2 GPUs per node"),
        ({"gpus": 2}, "2 GPUs cannot be divided evenly among 3 nodes"),
        ({"pin": True}, "pin, share_gpus, queue and network"),
        ({"queue": True}, "pin, share_gpus, queue and network"),
        ({"share_gpus": True}, "pin, share_gpus, queue and network"),
        ({"network": "host"}, "pin, share_gpus, queue and network"),
        ({"encrypt": True}, "constraints and encrypt"),
        ({"constraints": "node.role==worker"}, "constraints and encrypt"),
        ({"pip": "numpy"}, "pip, requirements and dockerfile"),
        ({"dockerfile": "image"}, "pip, requirements and dockerfile"),
        ({"checkpoints": "s3://a"}, "checkpoints and output need orchestrate"),
        ({"output": "s3://a"}, "checkpoints and output need orchestrate"),
        ({"data": {"train": "/a"}}, "data, mounts and chdir are exported only to Compose"),
        ({"mounts": "/a:/b"}, "data, mounts and chdir are exported only to Compose"),
        ({"chdir": "a"}, "data, mounts and chdir are exported only to Compose"),
        ({"data": {"train": "s3://a/b"}}, "data in an object store"),
        ({"source": "git+https://host/a"}, "a source in a Git repository"),
        ({"secrets": {"A": "env"}}, "secrets as files"),
        *(
            ({key: value}, f"^{key} cannot be exported")
            for key, value in {"before": "a", "services": "a", "ports": [1], "labels": {"a": 1}}.items()
        ),
        *(({key: True}, f"^{key} cannot be exported") for key in ("isolated", "stdin")),
    ],
)
def test_options_that_no_target_supports_must_be_refused(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        shape(resolve({"trainers": 2}, options), "digits")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("cpus", "workers", "threads"), [(None, 2, None), (4, 1, "4"), (4, 2, "2"), (5.5, 2, "2"), (0.5, 1, "1")]
)
def test_threads_must_fit_the_cores_of_a_node(cpus, workers, threads):
    spec = resolve({"cpus": cpus, "nproc_per_node": workers})
    assert shape(spec, "digits").env.get("OMP_NUM_THREADS") == threads


def test_the_jobs_env_must_override_defaults():
    spec = resolve({"cpus": 4, "grace": "1.5s", "max_restarts": 7, "env": {"OMP_NUM_THREADS": "3", "A": "b"}})
    env = shape(spec, "digits").env
    assert (env["OMP_NUM_THREADS"], env["A"]) == ("3", "b")
    assert (env["NODE_GRACE"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("1.5", "7")
    assert env["JOB_ID"] == env["TORCHELASTIC_RUN_ID"] == "digits"


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("orchestrate-node", True),
        ("orchestrate-node:0.1", True),
        ("registry.example:5000/team/orchestrate-node", True),
        ("registry.example:5000/orchestrate-node:mine", True),
        ("orchestrate-node@sha256:0123", True),
        ("orchestrate-node-x:0.1", False),
        ("orchestrate-node/mine:0.1", False),
        ("pytorch/pytorch:latest", False),
    ],
)
def test_the_projects_own_image_must_be_recognised_by_its_name(image, expected):
    assert carries_node(image) is expected


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob", "slurm", "pbs"])
def test_the_examples_in_the_documentation_must_match_the_output(form):
    spec = resolve(
        read_file(ROOT / "examples" / "job.yaml"), {"gpus": "all", "image": SPEC["image"].replace(":1", ":0.1")}
    )
    if form in ("slurm", "pbs"):
        write, name = (slurm, "job.sbatch") if form == "slurm" else (pbs, "job.pbs")
        text = write(spec, "digits-short", "apptainer").replace(str(ROOT), "/home/me/orchestrate")
        assert (ROOT / "docs" / "export" / name).read_text() == text
    else:
        text = kubernetes(replace(spec, volume="training"), "digits-short", form)
        assert (ROOT / "docs" / "export" / f"{form}.yaml").read_text() == text


@pytest.mark.parametrize("form", ["venv", "apptainer", "pyxis"])
def test_the_slurm_script_must_be_valid_bash(form):
    script = slurm(resolve(SPEC | {"name": "it's", "env": {"A": "two words; 'quoted'"}}), "its", form)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "#SBATCH --nodes=3\n" in script and "#SBATCH --gpus-per-node=2\n" in script
    assert "#SBATCH --mem=8G\n" in script and "#SBATCH --time=60\n" in script
    assert "#SBATCH --cpus-per-task=4\n" in script


@pytest.mark.parametrize(
    ("key", "settings"), [("slurm.wckey", {"slurm": {"wckey": "canary-1"}}), ("image", {"image": "a/canary-1:2"})]
)
def test_secrets_in_other_keys_must_be_refused(key, settings):
    with pytest.raises(UsageError, match=f"{key} is a secret, and cannot be exported"):
        shape(resolve({"command": "train.py", "env": {"API_TOKEN": "canary-1"}, **settings}), "x")


@pytest.mark.parametrize("form", ["venv", "apptainer"])
def test_the_pbs_script_must_be_valid_bash_and_ask_for_what_the_job_needs(form):
    script = pbs(resolve(SPEC | {"name": "it's", "env": {"A": "two words; 'quoted'"}}), "its", form)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "#PBS -l select=3:ncpus=4:mpiprocs=1:ngpus=2:mem=8388608kb\n#PBS -l place=scatter\n" in script
    assert "#PBS -l walltime=3600\n" in script
    assert "mem=" not in pbs(resolve(SPEC | {"memory": "unlimited"}), "its", form)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["kubernetes"], "# mine, for Kubernetes 1.28"),
        (["kubernetes", "--form", "trainjob"], "kind: TrainJob\n"),
        (["slurm"], "# Nodes run the Python of this environment"),
        (["slurm", "--form", "pyxis", "--image", "a.example/a:1"], "'--container-image=a.example#a:1' "),
        (["pbs"], "# Nodes run the Python of this environment"),
        (["compose"], "name: mine\n"),
    ],
)
def test_the_first_form_must_be_the_default(capsys, arguments, expected):
    assert main(["export", *arguments, "--name", "Mine", "--gpus", "none", "--", "-m", "app.train"]) == 0
    printed = capsys.readouterr()
    assert expected in printed.out and not printed.err


@pytest.mark.parametrize(
    ("memory", "slurm_memory"),
    [("8g", "8G"), ("512M", "512M"), ("65536k", "65536K"), ("1073741824", "1048576K"), ("67109888b", "65537K")],
)
def test_memory_must_be_converted_to_slurms_units(memory, slurm_memory):
    assert f"#SBATCH --mem={slurm_memory}\n" in slurm(resolve(SPEC | {"memory": memory}), "x", "venv")


@pytest.mark.parametrize("memory", [None, "unlimited"])
def test_unlimited_memory_must_not_be_requested(memory):
    assert "--mem" not in slurm(resolve(SPEC | {"memory": memory}), "x", "venv")
    assert pod_of("job", {"memory": memory})["containers"][0]["resources"] == {}


@pytest.mark.parametrize("target", ["kubernetes", "slurm", "pbs", "compose"])
@pytest.mark.parametrize("expand", ["true", "false"])
def test_a_command_must_be_expanded_unless_expand_is_false(capsys, target, expand):
    assert main(["export", target, "--gpus", "none", "--set", f"expand={expand}", "--", "-m", "app.train"]) == 0
    assert ("WORKER_EXPAND" in capsys.readouterr().out) is (expand == "false")
