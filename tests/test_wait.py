"""A node that waits for an orchestrator: workers that are forked by a warm process must be as fresh ones are."""

import json
import os
import re
import select
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, descendants, eventually, gone

NODE = str(ROOT / "orchestrate" / "node")
PIPE = str(ROOT / "orchestrate" / "node" / "pipe.py")
PRELOAD = "colorsys"  # a module that nobody else imports: found imported, it tells a forked worker from a fresh one


class Pipe:
    """Somebody who talks to a node, from outside of a container."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, "-I", "-S", PIPE]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.heard: list[dict] = []
        self.partial = b""

    def ask(self, what: str, **facts) -> None:
        self.process.stdin.write(json.dumps({"ask": what, **facts}).encode() + b"\n")
        self.process.stdin.flush()

    def until(self, say: str, **facts) -> dict | None:
        """The first such message, also among those that were heard before; None where the node ends without it."""
        wanted = {"say": say, **facts}
        while not (found := [message for message in self.heard if wanted.items() <= message.items()]):
            assert select.select([self.process.stdout], [], [], 60)[0], f"no {wanted} among {self.heard}"
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                return None
            *lines, self.partial = (self.partial + chunk).split(b"\n")
            self.heard += map(json.loads, lines)
        return found[0]

    def status(self) -> dict:
        self.heard = [message for message in self.heard if message["say"] != "status"]
        self.ask("status")
        status = self.until("status")
        return {key: status[key] for key in ("generation", "codes", "signs", "running")}

    def close(self, code: int = 0) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            stream.close()
        assert self.process.wait(timeout=150) == code


class Waiting:
    """A node in mode `wait`, and somebody who starts workers in it."""

    def __init__(self, tmp_path, preload: str = "", **env: str) -> None:
        self.folder = tmp_path
        self.env = os.environ | {"NODE_MODE": "wait", "NODE_SOCKET": str(tmp_path / "s"), "JOB_DIR": str(tmp_path)}
        self.env |= {"NODE_PRELOAD": preload, **env}
        self.out = tmp_path / "stdout"
        self.pipe = Pipe(self.env)  # before the node listens
        with self.out.open("wb") as out:
            self.node = subprocess.Popen([sys.executable, NODE], env=self.env, stdout=out, cwd=tmp_path)

    def start(self, rank: int, code: str, generation: int = 0) -> None:
        script = self.folder / f"{rank}.py"
        script.write_text(code)
        self.command(rank, str(script), "--flag", "x y", TORCHELASTIC_RESTART_COUNT=str(generation))

    def command(self, rank: int, *words: str, **env: str) -> None:
        own = {"RANK": str(rank), "ONLY_HERE": "1", **env}
        self.pipe.ask("start", command=words, env=own, inherit=True, cwd=None)

    def code(self, rank: int, generation: int = 0) -> int | None:
        """The exit code of a worker; None where the node ends first."""
        ended = self.pipe.until("ended", rank=rank, generation=generation)
        return ended and ended["code"]

    def run(self, rank: int, code: str, generation: int = 0) -> int | None:
        self.start(rank, code, generation)
        return self.code(rank, generation)

    def status(self) -> dict:
        return self.pipe.status()

    def log(self, rank: int) -> str:
        path = self.folder / "logs" / f"rank-{rank}.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> None:
        self.node.terminate()
        assert self.node.wait(timeout=150) == 0
        self.pipe.close()


@pytest.fixture(params=["", PRELOAD], ids=["fresh", "warm"])
def waiting(tmp_path, request):
    node = Waiting(tmp_path, request.param)
    yield node
    node.end()
    assert not (tmp_path / "s").exists()


@pytest.fixture(params=["", PRELOAD], ids=["fresh", "warm"])
def patient(tmp_path, request):
    """A node that would give its workers longer than any test takes."""
    node = Waiting(tmp_path, request.param, NODE_GRACE="1000")
    yield node
    node.end()


def test_a_waiting_node_must_run_workers_in_the_environment_that_they_are_given(waiting):
    code = "import json, os, sys\nprint(json.dumps([os.environ['ONLY_HERE'], sys.argv[1:], os.getcwd()]))\nsys.exit(5)"
    for rank in range(3):
        waiting.start(rank, code)
    assert [waiting.code(rank) for rank in range(3)] == [5, 5, 5]
    assert [json.loads(waiting.log(rank)) for rank in range(3)] == [["1", ["--flag", "x y"], str(waiting.folder)]] * 3


def test_a_worker_must_have_nothing_of_the_nodes_environment_where_it_is_given_its_own(waiting):
    (waiting.folder / "0.py").write_text("import os\nprint('NODE_MODE' in os.environ, os.getcwd())")
    env = {key: os.environ[key] for key in ("PATH", "PYTHONPATH") if key in os.environ}
    env |= {"RANK": "0", "JOB_DIR": str(waiting.folder)}
    waiting.pipe.ask("start", command=[str(waiting.folder / "0.py")], env=env, inherit=False, cwd="/")
    assert waiting.code(0) == 0
    assert waiting.log(0) == "False /\n"


def test_a_node_that_is_asked_to_must_stop_its_workers_and_stay(waiting):
    waiting.start(0, "import signal\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready\n" in waiting.log(0))
    waiting.pipe.ask("stop", kill=False)
    assert waiting.code(0) == 143
    assert waiting.run(0, "print('again')", generation=1) == 0
    assert waiting.log(0) == "ready\n[node] generation 1\nagain\n"


def test_a_node_must_say_whether_it_had_asked_a_worker_to_end(waiting):
    for rank in range(2):
        waiting.start(rank, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pids = [int(eventually(lambda rank=rank: waiting.log(rank))) for rank in range(2)]
    os.kill(pids[0], signal.SIGTERM)
    assert waiting.pipe.until("ended", rank=0) | {"code": 143, "asked": False} == waiting.pipe.until("ended", rank=0)
    waiting.pipe.ask("stop", kill=False)
    assert waiting.pipe.until("ended", rank=1) | {"code": 143, "asked": True} == waiting.pipe.until("ended", rank=1)


def test_a_worker_that_had_ended_before_it_was_asked_to_must_be_told_so(waiting):
    waiting.start(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: waiting.log(0)))
    waiting.node.send_signal(signal.SIGSTOP)  # so that it hears of both at once
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: gone(pid))
    waiting.pipe.ask("stop", kill=False)
    waiting.node.send_signal(signal.SIGCONT)
    ended = waiting.pipe.until("ended", rank=0)
    assert (ended["code"], ended["asked"]) == (143, False)


def test_a_worker_of_a_generation_that_is_over_must_not_start(waiting):
    (waiting.folder / "generation").write_text("2")
    assert waiting.run(0, "print('late')", generation=1) == 143
    assert waiting.log(0) == ""
    assert waiting.run(0, "print('right')", generation=2) == 0
    (waiting.folder / "generation").write_text("2 over\n")
    assert waiting.run(1, "print('late')", generation=2) == 143


def test_a_worker_of_a_newer_generation_must_end_those_of_older_ones(waiting):
    code = "import os, signal\nsignal.signal(15, signal.SIG_IGN)\nprint(os.getpid())\nsignal.pause()"
    waiting.start(0, code)
    pid = int(eventually(lambda: waiting.log(0)))
    assert waiting.run(1, "print('new')", generation=1) == 0
    eventually(lambda: gone(pid))
    assert waiting.status() == {"generation": 1, "codes": {"1": 0}, "signs": {"1": ""}, "running": {}}
    assert waiting.run(2, "print('older')") == 143


def test_a_node_that_is_asked_to_must_kill_its_workers_and_stay(patient):
    waiting = patient
    waiting.start(0, "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('ready')\nsignal.pause()")
    eventually(lambda: "ready\n" in waiting.log(0))
    waiting.pipe.ask("stop", kill=True)
    assert waiting.code(0) == 137
    assert waiting.node.poll() is None


def test_a_worker_must_outlive_whoever_started_it_and_the_next_one_must_hear_how_it_ended(waiting):
    code = "import os, signal, sys\nsignal.signal(15, lambda *_: sys.exit(9))\nprint(os.getpid())\nsignal.pause()"
    waiting.start(0, code)
    assert waiting.pipe.until("started", rank=0, generation=0)
    pid = int(eventually(lambda: waiting.log(0)))
    waiting.pipe.process.kill()
    waiting.pipe.close(-signal.SIGKILL)
    waiting.pipe = Pipe(waiting.env)
    status = waiting.status()
    assert (status["generation"], status["codes"], status["running"]["0"]["pid"]) == (0, {}, pid)
    assert status["running"]["0"]["state"] in "RSD" and status["running"]["0"]["cpu"] >= 0
    waiting.pipe.ask("stop", kill=False)
    assert waiting.code(0) == 9
    another = Pipe(waiting.env)
    assert another.status() == {
        "generation": 0,
        "codes": {"0": 9},
        "signs": {"0": ""},
        "running": {},
    }  # also when it is over
    another.close()


def test_a_worker_that_hangs_must_print_where_it_stands_and_abort(waiting):
    code = "import signal\n\ndef waits_here():\n    print('ready')\n    signal.pause()\n\nwaits_here()"
    for rank in range(2):
        waiting.start(rank, code)
        eventually(lambda rank=rank: "ready\n" in waiting.log(rank))
    waiting.pipe.ask("dump")
    assert [waiting.code(rank) for rank in range(2)] == [134, 134]
    for rank in range(2):
        assert f'/{rank}.py", line 5 in waits_here' in waiting.log(rank)


def test_a_node_that_is_cleaned_must_know_nothing_and_have_nothing_of_the_last_job(waiting):
    code = (
        "import os, subprocess\nprint(os.getpid(), subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)\n"
    )
    waiting.start(0, code + "import signal\nsignal.pause()")
    pids = eventually(lambda: waiting.log(0).split())
    waiting.pipe.ask("clean")
    assert waiting.pipe.until("clean")
    assert all(gone(int(pid)) for pid in pids)
    assert waiting.status() == {"generation": -1, "codes": {}, "signs": {}, "running": {}}
    assert not [message for message in waiting.pipe.heard if message["say"] == "ended"]


@pytest.mark.parametrize("preload", ["", PRELOAD], ids=["fresh", "warm"])
def test_the_end_of_a_node_must_be_the_end_of_its_workers_and_of_what_forks_them(tmp_path, preload):
    node = Waiting(tmp_path, preload)
    node.start(0, "import os, signal\nprint(os.getpid())\nsignal.pause()")
    pid = int(eventually(lambda: node.log(0)))
    pids = {pid, *descendants(node.node.pid)}
    assert len(pids) == (2 if preload else 1)
    node.node.kill()
    node.node.wait()
    assert node.code(0) is None
    node.pipe.close()
    eventually(lambda: all(map(gone, pids)))


def test_a_process_that_still_imports_must_not_outlive_its_node(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nopen('importing', 'w').close()\nsignal.pause()")
    node = Waiting(tmp_path, "slow")
    eventually(lambda: (tmp_path / "importing").exists())
    (importing,) = descendants(node.node.pid)
    node.node.kill()
    node.node.wait()
    node.pipe.close()
    eventually(lambda: gone(importing))


FORKS = (
    "import os, signal\nsignal.signal(15, signal.SIG_IGN)\npid = os.fork()\nwhile not pid: signal.pause()\nprint(pid)\n"
)


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", 137), ("signal.pause()", 137)]
)
def test_what_a_worker_has_forked_must_end_with_it(patient, end, code):
    patient.start(0, FORKS + end)
    pid = int(eventually(lambda: patient.log(0)))
    if "pause" in end:
        patient.pipe.ask("stop", kill=True)
    assert patient.code(0) == code
    eventually(lambda: gone(pid))


# --- whatever a script can see of its start and its end

SCRIPTS = {
    "what it is": "import sys, os\nprint(__name__, __file__, __doc__, sys.argv, sys.path[0], os.getcwd(), __spec__)",
    "what it inherits": (
        "import os, signal, sys\nprint(sys.stdin.read() == '', os.getsid(0) == os.getpid(), sorted(os.environ),\n"
        "      [signal.getsignal(n) for n in (2, 13, 15)], sorted(map(int, os.listdir('/proc/self/fd')))[:3])"
    ),
    "its command line": "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))",
    "an exit code": "raise SystemExit(3)",
    "an exit code in a list": "import sys\nsys.exit([1, 'two'])",
    "a last word": "import sys\nsys.exit('error: enough')",
    "an exception": "def f():\n    raise ValueError('wrong')\n\nf()",
    "an exception within another": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('wrong')",
    "a hook of its own": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0])\n1 / 0",
    "a mistake": "print('not reached'\n",
    "an import that fails": "import nonesuch",
    "the order of the end": (
        "import atexit, threading\natexit.register(print, 'atexit')\nclass A:\n    def __del__(self): print('del')\n"
        "a = A()\nevent = threading.Event()\n"
        "threading.Thread(target=lambda: (event.wait(), print('thread'))).start()\nprint('end')\nevent.set()"
    ),
    "a file that is not closed": "f = open('unclosed', 'w')\nf.write('kept')",
    "a file that a cycle holds": "class A: pass\na = A()\na.me = a\na.f = open('unclosed', 'w')\na.f.write('kept')",
    "processes that are spawned": (
        "import multiprocessing as m\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('spawn').Pool(2) as p: print(p.map(f, [1, 2, 3]))"
    ),
    "processes that are forked": (
        "import multiprocessing as m\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('fork').Pool(2) as p: print(p.map(f, [1, 2, 3]))"
    ),
    "what it pickles": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), A.__module__)",
    "death": "import os\nos.kill(os.getpid(), 11)",
}


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS)
def test_a_forked_worker_must_be_as_a_fresh_one(tmp_path, code):
    fresh, forked = (how_it_ends(tmp_path / (preload or "fresh"), preload, code) for preload in ("", PRELOAD))
    assert forked == fresh


def how_it_ends(folder, preload: str, code: str) -> tuple[int, list[str], str]:
    folder.mkdir()
    node = Waiting(folder, preload)
    exit_code = node.run(0, code)
    node.end()
    kept = folder / "unclosed"
    shown = re.sub(r"0x[0-9a-f]+|Current thread.*|Thread .*", "#", node.log(0).replace(str(folder), "FOLDER"))
    assert "zygote" not in "".join(shown.splitlines()[:4])
    return exit_code, shown.splitlines()[:4], kept.read_text() if kept.exists() else ""


@pytest.fixture
def warm(tmp_path):
    node = Waiting(tmp_path, PRELOAD)
    yield node
    node.end()


IS_FORKED = f"import sys\nprint('{PRELOAD}' in sys.modules)"


def test_what_was_imported_ahead_must_be_there(warm):
    assert warm.run(0, IS_FORKED) == 0
    assert warm.log(0) == "True\n"


def test_a_module_must_run_as_with_dash_m(warm):
    (warm.folder / "package").mkdir()
    (warm.folder / "package" / "__main__.py").write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)")
    warm.command(0, "-m", "package", "a")
    assert warm.code(0) == 0
    assert warm.log(0) == "__main__ ['a'] package.__main__\n"


def test_a_module_of_the_script_must_win_over_one_that_was_imported_ahead(warm):
    assert warm.run(0, IS_FORKED) == 0  # so it has been imported
    (warm.folder / f"{PRELOAD}.py").write_text("own = 1")
    assert warm.run(1, f"import {PRELOAD}\nprint({PRELOAD}.own)") == 0
    assert (warm.log(0), warm.log(1)) == ("True\n", "1\n")


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "TORCH_LOGS", "LD_PRELOAD", "MKL_NUM_THREADS"])
def test_a_variable_that_counts_at_the_start_must_count(warm, name):
    (warm.folder / "0.py").write_text(f"{IS_FORKED}\nimport os\nprint(os.environ['{name}'])")
    warm.command(0, str(warm.folder / "0.py"), **{name: "0"})
    assert warm.code(0) == 0
    assert warm.log(0).splitlines()[-2:] == ["False", "0"]


@pytest.mark.parametrize("words", [("nonesuch.py",), ("-m", "nonesuch"), ("-m",)])
def test_what_is_not_there_must_be_told_in_pythons_own_words(warm, words):
    fresh = subprocess.run([sys.executable, *words], cwd=warm.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    warm.command(0, *words)
    assert warm.code(0) == fresh.returncode
    assert warm.log(0) == fresh.stdout.decode()


@pytest.mark.parametrize(
    ("preload", "why"),
    [
        ("nonesuch", "nonesuch cannot be imported: ModuleNotFoundError: No module named 'nonesuch'"),
        ("bad", "bad cannot be imported: SystemExit: 3"),
        ("deadly", "it ended"),
        ("threads", "1 threads were started, which a fork would lose"),
    ],
)
def test_where_nothing_can_be_forked_workers_must_start_afresh(tmp_path, preload, why):
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "deadly.py").write_text("import os\nos.abort()")
    (tmp_path / "threads.py").write_text("import threading\nthreading.Thread(target=threading.Event().wait).start()")
    node = Waiting(tmp_path, preload)
    for rank in range(2):  # the first one waits for the import; when the second one comes, that has failed
        assert node.run(rank, "print('ran')") == 0
        assert node.log(rank) == "ran\n"
    node.end()
    assert node.out.read_text().splitlines()[0] == f"[node] each worker starts an interpreter of its own: {why}"


def test_a_worker_that_waits_for_an_import_must_end_when_it_is_asked_to(tmp_path):
    (tmp_path / "slow.py").write_text("import signal\nopen('importing', 'w').close()\nsignal.pause()")
    node = Waiting(tmp_path, "slow")
    eventually(lambda: (tmp_path / "importing").exists())
    node.start(0, "print('ran')")
    eventually(lambda: "0" in node.status()["running"])
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 143
    assert (node.log(0), node.status()["codes"]) == ("", {"0": 143})
    node.end()


def test_an_environment_that_is_too_large_for_a_message_must_arrive_all_the_same(warm):
    large = {f"LARGE_{i}": "x" * 100_000 for i in range(3)}
    (warm.folder / "0.py").write_text(f"{IS_FORKED}\nimport os\nprint(len(os.environ['LARGE_2']))")
    warm.command(0, str(warm.folder / "0.py"), **large)
    assert warm.code(0) == 0
    assert warm.log(0) == "False\n100000\n"
    assert warm.run(1, IS_FORKED) == 0
    assert warm.log(1) == "True\n"


def test_randomness_must_differ_between_forked_workers(warm):
    code = "import random, uuid\nprint(random.random(), uuid.uuid4())"
    assert [warm.run(rank, code) for rank in range(2)] == [0, 0]
    assert not set(warm.log(0).split()) & set(warm.log(1).split())


def test_randomness_of_numpy_must_differ_between_forked_workers(tmp_path):
    node = Waiting(tmp_path, "numpy.random")
    code = "import sys\nprint('numpy.random' in sys.modules)\nimport numpy\nprint(numpy.random.random())"
    assert [node.run(rank, code) for rank in range(2)] == [0, 0]
    node.end()
    (first, one), (second, other) = node.log(0).split(), node.log(1).split()
    assert (first, second) == ("True", "True") and one != other


def test_a_forked_worker_must_have_as_many_threads_as_its_environment_says(tmp_path):
    node = Waiting(tmp_path, "torch")
    (tmp_path / "0.py").write_text(
        "import sys\nprint('torch' in sys.modules)\nimport torch\nprint(torch.get_num_threads())"
    )
    for rank, threads in enumerate(("1", "3")):
        node.command(rank, str(tmp_path / "0.py"), OMP_NUM_THREADS=threads)
        assert node.code(rank) == 0
        assert node.log(rank).split() == ["True", threads]
    node.end()


def test_workers_must_survive_the_process_that_forked_them_and_later_ones_start_afresh(warm):
    warm.start(0, f"{IS_FORKED}\nimport os, signal\nprint(os.getppid())\nsignal.pause()")
    eventually(lambda: warm.log(0).count("\n") == 2)
    assert int(warm.log(0).split()[1]) == warm.node.pid
    (zygote,) = subprocess.run(["pgrep", "-P", str(warm.node.pid), "-f", "zygote"], capture_output=True).stdout.split()
    os.kill(int(zygote), signal.SIGKILL)
    eventually(lambda: gone(int(zygote)))
    assert warm.run(1, IS_FORKED) == 0
    assert warm.log(1) == "False\n"
    warm.pipe.ask("stop", kill=False)
    assert warm.code(0) == 143


def test_what_a_generation_is_given_to_end_must_not_end_the_next_one(tmp_path):
    node = Waiting(tmp_path, NODE_GRACE="0.5")
    node.start(0, "import signal\nprint('ready')\nsignal.pause()")
    eventually(lambda: node.log(0))
    node.pipe.ask("stop", kill=False)
    assert node.code(0) == 143
    assert node.run(1, "import time\ntime.sleep(1)", generation=1) == 0  # longer than that
    node.end()


def test_what_leaves_its_session_and_starts_others_must_end_with_the_node(waiting):
    inner = "import signal, subprocess\nprint(subprocess.Popen(['sleep', '1000']).pid, flush=True)\nsignal.pause()"
    own_session = f"subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True, stdout=-1)"
    assert waiting.run(0, f"import subprocess, sys\np = {own_session}\nprint(p.pid, int(p.stdout.readline()))") == 0
    pids = [int(pid) for pid in waiting.log(0).split()]
    assert len(pids) == 2 and not any(map(gone, pids))
    waiting.node.terminate()
    waiting.node.wait(timeout=150)
    assert all(map(gone, pids))


def test_a_process_that_left_its_workers_session_must_end_with_the_node(waiting):
    code = "import subprocess\nprint(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    assert waiting.run(0, code) == 0
    pid = int(waiting.log(0))
    assert not gone(pid)
    waiting.node.terminate()
    waiting.node.wait(timeout=150)
    assert gone(pid)
