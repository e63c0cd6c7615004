"""Bad input must be refused with one message that names the thing, and nothing may be created."""

import re

import pytest
import yaml
from conftest import ROOT

from orchestrate.errors import UsageError
from orchestrate.spec import APP, FIELDS, IMAGE, JobSpec, read_file, read_set, resolve


def test_the_defaults_are_the_default_job():
    spec = resolve()
    assert (spec.trainers, spec.gpus, spec.engine, spec.command) == (3, "auto", "auto", APP)


def test_a_later_layer_must_win():
    assert resolve({"trainers": 1, "name": "a"}, {"trainers": 2}) == JobSpec(trainers=2, name="a")


@pytest.mark.parametrize("value", [-1, "x", "", "1e3", 1.5, True, None, 1001, [], "٣x"])
def test_a_number_of_trainers_that_is_none_must_be_refused(value):
    with pytest.raises(UsageError, match="trainers must be a whole number from 0 to 1000"):
        resolve({"trainers": value})


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("max_run", "2h", 7200.0),
        ("max_run", "1.5m", 90.0),
        ("max_run", 90, 90.0),
        ("gpus", "all", "all"),
        ("gpus", "2", 2),
        ("command", "train.py --name 'a b'", ("train.py", "--name", "a b")),
        ("command", ["train.py", "--lr", 0.1], ("train.py", "--lr", "0.1")),
        ("env", {"A": 1}, {"A": "1"}),
        ("memory", "4g", "4g"),
        ("cpus", 1.5, 1.5),
        ("hang_after", "none", None),
        ("hang_after", "20s", 20.0),
        (
            "rules",
            [{"exit_codes": [1, 255], "action": "ignore"}],
            [{"exit_codes": [1, 255], "action": "ignore"}],
        ),
    ],
)
def test_a_value_must_be_read_as_people_write_it(key, value, parsed):
    assert getattr(resolve({key: value}), key) == parsed


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_run", "0"),
        ("max_run", "soon"),
        ("gpus", "some"),
        ("gpus", 0),
        ("command", []),
        ("command", ""),
        ("command", [["a"]]),
        ("env", {"RANK": "1"}),
        ("env", {"MASTER_ADDR": "here"}),
        ("env", {"a b": "1"}),
        ("env", []),
        ("engine", "podman"),
        ("image", "a b"),
        ("memory", "much"),
        ("nproc_per_node", 0),
        ("cpus", "two"),
        ("cpus", "0.0"),
        ("memory", "0g"),
        ("shm_size", 0),
        ("max_restarts", -1),
        ("min_trainers", "x"),
        ("hang_after", "soon"),
        ("rules", {}),
        ("rules", [{"action": "ignore"}]),
        ("rules", [{"exit_codes": [75], "action": "retry"}]),
        ("rules", [{"exit_codes": 75, "action": "count"}]),
        ("rules", [{"exit_codes": [256], "action": "count"}]),
        ("rules", [{"log": "(", "action": "count"}]),
        ("rules", [{"cause": "bad luck", "action": "count"}]),
        ("rules", [{"cause": [], "action": "count"}]),
        ("rules", [{"log": 404, "action": "count"}]),
        ("rules", [{"log": None, "action": "count"}]),
        ("rules", [{"log": "x", "action": "count", "times": 3}]),
    ],
)
def test_a_wrong_value_must_be_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=f"^{key} must be "):
        resolve({key: value})


