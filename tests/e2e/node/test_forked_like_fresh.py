"""A forked worker must behave like one that was started as a fresh process."""

import re

import pytest
from support.agents import PRELOAD, Waiting

SCRIPTS = {
    "identity": "import sys, os\nprint(__name__, __file__, __doc__, sys.argv, sys.path[0], os.getcwd(), __spec__)",
    "inherited state": (
        "import os, signal, sys\nprint(sys.stdin.read() == '', os.getsid(0) == os.getpid(), sorted(os.environ),\n"
        "      [signal.getsignal(n) for n in (2, 13, 15)], sorted(map(int, os.listdir('/proc/self/fd')))[:3])"
    ),
    "command line": "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))",
    "garbage collection": "import gc\nprint(gc.isenabled(), gc.get_threshold())",
    "an exit code": "raise SystemExit(3)",
    "an exit code in a list": "import sys\nsys.exit([1, 'two'])",
    "an exit code that is too large": "raise SystemExit(259)",
    "an exit code below zero": "import sys\nsys.exit(-1)",
    "an exit without a code": "import sys\nprint('end')\nsys.exit()",
    "a keyboard interrupt": "raise KeyboardInterrupt",
    "annotations": "def f(x: print('evaluated')): pass",
    "buffered output of C": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.fopen.restype = ctypes.c_void_p\n"
        "libc.fputs(b'kept', ctypes.c_void_p(libc.fopen(b'unclosed', b'w')))"
    ),
    "shared descriptors": (
        "import os\npaths = [f'/proc/self/fd/{n}' for n in range(20)]\n"
        "found = [os.readlink(path) for path in paths if os.path.exists(path)]\n"
        "print([path.split(':')[0] for path in found if path.startswith(('pipe', 'socket', '/dev'))])"
    ),
    "blocked signals": "print(*[line for line in open('/proc/self/status') if line.startswith('SigBlk')])",
    "an exit message": "import sys\nsys.exit('error: enough')",
    "an exception": "def f():\n    raise ValueError('wrong')\n\nf()",
    "an exception during another one": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('wrong')",
    "its own exception hook": "import sys\nsys.excepthook = lambda *a: print('hooked', a[0])\n1 / 0",
    "a syntax error": "print('not reached'\n",
    "an import that fails": "import nonesuch",
    "the order of shutdown": (
        "import atexit, threading\natexit.register(print, 'atexit')\nclass A:\n    def __del__(self): print('del')\n"
        "a = A()\nevent = threading.Event()\n"
        "threading.Thread(target=lambda: (event.wait(), print('thread'))).start()\nprint('end')\nevent.set()"
    ),
    "a file that is not closed": "f = open('unclosed', 'w')\nf.write('kept')",
    "a file in a reference cycle": "class A: pass\na = A()\na.me = a\na.f = open('unclosed', 'w')\na.f.write('kept')",
    "spawned processes": (
        "import multiprocessing as m\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('spawn').Pool(2) as p: print(p.map(f, [1, 2, 3]))"
    ),
    "forked processes": (
        "import multiprocessing as m\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with m.get_context('fork').Pool(2) as p: print(p.map(f, [1, 2, 3]))"
    ),
    "pickling": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))), A.__module__)",
    "a proxy of a deleted object": "import weakref\nclass A: pass\nproxy = weakref.proxy(A())\nprint('done')",
    "an object whose class raises": (
        "class A:\n    @property\n    def __class__(self): raise RuntimeError('no class')\na = A()\nprint('done')"
    ),
    "an exit handler that raises": "import atexit, sys\natexit.register(sys.exit, 3)\natexit.register(lambda: 1 / 0)",
    "a thread that raises": "import threading\nthreading.Thread(target=lambda: 1 / 0).start()",
    "a file that cannot be flushed": (
        "import io, sys\nclass A(io.StringIO):\n    def flush(self): sys.exit(3)\na = A()\nprint('done')"
    ),
    "a closed stdout": "import sys\nprint('done')\nsys.stdout.close()",
    "a closed descriptor": "import os\nprint('done')\nos.close(1)",
    "no stdout": "import sys\nsys.stdout = sys.stderr = None",
    "another stdout on the same descriptor": (
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, line_buffering=True)\n"
        "print('done', sys.stdout.seekable(), sys.stderr.seekable())"
    ),
    "a detached stdout": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.detach())\nprint('done')",
    "a stdout that cannot be written": "import sys\nsys.stdout = open('/dev/full', 'w')\nprint('lost')",
    "an exit code too large for a C long": "raise SystemExit(-2**64)",
    "a hook that exits": "import sys\nsys.excepthook = lambda *a: sys.exit(75)\n1 / 0",
    "a destructor that needs an import": (
        "from pathlib import Path\nclass A:\n    def __del__(self): Path('unclosed').write_text('kept')\na = A()"
    ),
    "a destructor that exits": "import os\nclass A:\n    def __del__(self): os._exit(5)\na = A()",
    "a destructor and a signal handler": (
        "import signal\nclass A:\n    def __del__(self): print('del')\na = A()\n"
        "def handle(*_): pass\nsignal.signal(signal.SIGTERM, handle)"
    ),
    "a destructor in another module": (
        "code = 'class A:\\n    def __del__(self): print(__name__)\\na = A()'\nopen('store.py', 'w').write(code)\n"
        "import importlib\nimportlib.invalidate_caches()\nimport store"
    ),
    "a thread that does not end": (
        "import os, threading, time\nbeats = 0\ndef beat():\n    global beats\n    try:\n        while True:\n"
        "            beats += 1\n            time.sleep(0.0005)\n    except Exception:\n        os._exit(13)\n"
        "threading.Thread(target=beat, daemon=True).start()\nbig = [[i] for i in range(300_000)]"
    ),
    "a segmentation fault": "import os\nos.kill(os.getpid(), 11)",
}
ENDS = {  # the wording of the output differs
    "a destructor that raises": "class A:\n    def __del__(self): raise RuntimeError('del')\na = A()",
    "an exit handler of threading that raises": "import threading\nthreading._register_atexit(lambda: 1 / 0)",
    "a hook that raises": "import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('wrong')",
    "an exit message to a closed stderr": "import sys\nsys.stderr.close()\nsys.exit('error: enough')",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_a_forked_worker_must_exit_like_a_fresh_one(tmp_path, code):
    (fresh, _, _), (forked, _, _) = (
        result_of(tmp_path / (preload or "fresh"), preload, code) for preload in ("", PRELOAD)
    )
    assert forked == fresh


@pytest.mark.parametrize("code", SCRIPTS.values(), ids=SCRIPTS)
def test_a_forked_worker_must_behave_like_a_fresh_one(tmp_path, code):
    fresh, forked = (result_of(tmp_path / (preload or "fresh"), preload, code) for preload in ("", PRELOAD))
    assert forked == fresh


def result_of(folder, preload: str, code: str) -> tuple[int | None, list[str], str]:
    folder.mkdir()
    node = Waiting(folder, preload)
    exit_code = node.run(0, code)
    node.end()
    kept = folder / "unclosed"
    shown = re.sub(r"0x[0-9a-f]+|Current thread.*|Thread .*", "#", node.log(0).replace(str(folder), "FOLDER"))
    assert "zygote" not in "".join(shown.splitlines()[:4])
    return exit_code, shown.splitlines()[:4], kept.read_text() if kept.exists() else ""


IS_FORKED = f"import sys\nprint('{PRELOAD}' in sys.modules)"


def test_a_startup_variable_of_the_node_must_not_affect_a_worker_without_it(tmp_path):
    node = Waiting(tmp_path, PRELOAD, TORCH_LOGS="+all")
    (tmp_path / "0.py").write_text(f"{IS_FORKED}\nimport os\nprint('TORCH_LOGS' in os.environ)")
    env = {"RANK": "0", "JOB_DIR": str(tmp_path)}
    node.pipe.ask("start", command=[str(tmp_path / "0.py")], env=env, inherit=False, cwd=None)
    assert node.code(0) == 0
    assert node.log(0) == "False\nFalse\n"
    node.end()
