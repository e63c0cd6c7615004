"""Launchers must be found in the command line of a process, however they were started."""

import pytest

from orchestrate.node.command import launcher


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/opt/venv/bin/python3.12 /opt/venv/bin/torchrun train.py", "torchrun"),
        ("python -u -W error -X dev -m torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("python3 -m torch.distributed.launch train.py", "python -m torch.distributed.launch"),
        ("/usr/bin/python3 /usr/local/bin/accelerate launch train.py", "accelerate launch"),
        ("python -m accelerate.commands.launch train.py", "python -m accelerate.commands.launch"),
        ("/usr/bin/mpirun -np 2 python train.py", "mpirun"),
        ("deepspeed train.py", "deepspeed"),
        ("accelerate config", ""),
        ("python train.py torchrun", ""),
        ("python -c torchrun", ""),
        ("bash -c torchrun", ""),
        ("python", ""),
        ("", ""),
    ],
)
def test_a_launcher_must_be_found_in_a_command_line(line, found):
    assert launcher(line.split()) == found
