"""An image that is built for a job."""

import re


def test_a_build_must_trust_neither_the_user_of_an_image_nor_other_projects(tmp_path, monkeypatch):
    from orchestrate.engines.docker import packages

    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        texts.append(packages._dockerfile("base", "python", "me\nRUN --mount=from=other,target=/x id", []))
    assert [line.split()[0] for line in texts[0].splitlines()] == ["FROM", "USER", "RUN", "USER"]
    caches = {re.findall(r"type=cache,id=([^,]+),", text)[0] for text in texts}
    assert len(caches) == 2
