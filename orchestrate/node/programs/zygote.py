"""A process that has imported torch and forks workers, so that they need not import it again.

    python -u zygote.py SOCKET NODE_PID PADDING MODULE…

A separate program that uses only the standard library, since workers inherit what it imports. It reports whether it is
ready. Then each message describes a worker to start, `{"command", "env", "cwd"}`, with the descriptors of its input,
its output and, for its stack, a file; the answer is its process id. The node adopts and reaps it. One that would behave
differently from one in a fresh interpreter gets a fresh interpreter: it execs Python.

Modules of the job's folder are imported only after the node sends `GO`, when its network has the filter. Each worker
reads its own message, so its content, such as a secret, is never in the memory of workers that are forked later.
"""

from __future__ import annotations

import sys

STARTED = set(sys.modules)  # modules that every interpreter imports at its start

# ruff: noqa: E402
import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib.machinery
import importlib.util
import json
import os
import runpy
import signal
import socket
import threading
import time
import types
import weakref
from _io import _IOBase
from collections.abc import Callable
from typing import Any, NoReturn

GO, READ, DEBUGGER = b"g", b"r", f"{os.path.dirname(os.path.abspath(__file__))}/debugger.py"
SHOW_STACK, DEBUG, FAR = 46, 47, 1000  # real-time signals, and a descriptor that scripts neither close nor use again
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15  # of Linux' prctl(2)
MAX_EXIT = 10.0  # seconds in which a failed script must have ended, or in the grace period if that is shorter
DEVICES = ("/dev/nvidiactl", "/dev/dxg")  # one of them exists if there are GPUs; the latter on WSL
PRELOADED: set[str] = set()  # the modules that were imported before the fork
BEFORE_FORK: list[Callable[[], None]] = []  # steps that undo what is only for modules imported before it
libc = ctypes.CDLL(None)
ENVIRONMENT = dict(os.environ)  # before an imported module changes it
# Variables that take effect when an interpreter or a library starts; a worker with other values is not forked.
STARTUP = ("PYTHON", "PYTORCH", "TORCH", "LD_", "MALLOC_", "GLIBC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")  # take effect later, or are set here


def load(modules: list[str]) -> str:
    """Import modules that workers will need; return the error, or an empty string."""
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # workers can start without the zygote
            return f"{name} cannot be imported: {type(error).__name__}: {error}"
        if name == "torch":
            ask_in_child("is_available", bool)
            ask_in_child("device_count", int)
    return ""


def ask_in_child(name: str, kind: type[int]) -> None:
    """Let a child answer when a module asks torch.cuda for GPUs: that opens them, and they do not survive a fork."""
    cuda = sys.modules["torch"].cuda
    function = getattr(cuda, name)

    def ask() -> int:
        if PRELOADED:  # a module has kept this function
            return kind(function())
        if not (pid := os.fork()):
            try:
                os._exit(function())
            finally:
                os._exit(0)
        return kind(os.WEXITSTATUS(os.waitpid(pid, 0)[1]))

    setattr(cuda, name, ask)
    BEFORE_FORK.append(functools.partial(setattr, cuda, name, function))


def exists(name: str) -> bool:
    """Whether a module can be found, which imports the packages that contain it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def settle() -> str:
    """Prepare to fork; return why no worker can be forked, or an empty string."""
    gc.enable()
    gc.collect()
    PRELOADED.update(sys.modules)
    for restore in BEFORE_FORK:
        restore()
    gc.freeze()  # the collector would write to every object, and so copy its page
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # a worker does not finalize modules that were imported here; see `finish`
    if not (pid := os.fork()):
        os._exit(used_cuda())
    if os.waitpid(pid, 0)[1]:
        return "an imported module uses CUDA, which does not survive a fork: use CUDA in the script instead"
    threads = len(os.listdir("/proc/self/task"))  # counted after a fork, before which libraries end some threads
    return f"{threads - 1} threads were started, which a fork would lose" if threads > 1 else ""


def used_cuda() -> bool:
    """Whether CUDA was used before the fork, by torch or by any other library; runs in a forked child.

    torch records calls after which a forked process cannot initialize CUDA, which is harmless without a GPU. Other
    libraries have opened the device for unified memory, as NVML does, too.
    """
    torch = sys.modules.get("torch")
    with contextlib.suppress(AttributeError):
        if torch is not None and torch.cuda._is_in_bad_fork() and any(map(os.path.exists, DEVICES)):
            return True
    return any("/dev/nvidia-uvm" in os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))


def startup_variables(env: dict[str, str]) -> dict[str, str]:
    """The variables that take effect at start."""
    found = {name: value for name, value in env.items() if name.startswith(STARTUP) and not name.startswith(LATER)}
    if "PYTHONPATH" in found and sys.path[0] == os.getcwd():  # which an empty entry means, without effect then
        found["PYTHONPATH"] = os.pathsep.join(filter(None, found["PYTHONPATH"].split(os.pathsep)))
    return found


def like_fresh(command: list[str], env: dict[str, str]) -> bool:
    """Whether a forked worker would behave like a fresh one: equal startup variables, no shadowed module."""
    if startup_variables(env) != startup_variables(ENVIRONMENT):
        return False
    script = command[0].endswith(".py") and os.path.isfile(command[0])
    known = exists(command[1]) if command[0] == "-m" and command[1:] else script or command[0] == "-c"
    return known and not any(shadows(entry) for entry in os.scandir(sys.path[0]))


def shadows(entry: os.DirEntry[str]) -> bool:
    """Whether a file in the script's folder shadows a module that was imported from elsewhere."""
    name = entry.name.partition(".")[0]
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin is None or name in STARTED or origin.startswith(os.path.dirname(entry.path) + "/"):
        return False
    return entry.name.endswith((".py", ".so")) or os.path.isfile(f"{entry.path}/__init__.py")


