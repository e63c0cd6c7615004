"""The worker to blame must be the one that failed, not peers that complain, and its cause must be named correctly."""

import dataclasses

import pytest
from support.plans import HERE, plan

from orchestrate.record.events import WorkerEnded
from orchestrate.record.logs import last_lines
from orchestrate.record.outcomes import WorkerExit
from orchestrate.spec.causes import Reason
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.diagnosis.root_cause import diagnose, find_root_cause, is_peer_failure

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [172.18.0.3]:31337"
RESET = "RuntimeError: [gloo/transport/tcp/buffer.cc:58] Read error [172.18.0.3]: Connection reset by peer"
TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation"
NCCL = "[rank0]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"
TRACE = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    load()", "    ^^^^^^"]
DUMP = [
    "Fatal Python error: Aborted",
    "Current thread 0x01 (most recent call first):",
    '  File "t.py", line 3 in x',
    "  ...",
]
# How NCCL's watchdog ends a worker: the messages of torch 2.9, shortened.
ILLEGAL = "CUDA error: an illegal memory access was encountered"
WATCHDOG = ["terminate called after throwing an instance of 'c10::DistBackendError'"]
WHAT = "[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception:"
FRAMES = [
    "Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:685 "
    "(most recent call first):",
    *(
        f"frame #{number}: c10d::ProcessGroupNCCL::Watchdog::run() + 0x{number} (0x7f in libtorch_cuda.so)"
        for number in range(9)
    ),
]
PLAN = plan(JobSpec(trainers=2), HERE, "j", 29500)


def found(*ends: tuple, lines: dict | None = None, **more) -> tuple[WorkerExit, Reason | None]:
    """The worker to blame, from exits (seconds, rank, code), or (seconds, rank, code, "ours") if we stopped it."""
    exits = [WorkerEnded(end[1], "node", end[2], stopping=len(end) > 3, seconds=end[0]) for end in ends]
    exit, reason = find_root_cause(exits, lambda rank: (lines or {}).get(rank, []), **more)
    return WorkerExit(exit.rank, exit.code), reason


@pytest.mark.parametrize("code", [132, 134, 135, 136, 137, 139])
def test_a_death_by_signal_must_be_the_cause_even_if_peers_are_reported_first(code):
    assert found((0.0, 0, 1), (0.1, 2, 1), (0.2, 1, code), lines={0: [GLOO], 2: [RESET]}) == (WorkerExit(1, code), None)


def test_a_workers_own_error_must_be_the_cause_even_if_complaining_peers_come_first():
    assert found((0.0, 0, 1), (0.1, 2, 1), lines={0: [GLOO]}) == (WorkerExit(2, 1), None)


def test_if_all_complain_the_first_must_be_the_cause():
    assert found((0.0, 1, 1), (0.1, 0, 1), lines={0: [GLOO], 1: [RESET]}) == (WorkerExit(1, 1), None)


def test_of_two_errors_the_first_must_be_the_cause():
    lines = {rank: ["ValueError: no"] for rank in range(3)}
    assert found((0.0, 1, 1), (0.1, 0, 1), (0.2, 2, 1), lines=lines) == (WorkerExit(1, 1), None)
    assert found((0.0, 1, 137), (0.1, 0, 139), lines=lines) == (WorkerExit(1, 137), None)


@pytest.mark.parametrize("code", [132, 135, 136, 137, 139])
def test_a_death_by_signal_must_be_the_cause_even_if_a_peer_has_an_error_of_another_kind(code):
    assert found((0.0, 0, 1), (0.1, 1, code), lines={0: ["ValueError: no"]}) == (WorkerExit(1, code), None)


def test_a_death_by_signal_reported_while_the_gang_stops_must_be_the_cause():
    assert found((0.0, 0, 1), (1.0, 1, 139, "ours"), (1.1, 2, 143, "ours"), lines={0: [GLOO]}) == (
        WorkerExit(1, 139),
        None,
    )


