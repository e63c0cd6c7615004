"""`--junit-xml`: the result of a job, as CI systems read it."""

import xml.etree.ElementTree as ET

import pytest
from support.commanded import create, end
from support.methods import after
from support.scripted import ALL_WELL, KILLED

from orchestrate.cli.main import main
from orchestrate.record.paths import JobPaths

APP = ("--gpus", "none", "--", "-m", "app.train")


def test_a_job_that_succeeds_must_be_a_test_that_passes(do, engine, tmp_path):
    engine.generations, file = [[ALL_WELL]], tmp_path / "junit.xml"
    assert do("run", "--name", "digits", "--trainers", "2", "--junit-xml", file, *APP)[0] == 0
    (suite,) = ET.parse(file).getroot()
    (case,) = suite
    assert (suite.tag, suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("testsuite", "1", "0", "0")
    assert (case.get("name"), case.get("classname")) == ("digits", "orchestrate") and float(case.get("time", "")) >= 0
    assert [child.tag for child in case] == ["properties", "system-out"]
    assert {each.get("name"): each.get("value") for each in case[0]}["world_size"] == "3"


def test_a_job_that_fails_must_be_a_test_that_fails_with_the_root_cause(do, engine, tmp_path):
    engine.generations, file = [[KILLED]], tmp_path / "junit.xml"
    file.write_text("of an earlier job")
    assert do("run", "--max-restarts", "0", "--trainers", "2", "--junit-xml", file, *APP)[0] == 1
    (suite,) = ET.parse(file).getroot()
    failure = suite.find("testcase/failure")
    assert suite.get("failures") == "1" and failure is not None and failure.get("type") == "killed"
    assert failure.get("message", "").startswith("rank 1 on trainer-1 ") and "full log:" in str(failure.text)


@pytest.mark.parametrize(("outcome", "reason"), [("stopped", "stopped by the user"), ("lost", "no engine")])
def test_a_job_that_did_not_end_by_itself_must_be_an_error(do, runs, tmp_path, outcome, reason):
    paths = create(JobPaths(runs / "my-job-1a2b3c"))
    end(paths, outcome, reason, final_metrics={"loss\x00\ud800": "\x1b[1m\ufffe0.5"}, engine="docker", commit="")
    do("attach", "my-job-1a2b3c", "--junit-xml", tmp_path / "junit.xml")
    (suite,) = ET.parse(tmp_path / "junit.xml").getroot()
    error = suite.find("testcase/error")
    assert error is not None and (suite.get("name"), suite.get("errors"), error.get("message")) == (
        "my-job",
        "1",
        reason,
    )
    properties = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert properties["loss"] == "[1m0.5"  # without what XML cannot contain


def test_a_job_must_not_lead_the_file_elsewhere(do, engine, tmp_path):
    engine.generations = [[ALL_WELL]]
    (tmp_path / "sub").mkdir(), (tmp_path / "elsewhere").mkdir()

    def swap(plan, stopped=None) -> None:
        (tmp_path / "sub").rename(tmp_path / "moved")
        (tmp_path / "sub").symlink_to(tmp_path / "elsewhere")

    engine.start = after(engine.start, lambda: swap(None))
    assert do("run", "--trainers", "2", "--junit-xml", tmp_path / "sub" / "junit.xml", *APP)[0] == 0
    assert not [*(tmp_path / "elsewhere").iterdir()] and (tmp_path / "moved" / "junit.xml").exists()


def test_the_folder_of_the_file_must_be_created(do, engine, tmp_path):
    engine.generations = [[ALL_WELL]]
    assert do("run", "--trainers", "2", "--junit-xml", tmp_path / "new" / "folder" / "junit.xml", *APP)[0] == 0
    assert (tmp_path / "new" / "folder" / "junit.xml").exists()
    (tmp_path / "file").touch()
    code, _, err = do("run", "--junit-xml", tmp_path / "file" / "junit.xml", *APP)
    assert code == 2 and "File exists" in err[-2]


def test_a_folder_that_a_project_leads_elsewhere_must_be_refused(do, tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project" / "results").symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path / "project")
    code, _, err = do("run", "--junit-xml", "results/r.xml", *APP)
    assert code == 2 and "results is a link to" in err[-2] and not [*(tmp_path / "elsewhere").iterdir()]


def test_what_is_not_a_file_must_be_refused_before_there_is_a_job_and_kept(do, runs, tmp_path):
    (tmp_path / "link").symlink_to("/dev/stdout")
    for name in ("link", "."):
        code, _, err = do("run", "--junit-xml", tmp_path / name, *APP)
        assert code == 2 and "is not a file" in err[-2], err
    assert do("run", "--detach", "--junit-xml", tmp_path / "x", *APP)[0] == 2
    assert (tmp_path / "link").is_symlink() and not [*runs.glob("*/plan.json")]


def test_a_job_that_cannot_start_must_be_an_error_with_its_reason(do, tmp_path, monkeypatch):
    file = tmp_path / "junit.xml"
    monkeypatch.chdir(tmp_path)
    assert do("run", "--junit-xml", file, "nope.py")[0] == 2
    (suite,) = ET.parse(file).getroot()
    assert (suite.get("name"), suite.get("errors"), suite.get("failures")) == ("nope", "1", "0")
    error = suite.find("testcase/error")
    assert error is not None and "nope.py" in str(error.get("message")) and "hint: " in str(error.text)
    assert do("run", "--name", "digits", "--set", "trainers=x", "--junit-xml", file, "-m", "app.train")[0] == 2
    assert ET.parse(file).getroot()[0].get("name") == "digits"
    assert do("resume", "none", "--junit-xml", file)[0] == 2
    assert ET.parse(file).getroot()[0].get("name") == "none"
    (tmp_path / "runs").symlink_to(tmp_path)
    assert main(["run", "--junit-xml", str(file), "nope.py"]) == 2
    assert "runs is a symbolic link" in file.read_text()
