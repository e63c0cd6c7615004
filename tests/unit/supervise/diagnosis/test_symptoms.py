"""Each symptom must be recognized in what programs print today, and its hint must fit the folder of the job."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import HERE, plan

from orchestrate.record.outcomes import WorkerExit
from orchestrate.spec.causes import CAUSES
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.diagnosis.root_cause import BY_CODE, BY_ENGINE, SUMMARY, diagnose
from orchestrate.supervise.diagnosis.symptoms import IN_ERRORS, IN_LINES, Symptom

PLAN = plan(JobSpec(trainers=1), HERE, "j", 29500)
ANY = Symptom._field_defaults["exact"]
EVERY = [*IN_LINES, *IN_ERRORS]


def told(text: str, command: str = "train.py", code: Path = Path("/none"), engine: str = "docker") -> tuple[str, str]:
    """Cause and hint of a worker that printed `text` and failed."""
    there = replace(PLAN.placement, code=str(code))
    made = replace(PLAN, command=tuple(command.split()), placement=there)
    made = replace(made, inventory=replace(PLAN.inventory, engine=engine))
    found = diagnose(made, WorkerExit(1, 1), None, text.splitlines()[-12:], "log", context=text.splitlines())
    return found.cause, found.hint


@pytest.mark.parametrize("symptom", EVERY, ids=lambda symptom: symptom.example[:40])
def test_a_symptom_must_be_recognized_in_its_example(symptom: Symptom):
    for engine, hint in ("docker", symptom.hint), ("process", symptom.local or symptom.hint):
        cause, told_hint = told(symptom.example, engine=engine)
        start = hint.partition("\\")[0]  # up to the first group
        assert cause == symptom.cause and (told_hint.startswith(start) or symptom.exact is not ANY), told_hint


def test_texts_of_torch_must_be_those_of_the_installed_version(tmp_path):
    torch = Path(pytest.importorskip("torch").__file__).parent
    texts = {symptom.torch for symptom in EVERY if symptom.torch}
    assert len(texts) > 5 and all(symptom.torch in symptom.example for symptom in EVERY)
    (tmp_path / "texts").write_text("\n".join(texts))
    files = [*torch.glob("lib/libtorch_cpu.so"), *torch.glob("lib/libtorch_python.so"), torch / "cuda" / "__init__.py"]
    files += [
        torch / "distributed" / "distributed_c10d.py",
        torch / "nn" / "parallel" / "distributed.py",
        *torch.glob("lib/libc10_cuda.so"),
    ]
    grep = [
        "grep",
        "--text",
        "--only-matching",
        "--no-filename",
        "--fixed-strings",
        "--file",
        tmp_path / "texts",
        *files,
    ]
    found = subprocess.run(grep, capture_output=True, text=True, check=True)
    assert {*found.stdout.splitlines()} == texts


TAKEN = "DistNetworkError: The server socket has failed to listen on any local network address. port: 9, EADDRINUSE"
UNANSWERED = (
    "DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (localhost, 9)."
)


@pytest.mark.parametrize("error", [TAKEN, UNANSWERED])
def test_a_script_with_a_world_of_its_own_must_be_named_and_not_be_retried(tmp_path, error):
    (tmp_path / "train.py").write_text("import torch\nmp.spawn(main)\n")
    cause, hint = told(error, code=tmp_path)
    assert (cause, hint.partition(":2")[0]) == ("script", "see whether this run called mp.spawn() at train.py")
    (tmp_path / "train.py").write_text("import torch\n")
    assert told(error, code=tmp_path)[0] == "error"


BUS = """Traceback (most recent call last):
  File "queues.py", line 113, in get
    if not self._poll(timeout):
           ^^^^^^^^^^^^^^^^^^^
RuntimeError: DataLoader worker (pid 16) is killed by signal: Bus error. It is possible that

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 9, in main
    for b in loader:
RuntimeError: DataLoader worker (pid(s) 16) exited unexpectedly
"""


def test_a_cause_must_be_found_in_the_exception_that_led_to_the_last_one():
    assert told(BUS)[0] == "shared memory"
    handled = BUS.replace("The above exception was the direct cause of the following exception:", "")
    assert told(handled)[0] == "error"
    ranked = "\n".join(f"[rank1]: {line}" if line else "" for line in BUS.splitlines())
    assert told(ranked)[0] == "shared memory"
    three = BUS + "\nDuring handling of the above exception, another exception occurred:\n\n"
    assert told(three + 'Traceback (most recent call last):\n  File "a.py", line 1\n    x\nValueError: no')[0] == (
        "shared memory"
    )


def test_an_error_long_before_the_end_must_not_be_the_cause():
    handled = 'Traceback (most recent call last):\n  File "a.py", line 1\n    x\nOSError: No space left on device\n'
    assert told(handled + "step\n" * 11)[0] == "disk full"
    assert told(handled + "step\n" * 12)[0] == "error"


def test_a_mismatch_must_be_told_with_the_sizes():
    text = next(symptom.example for symptom in EVERY if "expected size" in symptom.example)
    assert told(text)[1].startswith("this rank received 8 bytes where it expected 4: ")


# --- a look at the folder


@pytest.mark.parametrize(
    ("made", "command", "name", "hint"),
    [
        ("pkg/__init__.py", "scripts/go.py", "pkg", "-e PYTHONPATH=., or start it with -m scripts.go"),
        ("pkg.py", "a-b/go.py", "pkg", "is in your folder, but Python searches the script's: -e PYTHONPATH=."),
        ("src/lib/__init__.py", "src.py", "lib", "lib is in src/, which Python does not search: -e PYTHONPATH=src"),
        ("pkg/__init__.py", "go.py", "pkg.none", "pkg.none is neither in your folder nor in the image"),
        ("other.py", "go.py", "nonesuch", "nonesuch is neither in your folder nor in the image"),
        ("other.py", "go.py", "hydra", "nor in the image: install it with --pip hydra-core"),
        ("other.py", "go.py", "sklearn.svm", "nor in the image: install it with --pip scikit-learn"),
        ("other.py", "go.py", "pkg_resources", "install it with --pip 'setuptools<82'"),
    ],
)
def test_a_missing_module_must_be_looked_for_in_the_folder(tmp_path, made, command, name, hint):
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    cause, found = told(f"ModuleNotFoundError: No module named '{name}'", command, tmp_path)
    assert cause == "script" and found.endswith(hint)


def test_a_script_of_a_package_must_be_started_as_its_module():
    error = "ImportError: attempted relative import with no known parent package"
    assert told(error, "pkg/train.py --lr 1")[1] == "start the script with -m pkg.train"
    assert told(error, "pkg-1/train.py")[1].endswith("start it with -m PACKAGE.MODULE")


def test_a_job_with_gpus_must_not_be_told_that_it_has_none():
    on_gpus = replace(PLAN, gpus=("GPU-0", "GPU-1"))
    for text in [symptom.example for symptom in EVERY if symptom.cause == "no GPUs"]:
        assert diagnose(PLAN, WorkerExit(1, 1), None, [text], "log").cause == "no GPUs"
        assert diagnose(on_gpus, WorkerExit(1, 1), None, [text], "log").cause == "error"


def test_no_project_must_be_named_that_anybody_could_have_published():
    for name in ("apex", "clip", "nonesuch"):
        for engine in ("docker", "process"):
            assert "--pip" not in told(f"ModuleNotFoundError: No module named '{name}'", engine=engine)[1]


def test_a_missing_file_must_be_looked_for_where_it_can_be(tmp_path):
    code = tmp_path / "proj"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.csv").touch()
    code.mkdir()
    (code / "here.csv").touch()

    def hint(path: str, command: str = "train.py") -> str:
        cause, found = told(f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'", command, code)
        assert cause == "no such file"
        return found

    (code / "sub").mkdir()
    assert hint("../here.csv", "sub/train.py") == (
        "../here.csv is there from the folder of the script: --chdir sub train.py"
    )
    assert hint("../here.csv", "sub/train.py --to sub/a b").endswith(": --chdir sub train.py --to a b")
    assert hint("../here.csv", "-m sub.train b").endswith(": --chdir sub -m train")
    assert hint("../data/x.csv") == (
        "../data/x.csv is outside of the folder that nodes see: --data data=../data makes it available at $DATA_DATA; "
        "or cd .., and run --chdir proj"
    )
    assert ": --data 'data=../$(id);x' makes" in hint("../$(id);x/..")
    assert hint("here.csv").startswith("here.csv is in your folder, but not in the nodes' copy of it")
    assert hint("none.csv") == f"there is no none.csv in {code}"
    there = str(tmp_path / "data" / "x.csv")
    assert hint(there).startswith("nodes see only the folder")  # what a worker prints is not looked up anywhere
    asked = hint(there, f"train.py --data {tmp_path / 'data'}")
    assert asked.startswith(f"nodes do not see {there} of this machine: --data data=")
    assert hint("../none.csv").startswith("nodes see only the folder")


def test_every_cause_must_be_listed():
    named = {symptom.cause for symptom in EVERY} | {kind for kind, _ in BY_CODE.values()}
    assert named | set(BY_ENGINE) | set(SUMMARY) <= set(CAUSES)