def test_a_worker_that_we_stopped_must_never_be_the_cause():
    assert found((0.0, 0, 1), (0.1, 1, 143, "ours"), (0.1, 2, 143, "ours"), lines={0: [GLOO]})[0] == WorkerExit(0, 1)


def test_a_worker_that_ends_long_after_the_first_must_never_be_the_cause():
    assert found((0.0, 0, 1), (30.0, 1, 137, "ours"), lines={0: [GLOO]})[0] == WorkerExit(0, 1)
    assert found((10.0, 0, 1), (13.0, 1, 137), lines={0: [GLOO]})[0] == WorkerExit(0, 1)
    assert found((10.0, 0, 1), (11.0, 1, 137), lines={0: [GLOO]})[0] == WorkerExit(1, 137)
    assert found((10.0, 0, 1), (11.0, 1, 137), lines={0: [GLOO]}, window=0.5)[0] == WorkerExit(0, 1)


def test_a_peer_that_aborts_because_another_is_gone_must_not_be_the_cause():
    assert found((0.0, 0, 134), (0.1, 1, 1), lines={0: [GLOO, *DUMP], 1: ["ValueError"]})[0] == WorkerExit(1, 1)


def test_an_abort_without_a_complaint_must_be_the_cause():
    assert found((0.0, 0, 1), (0.1, 1, 134), lines={0: [GLOO], 1: ["assertion failed", *DUMP]})[0] == WorkerExit(1, 134)
    lines = {0: ["ValueError: no"], 1: ["assertion failed", *DUMP]}
    assert found((0.0, 0, 1), (0.1, 1, 134), lines=lines)[0] == WorkerExit(1, 134)


@pytest.mark.parametrize("complaint", [TIMED_OUT, NCCL])
def test_a_worker_that_kept_its_peers_waiting_too_long_must_be_the_cause(complaint):
    ends = (0.0, 0, 1), (0.1, 1, 1), (1.0, 2, 143, "ours")
    assert found(*ends, lines={0: [complaint], 1: [complaint]}) == (WorkerExit(2, 143), "timeout")
    assert found(*ends, lines={0: [complaint], 1: [RESET]}) == (WorkerExit(2, 143), "timeout")
    assert found(*ends, (1.1, 3, 143, "ours"), lines={0: [complaint], 1: [complaint]}) == (
        WorkerExit(2, 143),
        "timeout",
    )


def test_a_worker_that_fails_long_after_a_timeout_must_not_be_blamed_for_it():
    lines = {0: [TIMED_OUT], 2: ["ValueError: no"]}
    assert found((0.0, 0, 1), (30.0, 2, 1), lines=lines) == (WorkerExit(0, 1), None)


def test_a_worker_that_was_stopped_must_not_be_blamed_for_a_lost_connection():
    assert found((0.0, 0, 1), (1.0, 1, 143, "ours"), lines={0: [GLOO]}) == (WorkerExit(0, 1), None)


def test_if_no_worker_failed_one_that_was_stopped_must_be_named():
    assert found((0.0, 0, 0), (1.0, 1, 143, "ours")) == (WorkerExit(1, 143), None)
    assert found((0.0, 1, 0), (0.1, 0, 0))[0] == WorkerExit(1, 0)


def test_a_stopped_worker_that_complains_of_a_timeout_must_not_be_the_cause():
    ends = (0.0, 2, 1), (0.1, 0, 143, "ours"), (1.0, 1, 143, "ours")
    assert found(*ends, lines={0: [TIMED_OUT], 2: [TIMED_OUT]}) == (WorkerExit(1, 143), "timeout")


def test_a_worker_that_left_early_must_be_the_cause():
    assert found((0.0, 1, 0), (0.1, 0, 1), (0.2, 2, 1), lines={0: [GLOO], 2: [GLOO]}) == (
        WorkerExit(1, 0),
        "left early",
    )
    assert found((0.0, 2, 0), (0.0, 1, 0), (0.0, 0, 1), lines={0: [GLOO]}) == (WorkerExit(2, 0), "left early")
    assert found((0.0, 0, 1), (0.1, 1, 0), lines={0: [GLOO]}) == (WorkerExit(1, 0), "left early")  # reported later


