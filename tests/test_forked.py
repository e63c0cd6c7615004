"""A worker that is forked by a warm process must be as a fresh one is, by whatever a script can see."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import eventually, gone
from waiting import PRELOAD, Waiting

from orchestrate.node.warm import Zygote

SCRIPTS = {
    "what it is": "import sys, os\nprint(__name__, __file__, __doc__, sys.argv, sys.path[0], os.getcwd(), __spec__)",
    "what it inherits": (
        "import os, signal, sys\nprint(sys.stdin.read() == '', os.getsid(0) == os.getpid(), sorted(os.environ),\n"
        "      [signal.getsignal(n) for n in (2, 13, 15)], sorted(map(int, os.listdir('/proc/self/fd')))[:3])"
    ),
    "its command line": "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))",
    "whether garbage is collected": "import gc\nprint(gc.isenabled(), gc.get_threshold())",
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


@pytest.mark.parametrize("imported", [True, False])
def test_what_has_imported_in_time_must_not_be_given_up_when_the_time_is_over(imported):
    settled = []
    zygote = Zygote.__new__(Zygote)
    zygote.ready, zygote.settled, zygote.end = imported or None, settled.append, lambda: None
    zygote.late()
    assert zygote.ready is imported and bool(settled) is not imported


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
