"""Arguments in the style of torchrun and Docker must mean what they mean there."""

import pytest
from support.scripted import ALL_WELL

from orchestrate.api.check_script import check_script
from orchestrate.cli.arguments import parse
from orchestrate.cli.main import main
from orchestrate.cli.request import spec_of
from orchestrate.errors import UsageError
from orchestrate.record import run_dir
from orchestrate.spec import command
from orchestrate.spec.layers import resolve

SCRIPT = ["train.py", "--lr", "0.1"]
MODULE = ("-m", "a.b", "--lr", "0.1")


@pytest.mark.parametrize(
    ("arguments", "own"),
    [
        ("run train.py --lr 0.1", "run"),
        ("run -- train.py --lr 0.1", "run"),
        ("run --trainers 2 --dry-run train.py --lr 0.1", "run --trainers 2 --dry-run"),
        ("run --trainers=2 train.py --lr 0.1", "run --trainers=2"),
        ("run job.yaml train.py --lr 0.1", "run job.yaml"),
        ("run job.yml --gpus none train.py --lr 0.1", "run job.yml --gpus none"),
        ("run -e A=b train.py --lr 0.1", "run -e A=b"),
        ("run -eA=b train.py --lr 0.1", "run -eA=b"),
        ("run --env A train.py --lr 0.1", "run --env A"),
        ("plan --nproc_per_node 2 train.py --lr 0.1", "plan --nproc_per_node 2"),
        ("export kubernetes --form jobset train.py --lr 0.1", "export kubernetes --form jobset"),
    ],
)
def test_the_jobs_command_must_begin_where_our_options_end(monkeypatch, arguments, own):
    monkeypatch.setenv("A", "b")
    assert vars(parse(arguments.split())) == vars(parse(own.split())) | {
        "script": SCRIPT,
        "separated": "--" in arguments.split(),
    }


@pytest.mark.parametrize("arguments", ["-m a.b --lr 0.1", "--gpus none -m a.b --lr 0.1", "-- -m a.b --lr 0.1"])
def test_a_module_must_not_need_dashes_before_it(arguments):
    assert parse(["run", *arguments.split()]).script == [*MODULE]


@pytest.mark.parametrize("arguments", ["run", "run job.yaml", "run --trainers 2", "logs a", "ps"])
def test_a_missing_command_must_be_none(arguments):
    assert parse(arguments.split()).script is None


def test_dashes_in_the_jobs_command_must_be_passed_through():
    assert parse(["run", "bash", "go.sh", "--", "--dry-run"]).script == ["bash", "go.sh", "--", "--dry-run"]


@pytest.mark.parametrize(
    ("arguments", "read", "asked"),
    [
        ("train.py a", "train.py a", {}),
        ("python train.py a", "train.py a", {}),
        ("python3.12 -u train.py a", "train.py a", {}),
        ("python -m a.b c", "-m a.b c", {}),
        ("python -O train.py", "python -O train.py", {}),
        ("python -c 1", "python -c 1", {}),
        ("python train", "python train", {}),
        ("python", "python", {}),
        ("python -m", "-m", {}),
        ("bash go.sh", "bash go.sh", {}),
        ("torchrun train.py a", "train.py a", {}),
        ("torchrun --nproc-per-node 2 train.py --nnodes 3", "train.py --nnodes 3", {"nproc_per_node": "2"}),
        ("torchrun --nproc_per_node=gpu --nnodes=4 train.py", "train.py", {"trainers": 3}),
        ("torchrun --nproc-per-node auto train.py", "train.py", {}),
        ("torchrun --nproc-per-node cpu train.py", "train.py", {}),
        ("torchrun --nproc-per-node xpu --nnodes 1001 train.py", "train.py", {"trainers": 1000}),
        ("torchrun --no-python python -u train.py", "train.py", {}),
        ("torchrun --standalone --nnodes 2 train.py", "train.py", {"trainers": 1}),
        ("torchrun --nnodes 2:4 -m a.b c", "-m a.b c", {"trainers": 3, "min_trainers": 1}),
        ("torchrun --nnodes 4:4 --max_restarts 5 train.py", "train.py", {"trainers": 3, "max_restarts": "5"}),
        ("torchrun --standalone train.py", "train.py", {"trainers": 0}),
        ("torchrun --standalone --nproc-per-node 3 a.py", "a.py", {"trainers": 0, "nproc_per_node": "3"}),
        ("torchrun --no-python bash go.sh", "bash go.sh", {}),
        ("torchrun train", "python train", {}),
        ("torchrun --rdzv-backend c10d --rdzv_endpoint a:1 --node_rank 0 -r 3 --tee 3 train.py", "train.py", {}),
        ("torchrun --nproc-per-node 2 -- train.py a", "train.py a", {"nproc_per_node": "2"}),
        ("python -m torch.distributed.run --nnodes 2 train.py", "train.py", {"trainers": 1}),
        ("torchrun --run-path /a/train.py", "/a/train.py", {}),
        ("torchrun --virtual-local-rank train.py", "train.py", {"virtual_local_rank": True}),
        ("/opt/venv/bin/torchrun train.py", "train.py", {}),
        ("python3 -u -m torch.distributed.launch --nproc_per_node 2 --use_env a.py", "a.py", {"nproc_per_node": "2"}),
        ("python -m torch.distributed.launch --use-env -m a.b c", "-m a.b c", {}),
        ("python -m torch.distributed.launch a.py b", "a.py --local-rank=$LOCAL_RANK b", {}),
        ("python -m torch.distributed.launch -m a.b c", "-m a.b --local-rank=$LOCAL_RANK c", {}),
    ],
)  # fmt: skip
def test_a_command_must_mean_what_it_means_to_torchrun(arguments, read, asked):
    assert command.read(tuple(arguments.split())) == (tuple(read.split()), asked)
    again = command.read(tuple(read.split()))
    assert again == (tuple(read.split()), {})  # as `attach` reads it


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("torchrun", "no script"),
        ("torchrun --nnodes 2", "no script"),
        ("torchrun --nnodes 0 train.py", "expected a number of nodes such as 4 or 1:4, not '0'"),
        ("torchrun --nnodes 4:x train.py", "expected a number of nodes such as 4 or 1:4, not '4:x'"),
        ("torchrun --nnodes", "expected one argument"),
        ("torchrun -- --lr 1", "option --lr is not supported"),
    ],
)
def test_unsupported_torchrun_arguments_must_be_named(arguments, why):
    with pytest.raises(UsageError, match=why) as found:
        command.read(tuple(arguments.split()))
    assert "torchrun" in str(found.value) and found.value.hint