def test_a_worker_that_exited_with_0_on_request_must_not_be_blamed_for_leaving():
    assert found((0.0, 1, 0, "ours"), (0.1, 0, 1), lines={0: [GLOO]}) == (WorkerExit(0, 1), None)
    assert found((0.0, 0, 1), (2.1, 1, 0), lines={0: [GLOO]}) == (
        WorkerExit(0, 1),
        None,
    )  # it left long after the failure


def test_a_worker_that_succeeded_must_not_be_blamed_for_anothers_error():
    assert found((0.0, 1, 0), (0.1, 0, 1), lines={0: ["ValueError: no"]}) == (WorkerExit(0, 1), None)


@pytest.mark.parametrize(
    "lines",
    [
        [GLOO],
        [RESET],
        [TIMED_OUT],
        [NCCL],
        [GLOO, *DUMP],
        [GLOO, *DUMP, *DUMP],
        [GLOO, "a", "b"],
        ["RuntimeError: Connection refused"],
        ["ncclRemoteError: remote process exited or there was a network error"],
        ["Broken pipe"],
        ["torch.distributed.DistNetworkError: failed to recv, got 0 bytes"],
        ["torch.distributed.DistStoreError: the client has timed out"],
        ["RuntimeError: the operation timed out after 60000ms"],
        ["RuntimeError: Wait timeout"],
        ["DistBackendError: wait timeout after 300000ms, keys: /default_pg/0/0"],
        ["[rank0]: torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."],
        last_lines("\n".join([NCCL, *WATCHDOG, f"  what():  {WHAT} {NCCL}", *FRAMES, "", *DUMP]), 0, 12),
    ],
)
def test_complaints_about_a_peer_must_be_recognized(lines):
    assert is_peer_failure(lines)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["ValueError: no"],
        [GLOO, "a", "b", "c"],
        ["ValueError", *DUMP],
        last_lines("\n".join([*WATCHDOG, f"  what():  {WHAT} {ILLEGAL}", *FRAMES, "", *DUMP]), 0, 12),
    ],
)
def test_other_last_lines_must_not_count_as_complaints(lines):
    assert not is_peer_failure(lines)


