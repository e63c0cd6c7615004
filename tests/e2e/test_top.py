"""`top` on a running job."""

from support.faults import Background


def test_top_must_show_a_running_job_and_leave_nothing(ready):
    job = Background(ready, ready.engine, "--", "count.py", "until-asked")
    job.until_step(1, rank=1)
    run = ready.run_dir()
    done = ready("top", "--once", run.name)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == [run.name]
    assert [row[:2] for row in rows[2:]] == [["0", "master"], ["1", "trainer-1"], ["2", "trainer-2"]]
    assert all(row[-1] == "MiB" for row in rows[2:])
    ready.finish_jobs()
    assert job.end() == 0
    assert not [*run.glob("usage.*")]
