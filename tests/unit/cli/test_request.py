"""What a command line that describes a job is warned about before anything starts."""

import pytest
from support.plans import HERE


@pytest.fixture
def planned(do, tmp_path, monkeypatch):
    """A function that plans a job in a folder with a script, and returns what is printed about it."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").touch()
    monkeypatch.chdir(code)

    def plan(*arguments: str) -> list[str]:
        status, _, err = do("plan", *arguments)
        assert status == 0, err
        return err

    return plan


def test_without_a_script_the_example_must_be_named(planned):
    assert planned() == ["no script given: this is the example, app.train; yours: plan SCRIPT.py"]
    assert planned("train.py") == []


@pytest.mark.parametrize("word", ["--nodes", "--trainers=2", "--engine"])
def test_options_after_the_script_must_be_pointed_out(planned, word):
    assert planned("train.py", word, "3") == [
        f"warning: {word} comes after the script, and so is an argument of the script "
        "(python -m orchestrate plan [options] train.py …)"
    ]
    assert planned("train.py", "--lr", "3", "--node", "--gpus") == []
    for start in (["torchrun"], ["python", "-m", "torch.distributed.run"]):
        assert planned(*start, "--nproc-per-node", "2", "train.py") == []


def test_a_dry_run_must_not_become_a_run_because_of_the_order_of_words(do, planned):
    status, _, (error, hint) = do("plan", "train.py", "--dry-run")
    assert (status, error) == (2, "error: --dry-run comes after the script")
    assert hint.startswith("hint: python -m orchestrate plan [options] train.py …; ")
    assert planned("--", "train.py", "--dry-run")[0].startswith("warning: --dry-run comes after the script")


def test_flags_of_torchrun_that_have_no_effect_must_be_named_with_what_to_use_instead(planned, tmp_path):
    done = ("--rdzv-backend", "c10d", "--master_port", "1", "--rdzv_id=x")  # what the orchestrator does itself
    lost = ("--numa-binding", "node", "--tee=3", "-r", "1")
    warnings = [
        "warning: torchrun's --numa-binding has no effect: --set pin=true binds workers to cores",
        "warning: torchrun's --tee has no effect: logs of all ranks are in the run directory",
        "warning: torchrun's --redirects has no effect: logs of all ranks are in the run directory",
    ]
    for start in (["torchrun"], ["python", "-u", "-m", "torch.distributed.run"]):
        assert planned(*start, *done, "train.py", "--tee", "3") == []
        assert planned(*start, *done, *lost, "train.py") == warnings
    (tmp_path / "job.yaml").write_text(f"command: torchrun {' '.join(lost)} train.py")
    assert planned(str(tmp_path / "job.yaml")) == warnings


def test_many_workers_on_few_cores_must_be_pointed_out(planned):
    count = len(HERE.cores)
    assert planned("--nodes", str(32 * count), "train.py") == []
    (warning,) = planned("--nodes", str(32 * count + 1), "train.py")
    assert warning.startswith(f"warning: {32 * count + 1} workers on {count} cores: ")