@pytest.mark.parametrize(
    ("code", "known", "lines", "cause", "sentence"),
    [
        (1, "", ["ValueError: no"], "error", "exited with code 1"),
        (1, "", ["ModuleNotFoundError: No module named 'nonesuch'"], "script", "exited with code 1"),
        (1, "", ["ImportError: cannot import name 'x'"], "script", "exited with code 1"),
        (1, "", ["SyntaxError: invalid syntax"], "script", "exited with code 1"),
        (2, "", ["train.py: error: unrecognized arguments: --lrr"], "usage", "exited with code 2"),
        (1, "", ["Traceback", "[rank1]: ImportError: cannot import name 'x'"], "script", "exited with code 1"),
        (1, "", ["ValueError: is that an ImportError: no"], "error", "exited with code 1"),
        (1, "", ["  File t.py", "IndentationError: unexpected indent"], "script", "exited with code 1"),
        (1, "", ["No module named 'x'", "No space left on device"], "script", "exited with code 1"),
        (1, "", ["train.py: error: argument --lr: invalid float value: 'x'"], "usage", "exited with code 1"),
        (1, "", ["train.py: error: the following arguments are required: data"], "usage", "exited with code 1"),
        (1, "", ["train.py: error: unrecognized arguments: --lrr"], "usage", "exited with code 1"),
        (2, "", [], "usage", "exited with code 2"),
        (78, "", [], "usage", "exited with code 78"),
        (127, "", [], "not started", "exited with code 127"),
        (132, "", [], "crash", "was killed by SIGILL (exit code 132)"),
        (136, "", [], "crash", "was killed by SIGFPE (exit code 136)"),
        (137, "", ["No space left on device"], "killed", "was killed by SIGKILL (exit code 137)"),
        (255, "", [], "error", "exited with code 255"),
        (1, "", ["DataLoader worker (pid 9) is killed by signal: Bus error."], "shared memory", "exited with code 1"),
        (1, "", ["RuntimeError: CUDA out of memory."], "out of GPU memory", "exited with code 1"),
        (1, "", ["torch.OutOfMemoryError: no more"], "out of GPU memory", "exited with code 1"),
        (137, "host lost", [], "host lost", "was lost with its host"),
        (137, "interrupted", [], "interrupted", "was starting when"),
        (2, "", ["python: can't open file '/workspace/x.py'"], "script", "exited with code 2"),
        (64, "", [], "usage", "exited with code 64"),
        (126, "", [], "not started", "exited with code 126"),
        (137, "", [], "killed", "was killed by SIGKILL (exit code 137)"),
        (143, "", [], "terminated", "was killed by SIGTERM (exit code 143)"),
        (139, "", DUMP, "crash", "was killed by SIGSEGV (exit code 139)"),
        (134, "", DUMP, "crash", "was killed by SIGABRT (exit code 134)"),
        (135, "", [], "shared memory", "was killed by SIGBUS (exit code 135)"),
        (137, "out of memory", [], "out of memory", "was killed by the kernel's OOM killer (exit code 137)"),
        (
            1,
            "",
            ["RuntimeError: DataLoader worker (pid 9) is killed by signal: Killed."],
            "out of memory in a child",
            "lost a child process to the kernel's OOM killer (exit code 1)",
        ),
        (1, "", ["torch.OutOfMemoryError: CUDA out of memory."], "out of GPU memory", "exited with code 1"),
        (1, "", [f"torch.AcceleratorError: {ILLEGAL}"], "GPU error", "exited with code 1"),
        (1, "", [f"RuntimeError: {ILLEGAL.replace('CUDA error', 'Triton Error [CUDA]')}"], "GPU error", "exited with"),
        (
            1,
            "",
            ["torch.AcceleratorError: CUDA error: device-side assert triggered"],
            "GPU error",
            "exited with code 1",
        ),
        (1, "", ["RuntimeError: CUDA error: uncorrectable ECC error encountered"], "GPU error", "exited with code 1"),
        (134, "", [*WATCHDOG, f"  what():  {WHAT} {ILLEGAL}", *DUMP], "GPU error", "was killed by SIGABRT"),
        (
            1,
            "",
            ["[rank0]: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 7000"],
            "GPU shared",
            "exited",
        ),
        (1, "", ["RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is …"], "mismatch", "exited"),
        (1, "", ["OSError: [Errno 28] No space left on device"], "disk full", "exited with code 1"),
        (137, "node stopped", [], "node stopped", "was terminated with its node, which was stopped or removed"),
        (137, "node lost", [], "node lost", "was lost with its node, which exited"),
        (137, "partition", [], "partition", "was cut off from the job's network"),
        (137, "engine lost", [], "engine lost", "was lost while the engine was unavailable"),
        (143, "timeout", [], "timeout", "did not join a collective in time, and its peers timed out"),
        (0, "left early", [], "left early", "exited while the others were still communicating with it (exit code 0)"),
    ],
)
def test_a_cause_must_come_with_a_summary_and_a_hint(code, known, lines, cause, sentence):
    result = diagnose(PLAN, WorkerExit(1, code), known, lines, "log")
    assert result.cause == cause
    assert result.summary.startswith(f"rank 1 on trainer-1 {sentence}")
    assert result.hint


