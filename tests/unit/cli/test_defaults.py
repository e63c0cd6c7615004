"""Defaults of a user for all jobs."""

import json

import pytest

from orchestrate.api.request import spec_of


@pytest.fixture
def configured(do, tmp_path, monkeypatch):
    """A function that writes the user's defaults."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "orchestrate" / "defaults.yaml"
    path.parent.mkdir(parents=True)
    return path.write_text


def plan(do, *arguments: str) -> dict:
    code, lines, messages = do("plan", "--json", *arguments)
    assert code == 0, messages
    return json.loads("\n".join(lines))


def test_defaults_must_apply_unless_a_job_file_or_an_option_overrides_them(do, configured, tmp_path):
    configured("trainers: 1\nenv: {A: default, B: default}\nmax_restarts: 7\n")
    env = plan(do)["workers"][0]["env"]
    assert len(plan(do)["nodes"]) == 2 and (env["A"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("default", "7")
    (tmp_path / "job.yaml").write_text("nodes: 3\nenv.A: file\n")
    found = plan(do, str(tmp_path / "job.yaml"), "--max-restarts", "2")
    env = found["workers"][0]["env"]
    assert len(found["nodes"]) == 3
    assert (env["A"], env["B"], env["TORCHELASTIC_MAX_RESTARTS"]) == ("file", "default", "2")


@pytest.mark.parametrize("text", ["command: x.py", "trainer: 3", "- a", "name: x", "source: x"])
def test_invalid_defaults_must_be_refused_with_their_place(do, configured, text):
    configured(text)
    code, _, messages = do("plan")
    assert code == 2 and "defaults.yaml" in messages[0]


@pytest.mark.parametrize("name", ["defaults.yaml", ""])
def test_defaults_that_another_account_can_change_must_not_be_used(do, configured, tmp_path, name):
    configured("on_event: 'touch pwned'\n")
    path = tmp_path / "config" / "orchestrate" / name
    path.chmod(path.stat().st_mode | 0o002)
    code, _, messages = do("plan")
    assert code == 2 and f"defaults.yaml is not used: another account can change {path}" in messages[0]


def test_defaults_must_not_come_from_the_current_folder(do, configured, tmp_path, monkeypatch):
    configured("command: none.py\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert do("plan", "--", "-m", "app.train")[0] == 0


def test_a_default_that_an_engine_does_not_support_must_be_ignored_by_it_but_not_one_for_isolation(do, configured):
    configured("memory: 2g\nisolated: true\n")
    usual = spec_of({"command": "sh", "engine": "process"})
    assert (usual.memory, usual.isolated, usual.optional) == ("2g", True, ["memory"])
    assert spec_of({"command": "sh", "engine": "process", "memory": "1g"}).optional == []
