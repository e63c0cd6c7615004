"""Addresses of nodes, which workers can write, too."""

import pytest

from orchestrate.engines.slurm import addresses


@pytest.mark.parametrize(
    "text",
    ["", "a", "a n1", "a n1 x", "b n1 80", "a n1 0", "a n1 65536", f"a n1 {'9' * 5000}", "a -n 80", f"a {'n' * 64} 80"],
)
def test_what_is_no_address_of_this_launch_must_be_left_out(tmp_path, text):
    (tmp_path / "master").write_text(text)
    assert addresses.read(tmp_path, "master", "a") is None


def test_an_address_must_be_read_of_any_launch_but_through_no_link(tmp_path):
    (tmp_path / "master").write_text("a n1.cluster 8080\n")
    assert addresses.read(tmp_path, "master") == addresses.read(tmp_path, "master", "a") == ("n1.cluster", 8080)
    (tmp_path / "trainer-1").symlink_to("master")
    assert addresses.read(tmp_path, "trainer-1") is None
    assert addresses.read(tmp_path, "trainer-2") is None
