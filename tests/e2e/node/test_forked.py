"""A worker that the zygote forks must look to its script like one that was started as a fresh process."""

import os
import random
import signal
import socket
import subprocess
import sys

import pytest
from support.agents import IS_FORKED, PRELOAD, Waiting
from support.processes import descendants, gone
from support.waiting import eventually

from orchestrate.node.programs import zygote
from orchestrate.node.warm import Zygote


@pytest.fixture
def warm(tmp_path):
    node = Waiting(tmp_path, PRELOAD)
    yield node
    node.end()


def test_preloaded_modules_must_be_available(warm):
    assert warm.run(0, IS_FORKED) == 0
    assert warm.log(0) == "True\n"


def test_a_module_must_run_as_with_dash_m(warm):
    (warm.folder / "package").mkdir()
    (warm.folder / "package" / "__main__.py").write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)")
    warm.command(0, "-m", "package", "a")
    assert warm.code(0) == 0
    assert warm.log(0) == "__main__ ['a'] package.__main__\n"


def test_a_module_next_to_the_script_must_win_over_a_preloaded_one(warm):
    assert warm.run(0, IS_FORKED) == 0  # the module has been imported
    (warm.folder / f"{PRELOAD}.py").write_text("own = 1")
    assert warm.run(1, f"import {PRELOAD}\nprint({PRELOAD}.own)") == 0
    assert (warm.log(0), warm.log(1)) == ("True\n", "1\n")


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TORCH_LOGS", "LD_PRELOAD", "MKL_NUM_THREADS"])
def test_a_variable_that_is_read_at_startup_must_take_effect(warm, name):
    (warm.folder / "0.py").write_text(f"{IS_FORKED}\nimport os\nprint(os.environ['{name}'])")
    warm.command(0, str(warm.folder / "0.py"), **{name: "0"})
    assert warm.code(0) == 0
    assert warm.log(0).splitlines()[-2:] == ["False", "0"]


@pytest.mark.parametrize(
    ("name", "early"),
    [(f"{prefix}X", True) for prefix in ("PYTHON", "PYTORCH_", "TORCH_", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_")]
    + [(f"{prefix}X", True) for prefix in ("KMP_", "MKL_", "OPENBLAS_")]
    + [("OMP_NUM_THREADS", False), ("PYTHONUNBUFFERED", False), ("TORCH_NCCL_X", False)]
    + [("TORCHELASTIC_RESTART_COUNT", False), ("RANK", False), ("NCCL_DEBUG", False), ("MY_PYTHON", False)],
)
def test_only_variables_that_are_read_at_startup_must_need_a_fresh_process(name, early):
    assert zygote.startup_variables({name: "1", "PATH": "/bin"}) == ({name: "1"} if early else {})


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("{}.py", True), ("{}.so", True), ("{}/__init__.py", True), ("{}/data", False), ("{}.txt", False)],
)
def test_only_files_that_python_would_import_must_shadow_a_preloaded_module(warm, name, hidden):
    assert warm.run(0, IS_FORKED) == 0  # the module has been imported
    path = warm.folder / name.format(PRELOAD)
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert warm.run(1, IS_FORKED) == 0
    assert (warm.log(0), warm.log(1)) == ("True\n", f"{not hidden}\n")


def test_a_preloaded_module_of_the_script_must_be_available(tmp_path):
    (tmp_path / "mine.py").write_text("import os\npid = os.getpid()")
    node = Waiting(tmp_path, "mine")
    assert node.run(0, "import sys\nprint('mine' in sys.modules)\nimport mine, os\nprint(mine.pid == os.getpid())") == 0
    assert node.log(0) == "True\nFalse\n"
    node.end()


def test_a_library_that_ends_its_threads_before_a_fork_must_not_prevent_forking(tmp_path):
    (tmp_path / "threaded.py").write_text(
        "import os, threading\nenough = threading.Event()\nthread = threading.Thread(target=enough.wait)\n"
        "thread.start()\nos.register_at_fork(before=lambda: (enough.set(), thread.join()))\n"
    )
    node = Waiting(tmp_path, "threaded")
    assert node.run(0, "import sys\nprint('threaded' in sys.modules)") == 0
    assert node.log(0) == "True\n"
    node.end()