def test_an_unknown_key_must_be_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match="unknown key 'trainer'") as caught:
        resolve({"trainer": 3})
    assert caught.value.hint == "did you mean trainers?"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "holds a list, not a mapping"),
        (b"42\n", "holds a single value, not a mapping"),
        (b"name: a\ntrainer: 3\n", r"job.yaml:2:1: unknown key 'trainer'"),
        (b"trainers: 1\ntrainers: 2\n", r"job.yaml:2:1: the key 'trainers' stands twice"),
        (b"name: &a x\nimage: *a\n", r"job.yaml:2:8: aliases are not read"),
        (b"trainers:\t3\n  x: [\n", r"job.yaml:1:10: found character"),
        (b"trainers: many\n", r"job.yaml:1:1: trainers must be a whole number"),
        (b"\xff\xfe", "is not text"),
        (b"!!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        (b"{1: 2}\n", "unknown key '1'"),
        (b"? [a]\n: 1\n", "job.yaml:1"),
    ],
)
def test_a_bad_job_file_must_be_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_file(path)


def test_an_empty_job_file_must_be_the_default_job(tmp_path):
    path = tmp_path / "job.yaml"
    path.touch()
    assert resolve(read_file(path)) == JobSpec()


def test_a_job_file_that_is_not_there_must_be_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read job file .*nope.yaml: No such file"):
        read_file(tmp_path / "nope.yaml")


def test_a_written_job_file_must_resolve_to_the_same_job(tmp_path):
    rules = [{"log": "a", "action": "fail"}]
    more = {"rules": rules, "hang_after": "none", "min_trainers": 1}
    spec = resolve({"name": "a", "max_run": "2h", "env": {"A": "1"}, "command": "x.py 'a b'", "gpus": 2}, more)
    path = tmp_path / "job.yaml"
    path.write_text(spec.to_yaml())
    assert resolve(read_file(path)) == spec


def test_set_must_reach_every_key():
    layer = read_set(["trainers=2", "env.A=x", "env.B=1", "image=a:1"])
    assert resolve(layer) == JobSpec(trainers=2, env={"A": "x", "B": "1"}, image="a:1")


def test_words_of_the_environment_must_stay_as_they_are_written(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("env: {A: yes, B: 1.10, C: 12:30, D: 010, E: }\ncommand: [x.py, 1.10, yes]\nname: 010\n")
    spec = resolve(read_file(path), read_set(["env.F=true", "env.G="]))
    assert spec.env == {"A": "yes", "B": "1.10", "C": "12:30", "D": "010", "E": "", "F": "true", "G": ""}
    assert (spec.command, spec.name) == (("x.py", "1.10", "yes"), "010")


def test_a_minimum_above_the_trainers_must_be_refused():
    assert resolve({"trainers": 2, "min_trainers": 2}).min_trainers == 2
    with pytest.raises(UsageError, match="min_trainers is 3, and trainers 2"):
        resolve({"trainers": 2, "min_trainers": 3})


def test_what_is_fit_together_must_be_all_layers_not_one(tmp_path):
    spec = JobSpec(trainers=8, min_trainers=5)
    (tmp_path / "job.yaml").write_text("min_trainers: 5\n")
    assert resolve(read_file(tmp_path / "job.yaml"), {"trainers": 8}) == spec
    (tmp_path / "job.yaml").write_text(spec.to_yaml())
    assert resolve(read_file(tmp_path / "job.yaml")) == spec


def documented() -> dict[str, str]:
    """The defaults of the README's table, by key."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## The job file") : text.index("## When it fails")]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.M))


IN_WORDS = {
    "name": "the script's",
    "command": "the app",
    "nproc_per_node": "GPUs ÷ nodes, or 1",
    "image": "the project's",
}


@pytest.mark.parametrize("key", FIELDS)
def test_the_default_must_be_the_one_in_the_readme(key):
    said, default = documented()[key], getattr(JobSpec(), key)
    if key in IN_WORDS:
        assert said == IN_WORDS[key]
        assert default == {"command": ("-m", "app.train", "--resume", "auto"), "image": IMAGE}.get(key, default)
    elif said:
        assert resolve({key: yaml.safe_load(said.strip("`"))}) == JobSpec()
    else:
        assert default in (None, "", [], {})


def test_set_without_a_value_must_be_refused():
    with pytest.raises(UsageError, match="--set trainers: no ="):
        read_set(["trainers"])