def test_every_torchrun_flag_must_be_known_or_refused():
    from torch.distributed.run import get_args_parser

    taking = [action for action in get_args_parser()._actions if action.option_strings and action.nargs is None]
    for name in [name for action in taking for name in action.option_strings]:
        if name != "--print-completion" and name != "--print_completion":
            assert command.read(("torchrun", name, "1", "train.py"))[0] == ("train.py",)


def test_torchruns_flags_must_agree_with_ours_on_the_same_command_line(do):
    arguments = ["torchrun", "--nnodes", "4", "--nproc-per-node", "2", "-m", "app.train"]
    assert do("plan", "--gpus", "none", "--", *arguments)[1][0].split(": ")[1].startswith("4 nodes × 2 workers")
    assert do("plan", "--nodes", "4", "--gpus", "none", "--", *arguments)[1][0].split(": ")[1].startswith("4 nodes × 2")
    for flags in (["--nodes", "2"], ["--set", "trainers=1"]):
        code, _, err = do("plan", *flags, "--gpus", "none", "--", *arguments)
        assert (code, err[0]) == (2, "error: trainers is 1, but torchrun's flags set 3")
    code, _, err = do("plan", "--nodes", "3", "--set", "trainers=1", "--", "-m", "app.train")
    assert (code, err[0]) == (2, "error: nodes and trainers are both set")


def test_the_command_line_must_override_a_job_file_even_if_either_has_torchrun_flags():
    two, four = {"command": "torchrun --nnodes 2 a.py"}, {"command": "torchrun --nnodes 4 a.py"}
    assert resolve({"trainers": 7}, two).trainers == 1
    assert resolve(two, {"trainers": 7}).trainers == 7
    assert resolve(two, four).trainers == 3
    assert resolve(four, {"command": "a.py"}).trainers == 3  # the default
    with pytest.raises(UsageError, match="trainers is 7, but torchrun's flags set 1"):
        resolve({"trainers": 7, **two}, {"grace": "1s"})


@pytest.mark.parametrize("arguments", [["--nodes", "3"], ["--nnodes", "3"], ["--trainers", "2"], ["--set", "nodes=3"]])
def test_node_counts_must_include_the_master(do, arguments):
    assert do("plan", "--gpus", "none", *arguments, "--", "-m", "app.train")[1][0].split(": ")[1].startswith("3 nodes")


@pytest.mark.parametrize(
    ("layer", "why"), [({"nodes": 0}, "nodes must be a whole number from 1"), ({"nodes": 2, "trainers": 1}, "one of")]
)
def test_an_invalid_number_of_nodes_must_be_refused(layer, why):
    with pytest.raises(UsageError) as found:
        resolve(layer)
    assert why in f"{found.value} {found.value.hint}"


