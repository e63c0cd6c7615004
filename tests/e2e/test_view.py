"""What a running job shows, with and without a terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys

from support.waiting import eventually

SCRIPT = """
import os, pathlib, sys, time
for step in range(3):
    sys.stderr.write(f"\\r{step}%|#| {step}/3 [00:01<00:02, 1.00it/s, loss=0.5]")
    sys.stderr.flush()
print("\\na whole line of", os.environ["RANK"], flush=True)
sys.stderr.write("\\r1%|#| 2/3 [00:01<00:02, 1.00it/s, loss=0.5]")
sys.stderr.flush()
while not pathlib.Path(os.environ["JOB_DIR"], "finish").exists(): time.sleep(0.05)
"""


def test_a_terminal_must_show_the_picture_below_the_output_and_nothing_of_it_at_the_end(cli, nothing_left):
    (cli.folder / "bar.py").write_text(SCRIPT)
    ours, theirs = pty.openpty()
    env = cli.env | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "orchestrate", "run", "--engine", "process", "--trainers", "1", "bar.py"]
    with subprocess.Popen(command, cwd=cli.folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        seen = bytearray()

        def shown(text: str) -> bool:
            if select.select([ours], [], [], 0.1)[0]:
                seen.extend(os.read(ours, 1 << 16))
            return text.encode() in seen

        try:
            eventually(lambda: shown("step 2 of 3"))
            eventually(lambda: shown("\x1b[33m[1]\x1b[0m a whole line of 1"))
            cli.finish_jobs()
            eventually(lambda: shown("succeeded: 2 workers"))
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    os.close(ours)
    rest = bytes(seen).rpartition(b"Ctrl-C stops the job")[2].decode()
    assert rest.count("\x1b[2K") >= 5 and "succeeded: 2 workers" in rest  # the picture is erased
    assert bytes(seen).count(b"a whole line of") == 2  # once for each rank


def test_lines_must_be_plain_on_request_and_without_a_terminal(cli, nothing_left):
    (cli.folder / "say.py").write_text("print('hello')\n")
    done = cli("run", "--engine", "process", "--trainers", "0", "say.py", TERM="xterm-256color")
    assert "\x1b" not in done.stdout + done.stderr and done.stdout == "[0] hello\n"


def test_only_warnings_and_the_result_must_be_printed_on_request(cli, nothing_left):
    (cli.folder / "say.py").write_text("print('hello')\n")
    run = ("run", "--engine", "process", "--trainers", "1")
    done = cli(*run, "--quiet", "say.py")
    assert done.stdout == "" and [*map(without_time, done.stderr.splitlines())] == [
        "succeeded: 2 workers",
        f"runs/{cli.run_dir().name}",
    ]


def without_time(line: str) -> str:
    return re.sub(r", \d+\.\d s$", "", line)


def test_events_and_lines_must_be_printed_as_json_on_request(cli, nothing_left):
    (cli.folder / "say.py").write_text("import os\nprint('hello', os.environ['API_TOKEN'])\nprint('loss 0.5')\n")
    options = ("--progress", "json", "-e", "API_TOKEN=hunter2000", "--ranks", "1")
    done = cli("run", "--engine", "process", "--trainers", "1", *options, "say.py")
    rows = [*map(json.loads, done.stdout.splitlines())]
    line, _ = (row for row in rows if "line" in row)
    assert line.pop("time") > 1e9 and line == {"rank": 1, "node": "trainer-1", "line": "hello ***"}
    assert [row["progress"]["metrics"] for row in rows if "progress" in row and "event" not in row] == [{"loss": 0.5}]
    names = [row["event"] for row in rows if "event" in row]
    assert names[0] == "supervisor_started" and names[-1] == "job_ended" and "workers_started" in names
