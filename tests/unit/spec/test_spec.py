"""Job files and options must be parsed, or be refused with a message that names the key."""

import re

import pytest
import yaml
from support.job_values import BAD, GOOD
from support.odd_text import odd

from orchestrate.errors import UsageError
from orchestrate.spec.layers import QUIET, read_file, read_set, resolve
from orchestrate.spec.spec import APP, FIELDS, JobSpec


def test_the_url_of_notifications_must_be_masked_since_it_may_contain_a_token():
    for url in ("https://me:word@host/x", "http://host/x?token=abcdefgh", "https://hooks.example/T0/B0/abc"):
        spec = JobSpec(on_event=url)
        assert url not in spec.to_yaml(hide=spec.mask()) and spec.mask()(f"to {url}.") == "to ***."


def test_the_defaults_must_describe_the_default_job():
    spec = resolve()
    assert (spec.trainers, spec.gpus, spec.engine, spec.command) == (3, "auto", "auto", APP)


def test_a_later_layer_must_override_an_earlier_one():
    assert resolve({"trainers": 1, "name": "a"}, {"trainers": 2}) == JobSpec(trainers=2, name="a")
    assert resolve({"env": {"A": 1, "B": 2}}, {"env.A": 3}).env == {"A": "3", "B": "2"}


@pytest.mark.parametrize("value", [-1, "x", "", "1e3", 1.5, True, None, 1001, [], "٣x"])
def test_an_invalid_number_of_trainers_must_be_refused(value):
    with pytest.raises(UsageError, match="trainers must be a whole number from 0 to 1000"):
        resolve({"trainers": value})


@pytest.mark.parametrize(("key", "value", "parsed"), GOOD)
def test_common_notations_of_a_value_must_be_accepted(key, value, parsed):
    assert getattr(resolve({key: value}), key) == parsed


@pytest.mark.parametrize(("key", "value"), BAD)
def test_an_invalid_value_must_be_refused_with_its_key(key, value):
    with pytest.raises(UsageError, match=f"^{key} must be ") as caught:
        resolve({key: value})
    assert repr(value)[:90] in str(caught.value) or key in QUIET
    assert caught.value.hint


@pytest.mark.parametrize("entries", [{f"data.d{number}": "a" for number in range(101)}, {"data.a": "x", "data.A": "x"}])
def test_entries_that_are_invalid_together_must_be_refused(entries):
    with pytest.raises(UsageError, match="data must be a mapping of"):
        resolve(entries)


def test_an_unknown_key_must_be_refused_with_the_closest_one():
    with pytest.raises(UsageError, match="unknown key 'trainer'") as caught:
        resolve({"trainer": 3})
    assert caught.value.hint == "did you mean trainers?"
    with pytest.raises(UsageError, match="unknown key 'node'") as caught:
        resolve({"node": 3})
    assert caught.value.hint == "did you mean nodes?"
    with pytest.raises(UsageError, match="unknown key 'colour'") as caught:
        resolve({"colour": 3})
    assert all(key in caught.value.hint for key in [*FIELDS, "hyperparameters.colour"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "contains a list, not a mapping"),
        (b"42\n", "contains a single value, not a mapping"),
        (b"name: a\ntrainer: 3\n", r"job.yaml:2:1: unknown key 'trainer'"),
        (b"trainers: 1\ntrainers: 2\n", r"job.yaml:2:1: duplicate key 'trainers'"),
        (b"name: &a x\nimage: *a\n", r"job.yaml:2:8: aliases are not supported"),
        (b"trainers:\t3\n  x: [\n", r"job.yaml:1:10: found character"),
        (b"trainers: many\n", r"job.yaml:1:1: trainers must be a whole number"),
        (b"\xff\xfe", "is not text"),
        (b"!!python/object/apply:os.system ['true']\n", "job.yaml:1:1: the tag .* is not supported"),
        (b"{1: 2}\n", "unknown key '1'"),
        (b"? [a]\n: 1\n", "job.yaml:1"),
        (b"trainers: 1\nenv: {A: 1, A: 2}\n", r"job.yaml:2:13: duplicate key 'A'"),
        (b"trainers: 1\n--- {}\n", "job.yaml:2:1: but found another document"),
        (b"~\n", "contains a single value, not a mapping"),
    ],
)
def test_an_invalid_job_file_must_be_refused_with_line_and_column(tmp_path, content, message):
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_file(path)


