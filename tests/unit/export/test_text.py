"""Commands and environments must reach the container unchanged from any exported file."""

import json
import os
import re
import shutil
import subprocess

import pytest
import yaml
from support.odd_text import odd

from orchestrate.errors import UsageError
from orchestrate.export import document, shape
from orchestrate.export.kubernetes import kubernetes
from orchestrate.spec.layers import resolve

TEXTS = odd(300)
ENV = {f"ODD_{number}": text for number, text in enumerate(TEXTS)}
SPEC = {"command": ["train.py", *TEXTS], "env": ENV | {"y": "y", "NO": "no"}}
OTHER = {"image": "registry.example/mine:1"}
FORMS = [("job", {}), ("jobset", {}), ("trainjob", {}), ("job", OTHER)]


def read(text: str) -> list[dict]:
    """Parse the objects with kubectl."""
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed")
    command = ["kubectl", "annotate", "--local", "--dry-run=client", "--output=json", "--filename=-", "read=here"]
    env = os.environ | {"KUBECONFIG": os.devnull}
    done = subprocess.run(command, input=text, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    decoder, found, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:].strip()
    return found


def container(objects: list[dict], form: str) -> dict:
    """The object that holds the command and the environment."""
    spec = objects[-1]["spec"]
    if form == "trainjob":
        return spec["trainer"]
    job = spec if form == "job" else spec["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]["containers"][0]


def expanded(text: str, env: dict[str, str]) -> str:
    """Expand text as a kubelet does: `$$` is a dollar sign, `$(NAME)` a known variable, all else is unchanged."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))",
        lambda match: "$" if match[1] == "$" else env.get(match[2], match[0]),
        text,
    )


def test_the_expansion_rule_must_match_the_kubelet_documentation():
    env = {"A": "x", "": "empty"}
    cases = {"$(A)": "x", "$$(A)": "$(A)", "$$$(A)": "$x", "$(B)": "$(B)", "$A $": "$A $", "$(": "$(", "$()": "empty"}
    assert {text: expanded(text, env) for text in cases} == cases


@pytest.mark.parametrize(("form", "more"), FORMS)
@pytest.mark.parametrize("reader", [lambda text: [*yaml.safe_load_all(text)], read], ids=["PyYAML", "kubectl"])
def test_a_kubelet_must_pass_text_to_a_container_unchanged(form, more, reader):
    result = container(reader(kubernetes(resolve(SPEC, more), "digits", form)), form)
    env = {one["name"]: one.get("value", "") for one in result["env"]}
    assert [expanded(word, env) for word in result["args"]] == SPEC["command"]
    assert {name: expanded(env[name], env) for name in SPEC["env"]} == SPEC["env"]
    assert [expanded(word, env) for word in result["command"]] == result["command"]


@pytest.mark.parametrize("form", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("name", ["on", "y", "1e3", "0x10", "1-0", "null"])
def test_a_name_must_be_read_as_text(form, name):
    for thing in read(kubernetes(resolve({}), name, form)):
        assert thing["metadata"]["name"] in (name, f"job-{name}")


def scalars(node: yaml.Node) -> list[yaml.ScalarNode]:
    """All scalars below a node, in order."""
    if isinstance(node, yaml.ScalarNode):
        return [node]
    parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return [scalar for part in parts for scalar in scalars(part)]


def test_unquoted_text_must_be_text_for_every_reader():
    text = document(TEXTS, dict.fromkeys(TEXTS, "x"))
    assert list(yaml.safe_load_all(text)) == [TEXTS, dict.fromkeys(TEXTS, "x")]
    bare = {scalar.value for node in yaml.compose_all(text) for scalar in scalars(node) if scalar.style is None}
    assert bare and all(re.match(r"-{0,2}[A-Za-z/]", value) and value.lower() not in ("y", "n") for value in bare)
    assert document("4Gi", "4e3") == "4Gi\n--- '4e3'\n"
    assert text.isascii() and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": {"A": "\udcff"}}, "env must be text in UTF-8"),
        ({"env": {"A": "a\0b"}}, "env must be text in UTF-8 without NUL"),
        ({"command": ["train.py", "\ud800"]}, "command must be text in UTF-8"),
        ({"env": {"naïve": "a"}}, "env must be .*'naïve' is not a valid name"),
        ({"image": "mine\x01:1"}, "image must be the name of an image"),
        ({"volume": "/a\x1b"}, "volume must be the name of a volume"),
    ],
)
def test_text_that_no_file_can_hold_must_be_refused_by_key(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        shape(resolve(options), "digits")
    assert caught.value.hint