def become(command: list[str], env: dict[str, str], cwd: str, node: int, descriptors: list[int]) -> NoReturn:
    """Become the worker; runs in the forked child, which the node adopts."""
    libc.prctl(PR_SET_DUMPABLE, 1)  # otherwise /proc/self would belong to root
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.setsid()
    deadline = time.monotonic() + 1
    while os.getppid() != node and time.monotonic() < deadline:
        time.sleep(0.001)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != node:
        os._exit(128 + signal.SIGKILL)
    stdin, output, *stacks = descriptors
    for number, descriptor in ((0, stdin), (1, output), (2, output)):
        os.dup2(descriptor, number)
    signal.signal(DEBUG, lambda _, frame: runpy.run_path(DEBUGGER)["attach"](frame))
    sys.breakpointhook = lambda *_, **__: runpy.run_path(DEBUGGER)["attach"](sys._getframe(1), wait=True)
    for file in stacks:
        with contextlib.suppress(OSError):  # fewer descriptors are allowed
            faulthandler.register(SHOW_STACK, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, FAR), all_threads=False)
    old = signal.signal  # Lightning restores all handlers, and would remove one that `signal` does not know
    vars(signal)["signal"] = functools.wraps(old)(lambda *a, **k: a[:1] == (SHOW_STACK,) or old(*a, **k))
    for descriptor in descriptors:
        os.close(descriptor)
    os.chdir(cwd)
    with contextlib.suppress(Exception):  # not set, not numbers, or not allowed
        os.sched_setaffinity(0, map(int, env["WORKER_CORES"].split(",")))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = cwd if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0]))
    importlib.invalidate_caches()
    fresh = not like_fresh(command, env)
    os.environ.clear()
    os.environ.update(env)
    if fresh:
        os.execvp(sys.executable, [sys.executable, "-u", *command])
    rename([sys.executable, "-u", *command])
    seed(env)
    run(command)


def seed(env: dict[str, str]) -> None:
    """Do what a fresh interpreter would have done: set the number of threads and seed random numbers."""
    torch, random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    if torch is not None and env.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(max(1, int(env["OMP_NUM_THREADS"])))
    if random is not None:
        random.seed()


def rename(command: list[str]) -> None:
    """Show the worker's command line in `ps` and `docker top`, instead of the zygote's."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/stat") as file:
            start, end = map(int, file.read().rpartition(")")[2].split()[45:47])
        text = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
    libc.prctl(PR_SET_NAME, b"python")


def run(command: list[str]) -> NoReturn:
    """Run a script or module as Python does: as `__main__`, with its own traceback and exit code."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    code: object = None
    try:
        execute(command)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        code = show(trimmed(error))
    finish(status(code))


def trimmed(error: BaseException) -> BaseException:
    """The exception without the frames of this file and of `runpy` at the start of its traceback."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return error.with_traceback(trace)


def execute(command: list[str]) -> None:
    """Run the script, module or code in `__main__`; nothing here refers to its variables afterwards."""
    sys.argv = [command[0], *command[2 if command[0] in ("-m", "-c") else 1 :]]
    if command[0] == "-m":
        return runpy._run_module_as_main(command[1])  # type: ignore[attr-defined, no-any-return]
    variables = sys.modules["__main__"].__dict__
    if command[0] == "-c":
        return exec(compile(command[1], "<string>", "exec", dont_inherit=True), variables)
    path = os.path.abspath(command[0])
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    variables.update(__file__=path, __cached__=None, __loader__=loader, __builtins__=__builtins__)
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), variables)


def status(code: object) -> int:
    """The exit code for an argument of `sys.exit`, which is printed if it is not a number."""
    if code is None or isinstance(code, int):
        return ((code or 0) if -(1 << 63) <= (code or 0) < 1 << 63 else -1) & 0xFF  # -1 if it does not fit a C long
    with contextlib.suppress(Exception):
        sys.stderr.write(f"{code}\n")
    return 1


def show(error: BaseException) -> object:
    """Print an exception that ends the worker, with the script's own hook if it has one; return the exit status."""
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        return end.code
    except BaseException:
        with contextlib.suppress(Exception):
            sys.__excepthook__(type(error), error, error.__traceback__)
    return code


