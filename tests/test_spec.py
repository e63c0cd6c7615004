"""Bad input must be refused with one message that names the thing, and nothing may be created."""

import re

import pytest
import yaml
from conftest import ROOT
from support.odd import odd

from orchestrate.errors import UsageError
from orchestrate.job.spec import APP, FIELDS, IMAGE, JobSpec, read_file, read_set, resolve


def test_the_defaults_are_the_default_job():
    spec = resolve()
    assert (spec.trainers, spec.gpus, spec.engine, spec.command) == (3, "auto", "auto", APP)


def test_a_later_layer_must_win():
    assert resolve({"trainers": 1, "name": "a"}, {"trainers": 2}) == JobSpec(trainers=2, name="a")
    assert resolve({"env": {"A": 1, "B": 2}}, {"env.A": 3}).env == {"A": "3", "B": "2"}


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
        ("max_run", "1 d", 86400.0),
        ("max_run", None, None),
        ("trainers", 0, 0),
        ("trainers", "1000", 1000),
        ("nproc_per_node", 1024, 1024),
        ("nproc_per_node", None, None),
        ("max_restarts", 1_000_000, 1_000_000),
        ("min_trainers", 0, 0),
        ("spares", 1000, 1000),
        ("name", 7, "7"),
        ("engine", "swarm", "swarm"),
        ("network", "host", "host"),
        ("gpus", "all", "all"),
        ("gpus", "auto", "auto"),
        ("gpus", "none", "none"),
        ("gpus", "2", 2),
        ("gpus", 1024, 1024),
        ("command", "train.py --name 'a b'", ("train.py", "--name", "a b")),
        ("command", ["train.py", "--lr", 0.1], ("train.py", "--lr", "0.1")),
        ("env", {"A": 1}, {"A": "1"}),
        ("env", {"_b2": 0.5, "OMP_NUM_THREADS": 2}, {"_b2": "0.5", "OMP_NUM_THREADS": "2"}),
        ("memory", "4g", "4g"),
        ("memory", 67108864, "67108864"),
        ("memory", None, None),
        ("shm_size", "512M", "512M"),
        ("cpus", 1.5, 1.5),
        ("cpus", "2", 2.0),
        ("pin", "true", True),
        ("warm", "false", False),
        ("warm", False, False),
        ("preload", "numpy torch.nn", ["numpy", "torch.nn"]),
        ("preload", ["numpy"], ["numpy"]),
        ("constraints", "node.labels.gpu==a100", ["node.labels.gpu==a100"]),
        ("constraints", "node.hostname != box", ["node.hostname != box"]),
        ("constraints", ["node.hostname != box"], ["node.hostname != box"]),
        ("constraints", ["a==b=c"], ["a==b=c"]),
        ("constraints", ["a==" + "b" * 497] * 100, ["a==" + "b" * 497] * 100),
        ("volume", "/mnt/shared", "/mnt/shared"),
        ("volume", "my-data.1", "my-data.1"),
        ("hang_after", None, None),
        ("hang_after", "none", None),
        ("hang_after", "20s", 20.0),
        (
            "rules",
            [{"exit_codes": [1, 255], "action": "ignore"}],
            [{"exit_codes": [1, 255], "action": "ignore"}],
        ),
        (
            "rules",
            [{"log": "a|b", "cause": "hang", "action": "fail"}, {"cause": "error", "action": "count"}],
            [{"log": "a|b", "cause": "hang", "action": "fail"}, {"cause": "error", "action": "count"}],
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
        ("max_run", "5w"),
        ("max_run", "1h30"),
        ("max_run", "-5"),
        ("max_run", True),
        ("grace", "0.0s"),
        ("grace", None),
        ("gpus", "some"),
        ("gpus", 0),
        ("gpus", 1025),
        ("gpus", True),
        ("gpus", None),
        ("command", []),
        ("command", ""),
        ("command", [["a"]]),
        ("command", {"a": "b"}),
        ("command", 5),
        ("command", "train.py 'a"),
        ("env", {"RANK": "1"}),
        ("env", {"MASTER_ADDR": "here"}),
        ("env", {"JOB_ID": "mine"}),
        ("env", {"WORKER_CORES": "0"}),
        ("env", {"A": "1", "CUDA_VISIBLE_DEVICES": "0"}),
        ("env", {"a b": "1"}),
        ("env", {"1a": "1"}),
        ("env", {"A": ["1"]}),
        ("env", []),
        ("engine", "podman"),
        ("network", "none"),
        ("name", ["a"]),
        ("image", "a b"),
        ("image", ""),
        ("image", True),
        ("memory", "much"),
        ("memory", "4gb"),
        ("memory", "1.5g"),
        ("shm_size", None),
        ("nproc_per_node", 0),
        ("nproc_per_node", 1025),
        ("cpus", "two"),
        ("cpus", "0.0"),
        ("memory", "0g"),
        ("memory", 4),  # gigabytes, most likely
        ("memory", "67108863"),
        ("shm_size", 0),
        ("cpus", -1),
        ("cpus", True),
        ("pin", "maybe"),
        ("warm", None),
        ("preload", "a-b"),
        ("preload", ["a."]),
        ("preload", {"a": "b"}),
        ("constraints", ["node.labels.a = b"]),
        ("constraints", "node.labels.a=="),
        ("constraints", {"a==b": "c"}),
        ("constraints", ["a==b c"]),
        ("constraints", ["==b"]),
        ("volume", "a/b"),
        ("volume", "/a b"),
        ("max_restarts", -1),
        ("max_restarts", 1_000_001),
        ("min_trainers", "x"),
        ("min_trainers", -1),
        ("spares", 1001),
        ("spares", None),
        ("hang_after", "soon"),
        ("hang_after", 0),
        ("rules", {}),
        ("rules", ["ignore"]),
        ("rules", [{"log": "x"}]),
        ("rules", [{"action": "ignore"}]),
        ("rules", [{"exit_codes": [75], "action": "retry"}]),
        ("rules", [{"exit_codes": 75, "action": "count"}]),
        ("rules", [{"exit_codes": [256], "action": "count"}]),
        ("rules", [{"exit_codes": [0], "action": "count"}]),
        ("rules", [{"exit_codes": [True], "action": "count"}]),
        ("rules", [{"exit_codes": ["75"], "action": "count"}]),
        ("rules", [{"log": "(", "action": "count"}]),
        ("rules", [{"cause": "bad luck", "action": "count"}]),
        ("rules", [{"cause": [], "action": "count"}]),
        ("rules", [{"log": 404, "action": "count"}]),
        ("rules", [{"log": None, "action": "count"}]),
        ("rules", [{"log": "x", "action": "count", "times": 3}]),
    ],
)
def test_a_wrong_value_must_be_refused_by_its_key(key, value):
    with pytest.raises(UsageError, match=f"^{key} must be ") as caught:
        resolve({key: value})
    assert repr(value) in str(caught.value) or key == "env"  # whose values may be secrets
    assert caught.value.hint


