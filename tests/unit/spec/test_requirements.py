"""Requirements of a job: what is read from a requirements file, and what is refused."""

from pathlib import Path

import pytest

from orchestrate.errors import UsageError
from orchestrate.spec import layers, requirements


def test_a_file_must_be_read_with_the_files_that_it_includes(tmp_path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "test.txt").write_text("-r own.txt\npytest")
    (tmp_path / "more" / "own.txt").write_text("hypothesis")
    (tmp_path / "requirements.txt").write_text(
        "# for training\n\nlightning>=2.4,<3  # the trainer\n--requirement=more/test.txt\n"
        "torch==2.8.0 \\\n    --hash=sha256:abc \\\n    --hash=sha256:def\n"
        "--extra-index-url https://me:${TOKEN}@example.org/simple#fragment\r\ngit+https://example.org/a/b@main\n"
        "# a comment ends with its line \\\nrich\n--find-links https://example.org/wheels\nscipy \\"
    )
    (tmp_path / "link").symlink_to(".")
    assert requirements.read(tmp_path / "link" / "requirements.txt") == [
        *("lightning>=2.4,<3", "hypothesis", "pytest"),
        "torch==2.8.0      --hash=sha256:abc      --hash=sha256:def",
        *("--extra-index-url https://me:${TOKEN}@example.org/simple#fragment", "git+https://example.org/a/b@main"),
        *("rich", "--find-links https://example.org/wheels", "scipy"),
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("numpy\n\n-e .", "r.txt:3: -e installs from a local folder"),
        ("numpy \\\n  --hash=sha256:a\n--editable \\\n  .", "r.txt:3: --editable installs from a local folder"),
        ("file:a", "r.txt:1: file:a installs from a local folder"),
        ("dist/a-1.tar.gz", "r.txt:1: dist/a-1.tar.gz installs from a local folder"),
        ("./wheels/a.whl", "r.txt:1: ./wheels/a.whl installs from a local folder"),
        ("dist/a-1-py3-none-any.whl", "r.txt:1: dist/a-1-py3-none-any.whl installs from a local folder"),
        ("a @ file:///home/me/a", "r.txt:1: a installs from a local folder"),
        ("FILE:///home/me/a", "r.txt:1: FILE:///home/me/a installs from a local folder"),
        ("a @ FILE:/home/me/a", "r.txt:1: a installs from a local folder"),
        ("file:///home/me/a#egg=https://host/a", "installs from a local folder"),
        ("./a.whl;https://host/a", "installs from a local folder"),
        ("A.WHL", "r.txt:1: A.WHL installs from a local folder"),
        ("git+file:///home/me/a", "r.txt:1: git+file:///home/me/a installs from a local folder"),
        ("a @ git+FILE:///home/me/a", "r.txt:1: a installs from a local folder"),
        *(
            (f"{option}{where}", f"r.txt:1: {option}{where} names a local folder, which nodes do not have")
            for option in ("--index-url ", "-i ", "--extra-index-url=", "--find-links ", "-f ")
            for where in ("file:///home/me", "FILE:/home/me", "/home/me", "../https://x")
        ),
        ("..", "r.txt:1: .. installs from a local folder"),
        ("~/a", "r.txt:1: ~/a installs from a local folder"),
        ("--find-links wheels", "r.txt:1: --find-links wheels names a local folder, which nodes do not have"),
        ("-c constraints.txt", "r.txt:1: -c is not supported"),
        ("--only-binary :all: -r /etc/passwd", "r.txt:1: a line has one option"),
        ("--pre -e .", "r.txt:1: a line has one option"),
        ("sub/pkg", "r.txt:1: sub/pkg installs from a local folder"),
        ("numpy\n--index-url https://me:hunter22@example.org/simple", "r.txt:2: a URL contains a password"),
        ("https://ghp_0123456789abcdefghij@example.org/a.zip", "r.txt:1: a URL contains a password"),
        ("a @ https://host/a.whl?token=${TOKEN}", "r.txt:1: a variable after the host of a URL would be stored"),
        ("a @ ${URL}", "r.txt:1: a variable after the host of a URL would be stored"),
        ("a @ https://h/" + "://?" * 900_000 + "${URL}", "r.txt:1: a variable after the host of a URL would be"),
        ("-r r.txt\n-e .", "r.txt:2: -e installs from a local folder"),
        ("a" * (4 << 20) + "\n", "r.txt: the files that include one another are larger than 4 MiB"),
        ("a \\\n" * 300_000 + "\n-e .", "r.txt:300002: -e installs from a local folder"),
        ("-r none.txt", "none.txt: No such file or directory"),
        ("a\n" * 10_001, "r.txt: the files that include one another have more than 10000 lines"),
        ("-r r.txt\n" * 10_001, "r.txt: the files that include one another have more than 10000 lines"),
    ],
)
def test_a_line_that_cannot_be_installed_must_be_named(tmp_path, text, error):
    (tmp_path / "r.txt").write_text(text)
    with pytest.raises(UsageError) as failure:
        requirements.read(tmp_path / "r.txt")
    assert error in str(failure.value)
    assert "hunter22" not in str(failure.value) and "ghp_" not in str(failure.value)


