"""What a command reads from its arguments must be there, with the type that `Args` says."""

import types
import typing

import pytest

from orchestrate.cli.args import Args
from orchestrate.cli.arguments import flags, parse
from orchestrate.cli.options import FLAGS, SWITCHES
from orchestrate.cli.table import COMMANDS

NEEDED = {"down": "down c", "export": "export slurm", "rm": "rm a", "stop": "stop a"}
OPTIONS = (
    "run job.yaml -e A=b --data d=. --secret S --set a=b --junit-xml x --ranks 0 -- a.py",
    "logs a --tail 3 --since 5m --grep x --rank 1",
    "exec a --rank 1 -- ls",
    "export kubernetes --form jobset",
    "prune --older-than 3d",
    "serve --port 80",
)


def fits(value: object, kind: typing.Any) -> bool:
    if isinstance(kind, types.UnionType):
        return any(fits(value, each) for each in typing.get_args(kind))
    return kind is typing.Any or isinstance(value, typing.get_origin(kind) or kind)


@pytest.mark.parametrize("line", [*(NEEDED.get(name, name) for name in COMMANDS), *OPTIONS])
def test_each_argument_must_have_its_type(line):
    found, kinds = vars(parse(line.split())), typing.get_type_hints(Args)
    keys = {"nodes", "pip", "mounts", *FLAGS, *SWITCHES} if "env" in found else set()
    assert found.pop("runs", None) is None  # until it is resolved
    for name in found.keys() - keys:
        assert fits(found[name], kinds[name]), name


def test_a_key_of_the_job_file_must_not_be_overridden_unless_its_option_is_given():
    assert flags(parse(["run", "train.py"])) == {}
    assert flags(parse(["run", "--queue", "--spares", "1", "train.py"])) == {"queue": "true", "spares": "1"}
