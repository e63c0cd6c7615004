"""Notifications about the events of a job, to a real web server and to a program."""

import hmac
import json

FAILS_ONCE = "import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"


def test_a_server_must_be_notified_of_start_restart_and_end_with_a_signature(cli, server, nothing_left):
    (cli.folder / "once.py").write_text(FAILS_ONCE)
    run = ("run", "--engine", "process", "--trainers", "0", "--on-event", server.url, "once.py")
    done = cli(*run, ORCHESTRATE_WEBHOOK_KEY="the key")
    assert done.returncode == 0, done.stderr
    assert server.kinds() == ["started", "restarted", "succeeded"]
    data, signature = server.requests[-1]
    assert data["run_directory"] == str(cli.run_dir()) and data["job_id"] == cli.run_dir().name
    assert signature == "sha256=" + hmac.digest(b"the key", server.body, "sha256").hex()


def test_a_server_that_fails_must_be_asked_again_and_not_affect_the_job(cli, server, nothing_left):
    (cli.folder / "say.py").write_text("print('x')\n")
    server.answers = [500]
    done = cli("run", "--engine", "process", "--trainers", "0", "--on-event", server.url, "say.py")
    assert done.returncode == 0, done.stderr
    assert server.kinds() == ["started", "started", "succeeded"]


def test_a_program_must_get_the_event_and_its_data(cli, nothing_left):
    (cli.folder / "say.py").write_text("raise SystemExit(3)\n")
    (cli.folder / "notify.sh").write_text('echo "$1 $2 $(cat)" >> notified\n')
    run = ("run", "--engine", "process", "--trainers", "0", "--max-restarts", "0")
    done = cli(*run, "--on-event", f"sh {cli.folder}/notify.sh 'a b'", "say.py")
    assert done.returncode == 1, done.stderr
    lines = (cli.folder / "notified").read_text().splitlines()
    assert [line.split(" {")[0] for line in lines] == ["a b started", "a b failed"]
    assert json.loads("{" + lines[-1].partition(" {")[2])["text"] == "max_restarts is 0"


def test_a_job_file_must_not_name_a_program(cli):
    (cli.folder / "job.yaml").write_text("on_event: touch evil\ncommand: x.py\n")
    done = cli("run", "job.yaml")
    assert (done.returncode, "on_event in a job file must be a URL" in done.stderr) == (2, True)
    assert not (cli.folder / "evil").exists()