def test_each_file_must_be_read_once_however_often_it_is_included(tmp_path):
    for number in range(20):
        others = "".join(f"-r {other}.txt\n" for other in range(20))
        (tmp_path / f"{number}.txt").write_text(f"a{number}\n{others}")
    assert sorted(requirements.read(tmp_path / "7.txt")) == sorted(f"a{number}" for number in range(20))


def test_files_that_include_one_another_must_be_limited(tmp_path):
    for number in range(101):
        (tmp_path / f"{number}.txt").write_text(f"-r {number + 1}.txt\n")
    with pytest.raises(UsageError, match=r"100\.txt: more than 100 files include one another"):
        requirements.read(tmp_path / "0.txt")


def test_files_that_include_one_another_must_be_small_together(tmp_path):
    (tmp_path / "0.txt").write_text("-r 1.txt\n-r 2.txt")
    for name in ("1.txt", "2.txt"):
        (tmp_path / name).write_text(f"# {'a' * (5 << 19)}\nnumpy\n")
    with pytest.raises(UsageError, match=r"2\.txt: the files that include one another are larger than 4 MiB"):
        requirements.read(tmp_path / "0.txt")


@pytest.mark.parametrize("include", ["../credentials", "{outside}", "link/credentials"])
def test_a_file_must_not_include_files_outside_of_its_folder(tmp_path, include):
    (tmp_path / "credentials").write_text("key = 123")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "link").symlink_to("..")
    (tmp_path / "project" / "r.txt").write_text(f"-r {include.format(outside=tmp_path / 'credentials')}")
    with pytest.raises(UsageError, match=r"r.txt:1: .*credentials is not read: it is outside of"):
        requirements.read(tmp_path / "project" / "r.txt")


@pytest.mark.parametrize("link", ["requirements.txt", "folder"])
def test_a_project_must_not_bring_a_link_to_a_file_outside_of_it(tmp_path, monkeypatch, link):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "requirements.txt").write_text("secret\n")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / link).symlink_to(tmp_path / "outside" / link if "." in link else tmp_path / "outside")
    monkeypatch.chdir(tmp_path / "project")
    path = Path(link if "." in link else f"{link}/requirements.txt")
    with pytest.raises(UsageError, match="it is a link out of its folder") as error:
        requirements.read(path)
    assert str(tmp_path / "outside" / "requirements.txt") in str(error.value.hint)
    assert requirements.read(Path("..") / "outside" / "requirements.txt") == ["secret"]  # named by the user


def test_a_file_may_include_those_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "base.txt").write_text("numpy")
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "dev.txt").write_text("-r ../base.txt\npytest")
    monkeypatch.chdir(tmp_path)
    assert requirements.read(tmp_path / "requirements" / "dev.txt") == ["numpy", "pytest"]


@pytest.mark.parametrize("value", ["lightning", ["lightning"], ["", " lightning "]])
def test_a_job_file_must_take_one_package_or_a_list(value):
    assert layers.resolve({"pip": value}).pip == ["lightning"]
    assert layers.resolve({"pip": "lightning >= 2\ntorch\n"}).pip == ["lightning >= 2", "torch"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (["./a"], "installs from a local folder"),
        (["https://me:hunter22@example.org/a.zip"], "a URL contains a password"),
        *((value, "") for value in ([1], {"a": 1}, ["a\nb"])),
    ],
)
def test_a_job_file_must_not_take_anything_else(value, why):
    with pytest.raises(UsageError, match=f"pip must be a list of packages .*{why}") as failure:
        layers.resolve({"pip": value})
    assert "hunter22" not in str(failure.value)


def test_a_variable_that_is_not_set_must_be_named(monkeypatch):
    monkeypatch.setenv("USER_NAME", "me")
    monkeypatch.delenv("TOKEN", raising=False)
    lines = ["-i https://${USER_NAME}@example.org", "a${lower}b", "-f https://${TOKEN}@example.org"]
    with pytest.raises(UsageError, match=r"need \$\{TOKEN\}, which is not set in this shell"):
        requirements.variables(lines)
    monkeypatch.setenv("TOKEN", "x")
    assert requirements.variables(lines) == ["TOKEN", "USER_NAME"]


def test_a_loop_of_links_that_is_included_must_be_an_error(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "r.txt").write_text("-r loop\n")
    with pytest.raises(UsageError, match="loop"):
        requirements.read(tmp_path / "r.txt")