def test_a_variable_must_come_from_the_flag_or_from_the_shell(do, monkeypatch):
    for name in ("HERE", "NONE"):
        monkeypatch.setenv(name, "of the shell")
    do.engine.generations = [[ALL_WELL]]
    arguments = ["-e", "HERE", "--env", "A=b=c", "-eNONE=", "--memory", "2g", "--cpus", "1.5", "--trainers", "2"]
    assert do("run", "--gpus", "none", *arguments, "--", "-m", "app.train")[0] == 0
    spec, _ = run_dir.load(run_dir.JobPaths(next(do.runs.iterdir())))
    assert (spec.env, spec.memory, spec.cpus) == ({"HERE": "of the shell", "A": "b=c", "NONE": ""}, "2g", 1.5)
    assert do("plan", "-e", "NOWHERE")[2] == [
        "error: environment variable 'NOWHERE' is not set in this shell",
        "hint: export NOWHERE, or use --env NAME=VALUE",
    ]
    for data in ("x", "x="):
        assert do("plan", "--data", data)[2] == [f"error: --data '{data}': missing =", "hint: use --data NAME=DIR"]


AFTER_SCRIPT = "options of the script come after it"
OF_SCRIPT = "for an option of the script: --set hyperparameters."


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ("pln train.py", "unknown command 'pln'", "did you mean plan?"),
        ("rum train.py", "unknown command 'rum'", "did you mean rm or run?"),
        (
            "exec latest hostname -f",
            "exec: unexpected argument 'hostname'",
            "python -m orchestrate exec latest -- hostname -f",
        ),
        ("rnu train.py", "unknown command 'rnu'", "did you mean run?"),
        ("export nomad", "unknown target 'nomad'", "one of kubernetes, slurm, pbs, compose"),
        ("train.py --lr 1", "unknown command 'train.py'", "python -m orchestrate run train.py"),
        ("frobnicate", "unknown command 'frobnicate'", "python -m orchestrate --help"),
        ("run --partition x train.py", "run: unknown option '--partition'", "use --set slurm.partition=VALUE"),
        ("run --trainer 2", "run: unknown option '--trainer'", "did you mean --trainers?"),
        ("run job.yaml --lr 0.1", "run: unknown option '--lr'", f"{OF_SCRIPT}lr=0.1"),
        ("run job.yaml --lr=0.1", "run: unknown option '--lr=0.1'", f"{OF_SCRIPT}lr=0.1"),
        ("run job.yaml --trainer 2", "run: unknown option '--trainer'", "did you mean --trainers?"),
        ("run --grace-period 3", "run: unknown option '--grace-period'", "python -m orchestrate run --help"),
        ("run --epochs 3 x.py a", "run: unknown option '--epochs'", f"{AFTER_SCRIPT}: x.py --epochs"),
        ("run --trainer 3 x.py", "run: unknown option '--trainer'", "did you mean --trainers?"),
        ("run --grace=3 x.py", "run: unknown option '--grace=3'", "use --set grace=VALUE"),
        ("run --detatch train.py", "run: unknown option '--detatch'", "did you mean --detach?"),
        ("run --max-restart=2", "run: unknown option '--max-restart=2'", "did you mean --max-restarts?"),
        ("logs a --folow", "logs: unknown option '--folow'", "did you mean --follow?"),
        ("logs a --xyz", "logs: unknown option '--xyz'", "python -m orchestrate logs --help"),
        ("export kubernets", "unknown target 'kubernets'", "did you mean kubernetes?"),
        ("export slurm --from venv", "export: unknown option '--from'", "did you mean --form?"),
    ],
)
def test_an_unknown_word_must_be_answered_with_the_closest_match(do, arguments, error, hint):  # noqa: F811
    assert do(*arguments.split()) == (2, [], [f"error: {error}", f"hint: {hint}"])


def test_without_arguments_the_commands_must_be_listed(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert "\n  run  " in out and err == ""


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--trainers", "2", "train.py"], "expected a command before '--trainers'", "run --trainers"),
        (["stop", "a-1", "b-1"], "stop: unexpected argument 'b-1'", "stop --help"),
        (["up", "--detach"], "up: unknown option '--detach'", "up --help"),
        (["ps", "--run", "x"], "ps: unknown option '--run'", "did you mean --runs?"),
        (["serve", "--port", "65536"], "argument --port: '65536' is not a port", "serve --help"),
        (["logs", "--tail", "x"], "argument --tail: 'x' is not a number of lines", "logs --help"),
    ],
)
def test_a_misplaced_or_invalid_argument_must_be_named(arguments, error, hint):
    with pytest.raises(UsageError) as found:
        parse(arguments)
    assert str(found.value) == error and hint in found.value.hint