@pytest.mark.parametrize(
    ("code", "known", "lines", "hint"),
    [
        (1, "", ["ModuleNotFoundError: No module named 'a.b_c'"], "a.b_c is neither in your folder nor in the image"),
        (1, "", ["/usr/bin/python: No module named nonesuch"], "nonesuch is neither in your folder nor in the image"),
        (1, "", ["ModuleNotFoundError: No module named 'lightning'"], "install it with --pip lightning"),
        (1, "", ["ModuleNotFoundError: No module named 'cv2'"], "install it with --pip opencv-python-headless"),
        (1, "", ["ModuleNotFoundError: Requirement 'requests[socks]>=2' not met. x"], "--pip 'requests[socks]>=2'"),
        (1, "", ["ModuleNotFoundError: Requirement 'requests >= 2; extra == x' not met"], "--pip 'requests >= 2'"),
        (1, "", ["RuntimeError: To use Fabric, you must call `.launch()` or use the CLI"], "-e LT_CLI_USED=1"),
        (2, "", ["python: can't open file '/workspace/x.py'"], "in the folder in which you started the job"),
        (2, "", ["python: can't open file '/workspace/x.py': [Errno 13] Permission denied"], "chmod a+r"),
        (1, "", ["[rank0]: bdb.BdbQuit"], "breakpoint()"),
        (2, "", ["train.py: error: unrecognized arguments: --gpus none"], "before the script"),
        (2, "", ["train.py: error: unrecognized arguments: --gpus-per-node 2"], "see the script's --help; if"),
        (
            1,
            "",
            ["(ModuleNotFoundError: __path__ attribute not found on 'app' while"],
            "app.py shadows the package app",
        ),
        (1, "", ["EOFError: EOF when reading a line"], "--stdin"),
        (2, "", ["error: unrecognized arguments: --lrr"], "--help"),
        (135, "", [], "shm_size"),
        (1, "", ["DataLoader worker (pid 9) is killed by signal: Bus error."], "shm_size"),
        (1, "", ["DataLoader worker (pid 9) is killed by signal: Killed."], "DataLoader workers"),
        (1, "", ["OSError: [Errno 30] Read-only file system: 'x'"], "workers can write to $JOB_DIR, /tmp and"),
        (
            1,
            "",
            ["FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'"],
            "nodes see only the folder in which you started the job",
        ),
        (1, "", ["RuntimeError: No CUDA GPUs are available"], "--gpus all"),
        (1, "", ["PermissionError: [Errno 13] Permission denied: 'x'"], "$JOB_DIR"),
        (134, "", ["terminate called without an active exception"], "destroy_process_group"),
        (132, "", [], "CPU"),
        (3, "", [], "it printed nothing: its script may have called sys.exit()"),
        (127, "", [], "see the end of the log"),
        (127, "", ["[node] rank 0 did not start: No such file or directory: x"], "--image"),
        (126, "", ["[node] rank 0 did not start: Permission denied: ./x"], "chmod"),
        (126, "", ["[node] rank 0 did not start: Address already in use: port 29500"], "listens on port 29500"),
        (137, "out of memory", [], "--memory 8g"),
        (137, "out of memory in a child", [], "DataLoader workers"),
        (137, "node stopped", [], "orchestrate stop"),
        (137, "node lost", [], "docker events"),
        (137, "partition", [], "network"),
        (137, "host lost", [], "min_trainers"),
        (137, "engine lost", [], "live-restore"),
        (137, "interrupted", [], "no action needed"),
        (143, "timeout", [], "the log of this rank"),
        (0, "left early", [], "the log of this rank"),
    ],
)
def test_a_hint_must_say_what_to_do(code, known, lines, hint):
    assert hint in diagnose(PLAN, WorkerExit(1, code), known, lines, "log").hint