@pytest.mark.parametrize("name", ["script", "package"])
def test_a_script_that_is_not_a_py_file_must_run(warm, name):
    (warm.folder / "script").write_text(IS_FORKED)
    (warm.folder / "package").mkdir()
    (warm.folder / "package" / "__main__.py").write_text(IS_FORKED)
    warm.command(0, sys.executable, str(warm.folder / name))
    assert warm.code(0) == 0
    assert warm.log(0) == "False\n"


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
@pytest.mark.parametrize("cores", ["one", "100000", "nonsense"])
def test_a_worker_must_be_bound_to_its_cores_if_they_exist(tmp_path, preload, cores):
    all_cores = sorted(os.sched_getaffinity(0))
    node = Waiting(tmp_path, preload)
    code = "import os\nprint(sorted(os.sched_getaffinity(0)))"
    (tmp_path / "0.py").write_text(code)
    node.command(0, str(tmp_path / "0.py"), WORKER_CORES=str(all_cores[-1]) if cores == "one" else cores)
    assert node.code(0) == 0
    assert node.log(0) == f"{all_cores[-1:] if cores == 'one' else all_cores}\n"
    node.end()


@pytest.mark.parametrize("arguments", [("nonesuch.py",), ("-m", "nonesuch"), ("-m",)])
def test_a_missing_script_must_be_reported_with_pythons_own_message(warm, arguments):
    fresh = subprocess.run(
        [sys.executable, *arguments], cwd=warm.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    warm.command(0, *arguments)
    assert warm.code(0) == fresh.returncode
    assert warm.log(0) == fresh.stdout.decode()


@pytest.mark.parametrize(
    ("preload", "why"),
    [
        ("nonesuch", "nonesuch cannot be imported: ModuleNotFoundError: No module named 'nonesuch'"),
        ("bad", "bad cannot be imported: SystemExit: 3"),
        ("deadly", "the process that forks workers exited"),
        ("threads", "1 threads were started, which a fork would lose"),
    ],
)
def test_workers_must_be_started_as_fresh_processes_if_forking_is_not_possible(tmp_path, preload, why):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "deadly.py").write_text("import os\nos.abort()")
    (tmp_path / "threads.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()")
    node = Waiting(tmp_path, preload)
    for rank in range(2):  # the import fails while the first one waits, before the second one starts
        assert node.run(rank, "print('ran')") == 0
        assert node.log(rank) == "ran\n"
    node.end()
    assert node.out.read_text().splitlines()[0] == f"[node] starting a fresh interpreter for each worker: {why}"


SEARCH_MEMORY = """
import re
first, second = HALVES
found = 0
for line in [line for line in open("/proc/self/maps") if " rw" in line]:
    start, end = (int(word, 16) for word in line.split()[0].split("-"))
    try:
        with open("/proc/self/mem", "rb", 0) as memory:
            memory.seek(start)
            text = memory.read(end - start)
    except OSError:
        continue
    found += sum(text[match.end() : match.end() + 12] == second for match in re.finditer(first, text))
print("found", found)
"""


def test_the_memory_of_a_worker_must_not_contain_the_environment_of_an_earlier_one(warm):
    secret = "".join(random.choices("abcdefghij", k=24))
    (warm.folder / "own.py").write_text("print('ran')")
    warm.command(0, str(warm.folder / "own.py"), **{f"A_SECRET_{number}": secret for number in range(300)})
    assert warm.code(0) == 0
    assert warm.run(1, SEARCH_MEMORY.replace("HALVES", repr((secret[:12].encode(), secret[12:].encode())))) == 0, (
        warm.log(1)
    )
    assert warm.log(1) == "found 0\n"


@pytest.mark.parametrize("message", ["[]", "7", "nonsense", "[" * 50_000], ids=["list", "number", "text", "nested"])
def test_a_module_that_writes_to_the_socket_of_the_zygote_must_not_end_the_node(tmp_path, message):
    code = "import socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))"
    (tmp_path / "intruder.py").write_text(f"{code}\nsock.send({message.encode()!r})\nsock.detach()")
    node = Waiting(tmp_path, "intruder")
    assert node.run(0, "print('ran')") == 0
    node.end()
    assert node.out.read_text().startswith("[node] starting a fresh interpreter for each worker: ")


@pytest.mark.parametrize(
    "message", ['{"pid": -1}', '{"pid": 0}', '{"pid": 1}', '{"pid": "7"}', '{"pid": true}', "[]", "{}"]
)
def test_an_invalid_process_id_must_not_be_taken_for_a_workers(message):  # a signal to -1 goes to all processes
    zygote = Zygote.__new__(Zygote)
    zygote.sock, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with zygote.sock, other, open(os.devnull) as output:
        other.send(message.encode())
        with pytest.raises(OSError, match="does not respond"):
            zygote.fork(["x.py"], {}, None, output.fileno())


@pytest.mark.parametrize("imported", [True, False])
def test_a_zygote_that_has_imported_in_time_must_not_be_ended_by_the_time_limit(imported):
    settled = []
    zygote = Zygote.__new__(Zygote)
    zygote.ready, zygote.settled, zygote.end = imported or None, settled.append, lambda: None
    zygote.late()
    assert zygote.ready is imported and bool(settled) is not imported