# --- programs


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "go").write_text("#!/bin/sh\n")
    (tmp_path / "go").chmod(0o755)
    (tmp_path / "seq").write_text("#!/bin/sh\n")
    (tmp_path / "seq").chmod(0o755)
    (tmp_path / "notes.txt").write_text("text")
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ("go a", "./go a"),
        ("./go a", "./go a"),
        ("{here}/go", "./go"),
        ("bash go", "bash go"),
        ("bash -c go", "bash -c go"),
        ("accelerate launch --machine_rank 0 a.py", "accelerate launch --machine_rank 0 a.py"),
        ("deepspeed --node_rank=0 a.py", "deepspeed --node_rank=0 a.py"),
        ("-m deepspeed.tools a", "-m deepspeed.tools a"),
        ("bash /image/go", "bash /image/go"),
        ("seq 2", "seq 2"),  # as a shell would run it
        ("./seq 2", "./seq 2"),
        ("/bin/sh go", "/bin/sh go"),
    ],
)
def test_a_program_must_be_found_in_the_folder_or_left_to_the_image(here, arguments, runs):
    assert check_script(resolve({"command": arguments.format(here=here)})).command == tuple(runs.split())


@pytest.mark.parametrize(("word", "near"), [("nots", True), ("nccl-test", False)])
def test_a_program_that_is_named_almost_like_a_script_must_be_noted(here, capsys, word, near):
    (here / "notes.py").touch()
    assert check_script(resolve({"command": word})).command == (word,)
    note = f"{word} is not a file, so it must be a program of the image; did you mean notes.py?\n"
    assert capsys.readouterr().err == note * near


@pytest.mark.parametrize(
    ("arguments", "why", "hint"),
    [
        ("notes.txt", "neither a .py file nor executable", "-- python notes.txt"),
        ("plain.sh", "neither a .py file nor executable", "-- bash plain.sh"),
        ("./none", "does not exist", "paths are relative to"),
        ("notes --lr 1", "the script notes does not exist", "did you mean notes.py?"),
        ("my two words.py --lr 1", "the script my does not exist", "quote the path: 'my two words.py'"),
        ("notse.py --lr 1", "the script notse.py does not exist", "did you mean notes.py?"),
        ("notes.pyy", "the script notes.pyy does not exist", "did you mean notes.py?"),
        ("./folder", "is a folder", "-- -m folder.MODULE"),
        ("bash none.sh a", "the script none.sh does not exist", "paths are relative to"),
        ("/bin/zsh none.sh", "the script none.sh does not exist", "paths are relative to"),
        ("sh none.sh", "the script none.sh does not exist", "paths are relative to"),
        ("/bin/accelerate launch a.py", "accelerate launch starts workers of its own", "run SCRIPT.py"),
        ("python -m accelerate.commands.launch a.py", "accelerate.commands.launch starts workers of", "run SCRIPT.py"),
        ("deepspeed a.py", "deepspeed starts workers of its own", "run SCRIPT.py"),
        ("mpirun -np 2 a.py", "mpirun starts workers of its own", "run SCRIPT.py"),
        ("fabric run a.py", "fabric run starts workers of its own", "run SCRIPT.py"),
        ("-m notes.py", "-m takes a module, but notes.py is a file", "remove -m"),
        ("loop.py", "the script 'loop.py' cannot be read: Symlink loop", "check the path"),
        ("''", "name is empty", "SCRIPT ARGS"),
    ],
)
def test_a_file_that_is_not_a_program_must_be_refused(here, arguments, why, hint):
    (here / "loop.py").symlink_to("loop.py")
    for name in ("my two words.py", "plain.sh", "notes.py"):
        (here / name).touch()
    with pytest.raises(UsageError, match=why) as found:
        check_script(resolve({"command": arguments}))
    assert hint in found.value.hint


@pytest.mark.parametrize("target", ["{here}/real.py", "../elsewhere.py", "folder/deep.py"])
def test_a_script_that_is_a_link_must_run_under_its_own_name(here, target):
    for path in (here / "real.py", here.parent / "elsewhere.py", here / "folder" / "deep.py"):
        path.touch()
    (here / "a").mkdir()
    for place, name in ((here, "train.py"), (here / "a", "train.py")):
        (place / name).symlink_to(target.format(here=here) if place == here else f"../{name}")
    assert check_script(resolve({"command": "train.py"})).command == ("train.py",)
    assert check_script(resolve({"command": f"{here}/a/../a/train.py x"})).command == ("a/train.py", "x")


def test_packages_of_a_file_and_of_options_must_all_be_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "packages.txt").write_text("one\n")
    (tmp_path / "x.py").touch()
    spec = spec_of(parse(["plan", "--requirements", "packages.txt", "--pip", "two", "x.py"]))
    assert (spec.requirements, spec.pip) == ("", ["one", "two"])