@pytest.mark.parametrize(
    ("code", "known", "lines", "hint"),
    [
        (1, "", ["ModuleNotFoundError: No module named 'a.b_c'"], "a.b_c is neither in your folder nor installed"),
        (1, "", ["OSError: [Errno 30] Read-only file system: 'x'"], "workers run as your user"),
        (1, "", ["[rank1]: FileNotFoundError: [Errno 2] No such file or directory: 'a'"], "paths are relative to"),
        (127, "", ["[node] rank 0 did not start: No such file or directory: x"], "PATH"),
        (137, "out of memory", [], "use a smaller batch"),
        (1, "", ["DataLoader worker (pid 9) is killed by signal: Killed."], "use fewer DataLoader workers"),
    ],
)
def test_a_hint_must_fit_local_processes(code, known, lines, hint):
    plan = dataclasses.replace(PLAN, inventory=dataclasses.replace(PLAN.inventory, engine="process"))
    assert hint in diagnose(plan, WorkerExit(1, code), known, lines, "log").hint


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["AssertionError: Torch not compiled with CUDA enabled"], "no GPUs"),
        (["RuntimeError: Found no NVIDIA driver on your system."], "no GPUs"),
        (["ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"], "no GPUs"),
        (["PermissionError: [Errno 13] Permission denied: 'out'"], "not writable"),
        (["FileNotFoundError: [Errno 2] No such file or directory: 'a'"], "no such file"),
        (["FileNotFoundError: [Errno 2] No such file or directory: 'a'", "", "ValueError: no data"], "error"),
        (["[rank0]: FileNotFoundError: [Errno 2] No such file", "[W1] Warning: destroy it"], "no such file"),
        (["no FileNotFoundError: here", "ValueError: no data"], "error"),
        (["RuntimeError: nccl2 requires at least one CUDA device"], "no GPUs"),
        ([*TRACE, "ModuleNotFoundError: No module named 'apex'", "", *TRACE, "RuntimeError: remote gone"], "error"),
        ([*TRACE, "RuntimeError: cannot load x", "ModuleNotFoundError: No module named 'apex'"], "script"),
        (["ModuleNotFoundError: No module named 'apex'", *TRACE, "RuntimeError: net"], "error"),
        ([*TRACE, "ModuleNotFoundError: No module named 'apex'"], "script"),
        ([f"[rank1]: {line}" for line in (*TRACE, "ModuleNotFoundError: No module named 'apex'")], "script"),
        ([f"[rank1]: {line}" for line in (*TRACE, "OSError: [Errno 30] Read-only file system: 'x'")], "not writable"),
    ],
)
def test_permanent_errors_must_be_distinguished_from_others(lines, cause):
    assert diagnose(PLAN, WorkerExit(1, 1), None, lines, "log").cause == cause


def test_a_failing_gpu_must_not_be_diagnosed_as_a_job_without_gpus():
    plan = dataclasses.replace(PLAN, gpus=("GPU-1", "GPU-2"))
    assert diagnose(plan, WorkerExit(1, 1), None, ["RuntimeError: No CUDA GPUs are available"], "log").cause == "error"


def test_the_exit_code_of_our_own_sigterm_must_not_look_like_a_cause():
    assert "143" not in diagnose(PLAN, WorkerExit(1, 143), Reason.TIMEOUT, [], "log").summary
    assert "143" in diagnose(PLAN, WorkerExit(1, 143), None, [], "log").summary


def test_a_cause_must_name_the_worker_its_node_and_its_host():
    result = diagnose(PLAN, WorkerExit(2, 3), None, ["one", "two"], "rank-2.log", "gpu-box")
    assert (result.rank, result.node, result.exit_code) == (2, "trainer-2", 3)
    assert (result.last_lines, result.log) == (["one", "two"], "rank-2.log")
    assert result.summary == "rank 2 on trainer-2 (gpu-box) exited with code 3"


def test_a_missing_program_must_be_distinguished_from_a_missing_file():
    trace = [*TRACE, '  File "subprocess.py", line 1, in _execute_child', "    raise child_exception_type(errno_num)"]
    lines = [*trace, "FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'"]
    assert "the program is not installed" in diagnose(PLAN, WorkerExit(1, 1), None, lines, "log").hint
    later = [*lines, "", *TRACE, "FileNotFoundError: [Errno 2] No such file or directory: 'a.csv'"]
    assert "the folder in which you started the job" in diagnose(PLAN, WorkerExit(1, 1), None, later, "log").hint


def test_a_complete_traceback_must_need_no_hint():
    assert diagnose(PLAN, WorkerExit(1, 1), None, [*TRACE, "ValueError: no"], "log").hint == ""
    assert "further up" in diagnose(PLAN, WorkerExit(1, 1), None, ["ValueError: no"], "log").hint