def test_a_worker_that_waits_for_an_import_must_end_when_it_is_stopped(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nopen('importing', 'w').close()\nsignal.pause()")
    node = Waiting(tmp_path, "slow")
    eventually(lambda: (tmp_path / "importing").exists())
    node.start(0, "print('ran')")
    (importing,) = descendants(node.node.pid)
    os.kill(importing, signal.SIGSTOP)  # a waiting worker is reported in the state of the zygote
    eventually(lambda: node.status()["running"].get("0", {}).get("state") == "T")
    assert node.status()["running"]["0"]["pid"] == 0
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 143
    assert (node.log(0), node.status()["codes"]) == ("", {"0": 143})
    node.end()


def test_an_environment_that_is_too_large_for_a_message_must_reach_the_worker(warm):
    large = {f"LARGE_{i}": "x" * 100_000 for i in range(3)}
    (warm.folder / "0.py").write_text(f"{IS_FORKED}\nimport os\nprint(len(os.environ['LARGE_2']))")
    warm.command(0, str(warm.folder / "0.py"), **large)
    assert warm.code(0) == 0
    assert warm.log(0) == "False\n100000\n"
    assert warm.run(1, IS_FORKED) == 0
    assert warm.log(1) == "True\n"


def test_random_numbers_must_differ_between_forked_workers(warm):
    code = "import random, uuid\nprint(random.random(), uuid.uuid4())"
    assert [warm.run(rank, code) for rank in range(2)] == [0, 0]
    assert not set(warm.log(0).split()) & set(warm.log(1).split())


def test_random_numbers_of_numpy_must_differ_between_forked_workers(tmp_path):
    node = Waiting(tmp_path, "numpy.random")
    code = "import sys\nprint('numpy.random' in sys.modules)\nimport numpy\nprint(numpy.random.random())"
    assert [node.run(rank, code) for rank in range(2)] == [0, 0]
    node.end()
    (first, one), (second, other) = node.log(0).split(), node.log(1).split()
    assert (first, second) == ("True", "True") and one != other


def test_a_forked_worker_must_have_the_number_of_threads_in_its_environment(tmp_path):
    node = Waiting(tmp_path, "torch")
    (tmp_path / "0.py").write_text(
        "import sys\nprint('torch' in sys.modules)\nimport torch\nprint(torch.get_num_threads())"
    )
    for rank, threads in enumerate(("1", "3")):
        node.command(rank, str(tmp_path / "0.py"), OMP_NUM_THREADS=threads)
        assert node.code(rank) == 0
        assert node.log(rank).split() == ["True", threads]
    node.end()


def test_workers_must_survive_their_zygote_and_later_ones_start_as_fresh_processes(warm):
    warm.start(0, f"{IS_FORKED}\nimport os, signal\nprint(os.getppid())\nsignal.pause()")
    eventually(lambda: warm.log(0).count("\n") == 2)
    assert int(warm.log(0).split()[1]) == warm.node.pid
    (zygote,) = subprocess.run(["pgrep", "-P", str(warm.node.pid), "-f", "zygote"], capture_output=True).stdout.split()
    os.kill(int(zygote), signal.SIGKILL)
    eventually(lambda: gone(int(zygote)))
    for rank in (1, 2):
        assert warm.run(rank, IS_FORKED) == 0
        assert warm.log(rank) == "False\n"
    assert warm.out.read_text().count("starting a fresh interpreter for each worker") == 1
    warm.pipe.ask("stop", kill=False)
    assert warm.code(0) == 143


@pytest.mark.parametrize(
    ("left", "fails", "code"),
    [
        ("import threading; threading.Thread(target=signal.pause).start()", "raise ValueError('no')", 1),
        ("import atexit; atexit.register(signal.pause)", "raise ValueError('no')", 1),
        ("import threading; threading.Thread(target=signal.pause).start()", "sys.exit(3)", 3),
    ],
)
def test_a_script_that_has_failed_must_end_even_if_its_threads_or_exit_handlers_do_not(tmp_path, left, fails, code):
    node = Waiting(tmp_path, PRELOAD, NODE_GRACE="0.2")
    assert node.run(0, f"import signal, sys\n{left}\n{fails}") == code
    assert node.log(0).endswith("ended a script that had failed; its threads or child processes were still running\n")
    assert ("ValueError: no\n" in node.log(0)) == (code == 1)
    node.end()


def test_a_script_that_has_not_failed_must_have_all_the_time_for_its_threads(tmp_path):
    node = Waiting(tmp_path, PRELOAD, NODE_GRACE="0.2")
    late = "def late():\n    time.sleep(0.6)\n    print('done')"
    assert node.run(0, f"import threading, time\n{late}\nthreading.Thread(target=late).start()") == 0
    assert node.log(0) == "done\n"
    node.end()