def test_an_unknown_key_must_be_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match="unknown key 'trainer'") as caught:
        resolve({"trainer": 3})
    assert caught.value.hint == "did you mean trainers?"
    with pytest.raises(UsageError, match="unknown key 'colour'") as caught:
        resolve({"colour": 3})
    assert all(key in caught.value.hint for key in FIELDS)


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
        (b"!!python/object/apply:os.system ['true']\n", "job.yaml:1:1: the tag .* is not supported"),
        (b"{1: 2}\n", "unknown key '1'"),
        (b"? [a]\n: 1\n", "job.yaml:1"),
        (b"trainers: 1\nenv: {A: 1, A: 2}\n", r"job.yaml:2:13: the key 'A' stands twice"),
        (b"trainers: 1\n--- {}\n", "job.yaml:2:1: but found another document"),
        (b"~\n", "holds a single value, not a mapping"),
    ],
)
def test_a_bad_job_file_must_be_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_file(path)


def test_a_mistake_in_a_job_file_must_come_with_its_hint(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("trainer: 3\n")
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert caught.value.hint == "did you mean trainers?"


def test_an_empty_job_file_must_be_the_default_job(tmp_path):
    path = tmp_path / "job.yaml"
    for content in ("", "# nothing yet\n"):
        path.write_text(content)
        assert resolve(read_file(path)) == JobSpec()


def test_a_job_file_that_is_not_there_must_be_named(tmp_path):
    with pytest.raises(UsageError, match="cannot read job file .*nope.yaml: No such file"):
        read_file(tmp_path / "nope.yaml")
    with pytest.raises(UsageError, match=f"cannot read job file {tmp_path}: Is a directory"):
        read_file(tmp_path)


def test_a_written_job_file_must_resolve_to_the_same_job(tmp_path):
    values = {
        "name": "010",
        "command": "x.py 'a b' yes 1.10",
        "expand": False,
        "trainers": 2,
        "nproc_per_node": 4,
        "gpus": 2,
        "share_gpus": True,
        "engine": "docker",
        "image": "mine:1.0",
        "env": {"A": "yes", "B": "1.10"},
        "user": "7:8",
        "memory": "4g",
        "cpus": 1.5,
        "shm_size": "1024",
        "secrets": ["A"],
        "pin": True,
        "network": "host",
        "host_access": True,
        "encrypt": True,
        "constraints": ["node.labels.gpu==a100"],
        "volume": "/mnt/data",
        "max_run": "2h",
        "grace": "1.5s",
        "max_restarts": 7,
        "restart_window": "1d",
        "rules": [{"log": "a", "exit_codes": [3], "action": "fail"}],
        "min_trainers": 1,
        "spares": 1,
        "hang_after": "none",
        "optional": ["memory"],
        "warm": False,
        "preload": ["numpy"],
    }
    spec, path = resolve(values), tmp_path / "job.yaml"
    assert not [key for key in FIELDS if getattr(spec, key) == getattr(JobSpec(), key)]
    for one in (spec, JobSpec()):
        path.write_text(one.to_yaml())
        assert resolve(read_file(path)) == one


def test_set_must_reach_every_key():
    layer = read_set(["trainers=2", "env.A=x", "env.B=1", "image=a:1"])
    assert resolve(layer) == JobSpec(trainers=2, env={"A": "x", "B": "1"}, image="a:1")
    assert resolve(read_set(["preload=[numpy, torch]", "pin=true", "hang_after=null"])) == JobSpec(
        preload=["numpy", "torch"], pin=True, hang_after=None
    )


def test_the_text_after_the_first_equals_sign_must_be_the_value():
    layer = read_set(["env.A=b=c", "constraints=node.role==worker", "name=1.10", "command=x.py #1", "image=a: b: c"])
    assert layer == {
        "env.A": "b=c",
        "constraints": "node.role==worker",
        "name": "1.10",
        "command": "x.py #1",
        "image": "a: b: c",
    }


def test_words_of_the_environment_must_stay_as_they_are_written(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "env: {A: yes, B: 1.10, C: 12:30, D: 010, E: }\nenv.H: yes\ncommand: [x.py, 1.10, yes]\nname: 010\n"
    )
    spec = resolve(read_file(path), read_set(["env.F=true", "env.G="]))
    assert spec.env == {"A": "yes", "B": "1.10", "C": "12:30", "D": "010", "E": "", "F": "true", "G": "", "H": "yes"}
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
    "memory": "an equal share",
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


def test_odd_text_must_survive_the_file_of_a_job(tmp_path):
    texts = odd(300)
    spec = resolve({"command": ["train.py", *texts], "env": {f"A_{n}": text for n, text in enumerate(texts)}})
    path = tmp_path / "job.yaml"
    path.write_text(spec.to_yaml())
    assert resolve(read_file(path)) == spec
    for name in ("on", "1e3", "0x10", "1_0", "~", "=", "2024-01-01", "it's: #1"):
        path.write_text(resolve({"name": name, "command": [name], "image": f"{name[:2]}:1"}).to_yaml())
        assert (read_file(path)["name"], read_file(path)["image"]) == (name, f"{name[:2]}:1")


@pytest.mark.parametrize("names", ["A", ["A"], "A B"])
def test_secrets_must_be_names_of_env(names):
    assert set(resolve({"env": {"A": "x", "B": "y"}, "secrets": names}).secrets) <= {"A", "B"}
    with pytest.raises(UsageError, match="secrets names [AB], and env does not"):
        resolve({"env": {"C": "x"}, "secrets": names})
    for wrong in ("A=x", ["a-b"], {"A": "x"}, 7, [7]):
        with pytest.raises(UsageError, match="secrets must be a list of names of env"):
            resolve({"env": {"A": "x"}, "secrets": wrong})


@pytest.mark.parametrize("value", [["a==" * 1_000_000 + "b b"], "a==" + "b" * 498, ["a==b"] * 101])
def test_constraints_must_have_a_size_that_can_be_read_in_time(value):
    with pytest.raises(UsageError, match=r"at most 100 conditions .*, each of at most 500 characters, not "):
        resolve({"constraints": value})