def test_an_error_in_a_job_file_must_include_its_hint(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("trainer: 3\n")
    with pytest.raises(UsageError) as caught:
        read_file(path)
    assert caught.value.hint == "did you mean trainers?"


def test_an_empty_job_file_must_be_the_default_job(tmp_path):
    path = tmp_path / "job.yaml"
    for content in ("", "# a comment\n"):
        path.write_text(content)
        assert resolve(read_file(path)) == JobSpec()


def test_a_missing_job_file_must_be_reported_by_path(tmp_path):
    with pytest.raises(UsageError, match="cannot read job file .*nope.yaml: No such file"):
        read_file(tmp_path / "nope.yaml")
    with pytest.raises(UsageError, match=f"cannot read job file {tmp_path}: not a regular file"):
        read_file(tmp_path)


def test_a_generated_job_file_must_resolve_to_the_same_job(tmp_path):
    values = {
        "name": "010",
        "command": "x.py 'a b' yes 1.10",
        "expand": False,
        "trainers": 2,
        "nproc_per_node": 4,
        "gpus": 2,
        "share_gpus": True,
        "queue": True,
        "virtual_local_rank": True,
        "sagemaker": True,
        "engine": "docker",
        "image": "mine:1.0",
        "dockerfile": "image",
        "pip": ["lightning", "torch==2.8 --hash=sha256:1"],
        "requirements": "requirements.txt",
        "data": {"train": "a b"},
        "mounts": ["a:/b", "c:/d:rw"],
        "checkpoints": "s3://bucket/a",
        "output": "file:///a",
        "keep": 600,
        "env": {"A": "yes", "B": "1.10"},
        "user": "7:8",
        "memory": "4g",
        "cpus": 1.5,
        "shm_size": "1024",
        "secrets": {"A": "variable", "C": "env", "D": "/d"},
        "hyperparameters": {"lr": 0.1, "amp": True, "sizes": [1, 2], "none": None, "country": "no"},
        "source": "git+https://host/a@b#c",
        "chdir": "a/b",
        "before": ["sh", "-c", "true"],
        "stdin": True,
        "labels": {"a/b": "c"},
        "pin": True,
        "network": "host",
        "host_access": True,
        "encrypt": True,
        "constraints": ["node.labels.gpu==a100"],
        "slurm": {"partition": "gpu", "time": "1:30:00", "exclusive": True},
        "volume": "/mnt/data",
        "max_run": "2h",
        "grace": "1.5s",
        "max_restarts": 7,
        "restart_window": "1d",
        "rules": [{"log": "a", "exit_codes": [3], "action": "fail"}],
        "min_trainers": 1,
        "spares": 1,
        "hang_after": "none",
        "metrics": {"loss": "loss=([0-9.]+)"},
        "on_event": "https://host/path",
        "optional": ["memory"],
        "require_communication": True,
        "warm": False,
        "preload": ["numpy"],
    }
    spec, path = resolve(values), tmp_path / "job.yaml"
    other = resolve({"ports": "8001:80", "services": "compose.yaml"})  # contradict the host's network, as does isolated
    alone = resolve({"isolated": True})
    same = [key for key in FIELDS if all(getattr(one, key) == getattr(JobSpec(), key) for one in (spec, other, alone))]
    assert not same
    for one in (spec, other, alone, JobSpec()):
        path.write_text(one.to_yaml())
        assert resolve(read_file(path)) == one


@pytest.mark.parametrize("secret", ["péché-ABCDEFG", "it's a: quoted #1", "folded " * 20, "two\nlines\n"])
def test_a_job_file_that_is_published_must_not_have_secrets_in_any_form(secret):
    """YAML may escape, quote or fold text."""
    spec = JobSpec(env={"DB_PASSWORD": secret}, command=("t.py", "--password", secret), labels={"a": f"x{secret}"})
    text = spec.to_yaml(spec.mask())
    found = yaml.safe_load(text)
    assert (found["command"], found["labels"]) == (["t.py", "--password", "***"], {"a": "x***"}), text


def test_set_must_accept_every_key():
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


def test_values_of_env_must_stay_as_written(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "env: {A: yes, B: 1.10, C: 12:30, D: 010, E: }\nenv.H: yes\ncommand: [x.py, 1.10, yes]\nname: 010\n"
    )
    spec = resolve(read_file(path), read_set(["env.F=true", "env.G="]))
    assert spec.env == {"A": "yes", "B": "1.10", "C": "12:30", "D": "010", "E": "", "F": "true", "G": "", "H": "yes"}
    assert (spec.command, spec.name) == (("x.py", "1.10", "yes"), "010")


def test_labels_and_the_command_before_workers_must_stay_as_written_in_set_too():
    spec = resolve(read_set(["labels.version=1.10", "before=[x.py, 1.10, yes]"]))
    assert (spec.labels, spec.before) == ({"version": "1.10"}, ("x.py", "1.10", "yes"))


def test_a_minimum_above_the_trainers_must_be_refused():
    assert resolve({"trainers": 2, "min_trainers": 2}).min_trainers == 2
    with pytest.raises(UsageError, match="min_trainers is 3, but trainers is 2"):
        resolve({"trainers": 2, "min_trainers": 3})


def test_consistency_must_be_checked_after_merging_all_layers(tmp_path):
    spec = JobSpec(trainers=8, min_trainers=5)
    (tmp_path / "job.yaml").write_text("min_trainers: 5\n")
    assert resolve(read_file(tmp_path / "job.yaml"), {"trainers": 8}) == spec
    (tmp_path / "job.yaml").write_text(spec.to_yaml())
    assert resolve(read_file(tmp_path / "job.yaml")) == spec


def test_set_without_a_value_must_be_refused():
    with pytest.raises(UsageError, match="--set trainers: missing ="):
        read_set(["trainers"])


def test_odd_text_must_survive_a_generated_job_file(tmp_path):
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
    with pytest.raises(UsageError, match="secrets lists [AB], which is not in env") as caught:
        resolve({"env": {"C": "x"}, "secrets": names})
    assert re.fullmatch(r"set env\.[AB], or secrets\.[AB]=env", caught.value.hint)
    for wrong in ("A=x", ["a-b"], {"A": 1}, {"A": ""}, 7, [7]):
        with pytest.raises(UsageError, match="secrets must be names in env, or a mapping"):
            resolve({"env": {"A": "x"}, "secrets": wrong})


@pytest.mark.parametrize("value", [["a==" * 1_000_000 + "b b"], "a==" + "b" * 498, ["a==b"] * 101])
def test_the_size_of_constraints_must_be_limited(value):
    with pytest.raises(UsageError, match=r"at most 100 conditions .*, each of at most 500 characters, not "):
        resolve({"constraints": value})


# --- hyperparameters


@pytest.mark.parametrize(
    ("hyperparameters", "options"),
    [
        ({"lr": 0.1, "name": "a b"}, ["--lr", "0.1", "--name", "a b"]),
        ({"amp": True, "cpu": False, "seed": None, "sizes": [1, 2]}, ["--amp", "--sizes", "1", "2"]),
        ({"model.depth": 3, "lr": 5}, ["--model.depth", "3"]),  # the command has --lr
    ],
)
def test_hyperparameters_must_become_options_unless_the_command_has_them(hyperparameters, options):
    script = ["train.py", "--lr", "1"] if "model.depth" in hyperparameters else ["train.py"]
    spec = resolve({"command": script, "hyperparameters": hyperparameters})
    assert spec.command_line == (*script, *options)
    assert resolve({"command": "t.py --lr=1", "hyperparameters": {"lr": 2}}).command_line == ("t.py", "--lr=1")


def test_hyperparameters_must_stay_as_they_are_written(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "command: t.py\nhyperparameters: {lr: 1.10, country: no, date: 2024-01-01, amp: true, x: null}\n"
        "hyperparameters.size: 1.10\n"
    )
    spec = resolve(read_file(path), read_set(["hyperparameters.lr=1e-3", "hyperparameters.on=on"]))
    options = ["--lr", "1e-3", "--country", "no", "--date", "2024-01-01", "--amp", "--size", "1.10", "--on", "on"]
    assert spec.command_line == ("t.py", *options)


def test_a_hyperparameter_that_looks_like_a_secret_must_be_refused_without_its_value():
    for name, value in (("api_key", "abcdefgh"), ("url", "postgres://me:hunter22@host/db")):
        with pytest.raises(UsageError, match=f"hyperparameters.{name} looks like a secret") as caught:
            resolve({"command": "t.py", "hyperparameters": {name: value}})
        assert value not in f"{caught.value} {caught.value.hint}"
        assert caught.value.hint.endswith(f": --secret {name.upper()}")
    tokens = {"eos_token": "<|endoftext|>", "BOS_TOKEN": "<|s|>"}
    assert resolve({"hyperparameters": {**tokens, "max_key": "1e-3", "password_length": 9}})


@pytest.mark.parametrize("operator", ["&&", "|", ">", ";"])
def test_a_command_that_needs_a_shell_must_be_refused(operator):
    for key in ("command", "before"):
        with pytest.raises(UsageError, match="needs a shell: use sh -c"):
            resolve({key: f"sh a.sh {operator} b"})
        assert resolve({key: ["sh", "-c", f"a {operator} b"]})