def finish(code: int) -> NoReturn:
    """Exit as Python does, but do not finalize modules that were imported before the fork: torch takes a second for it.

    Waits for threads, calls exit handlers, finalizes objects of the script and of modules that it has imported, and
    flushes all files. Exceptions are printed; only output that cannot be written changes the exit code.
    """
    try:
        if code:
            threading.Thread(target=end_soon, args=(code,), daemon=True).start()
        for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
            run_step(step)
        if not flush_output():
            code = 120  # as Python
        # Only what is newer than the fork is collected; the rest is frozen. A file in a cycle may lose its buffer then.
        for step in (flush, reset_signals, drop_new_modules, gc.collect, flush):
            run_step(step)
    finally:
        os._exit(code)


def end_soon(code: int) -> None:
    """End a failed script that its threads, exit handlers or child processes keep from ending."""
    time.sleep(min(MAX_EXIT, float(ENVIRONMENT.get("NODE_GRACE") or MAX_EXIT)))
    os.write(2, b"ended a script that had failed; its threads or child processes were still running\n")
    os._exit(code)


def reset_signals() -> None:
    """Reset signal handlers, as Python does when it exits; a handler would keep its globals alive."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def drop_new_modules() -> None:
    """Drop modules that were imported after the fork, so that their objects are finalized while globals still exist."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # the script's own ones are finalized as well
    for name in {*sys.modules} - PRELOADED | {"__main__"}:
        sys.modules.pop(name, None)


def run_step(step: Callable[[], Any], thing: object = None) -> bool:
    """Call `step`, and report what it raises, as about `thing`; return whether it raised nothing."""
    try:
        step()
    except BaseException as error:
        report(error, thing or step)
        return False
    return True


def report(error: BaseException, thing: object) -> None:
    """Print an exception as Python prints unraisable ones."""
    trimmed(error)
    what = {"exc_type": type(error), "exc_value": error, "exc_traceback": error.__traceback__}
    with contextlib.suppress(BaseException):
        if sys.unraisablehook is not sys.__unraisablehook__:
            sys.unraisablehook(types.SimpleNamespace(**what, err_msg=None, object=thing))
        else:  # Python's own hook accepts only objects that Python creates
            sys.stderr.write(f"Exception ignored in: {thing!r}\n")
            sys.__excepthook__(type(error), error, error.__traceback__)


def flush_output() -> bool:
    """Flush stdout and stderr as Python does at its end; return whether all output was written."""
    streams = [one for one in (sys.stdout, sys.stderr) if one is not None and not getattr(one, "closed", False)]
    return all([run_step(lambda one=one: one.flush(), one) for one in streams])  # type: ignore[misc]


def flush() -> None:
    """Flush the buffers of Python and of C."""
    for thing in [*gc.get_objects(), sys.__stdout__, sys.__stderr__]:
        if issubclass(type(thing), _IOBase):  # isinstance would ask `__class__`, which may raise
            with contextlib.suppress(BaseException):
                thing.flush()
    libc.fflush(None)


def fork(control: socket.socket, node: int) -> int:
    """Fork the worker that the next message is for, orphaned so that the node adopts it; return its id.

    Raises ValueError if it has not read the message.
    """
    reader, writer = os.pipe()
    if not (between := os.fork()):
        if child := os.fork():
            os.write(writer, b"%d" % child)
            os._exit(0)
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 3)
        os.write(writer, READ)
        for descriptor in (reader, writer, control.detach()):
            os.close(descriptor)
        become(**json.loads(data), node=node, descriptors=descriptors)
    os.close(writer)
    os.waitpid(between, 0)
    with os.fdopen(reader, "rb") as pipe:
        before, read, after = pipe.read().partition(READ)
    if not read:  # the next worker would read its message
        raise ValueError("a worker has not read its message")
    return int(before + after)


def main() -> None:
    """Import, then fork workers until the node ends."""
    with open(os.devnull, "wb") as null:  # stdout and stderr were pipes when Python started, as a worker's are
        os.dup2(os.dup2(null.fileno(), 1), 2)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_DUMPABLE, 0)  # workers run as the same user, and must not write to the memory of the zygote
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    if not (safe := getattr(sys.flags, "safe_path", False)):
        del sys.path[0]
    control, node, modules = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[4:]
    later = [name for name in modules if not exists(name.partition(".")[0])]  # only the job's folder can have them
    why = load([name for name in modules if name not in later])
    if later and not why and control.recv(1) != GO:
        return
    if not safe:
        sys.path.insert(0, os.getcwd())
    why = why or load(later) or settle()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # which Slurm sends to all processes of a step
    control.send(json.dumps({"ready": not why, "why": why}).encode())
    while head := control.recv(1, socket.MSG_PEEK):
        if head == GO or why:  # exiting with an unread message would lose our answer; so wait to be killed
            control.recv(1)
        else:
            control.send(json.dumps({"pid": fork(control, node)}).encode())


if __name__ == "__main__":
    main()
