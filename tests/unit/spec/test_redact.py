"""Secret values of environment variables must be recognized, and others must stay readable."""

import json
import re
from functools import partial
from urllib import parse

import pytest

from orchestrate.console import clean
from orchestrate.spec.redact import HIDDEN, Mask, is_secret, redacted, secret_names

SECRET = (
    "HF_TOKEN token HF_TOKENS TOKEN_2 GITHUB_TOKEN2 CLIENT_SECRET SECRETS SECRET_KEY_BASE DB_PASSWORD PGPASSWORD "
    "PASSWD SSH_PASSPHRASE SMTP_PASS SSHPASS MYSQL_PWD API_KEY OPENAI_API_KEY apiKey WANDB_API_KEY_1 SSH_KEY KEY "
    "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN KEYS OPENAI_APIKEY CREDENTIAL AWS_CREDENTIALS "
    "DOCKER_AUTH_CONFIG NPM_CONFIG__AUTH COOKIE SESSION_COOKIES SENTRY_DSN GH_PAT hfToken MY_JWT "
    "ENCRYPTION_KEY_V2 AUTHORIZATION SIGNING_KEY_BASE64 SSH_PRIVATE_KEY_B64 PRIVATE_KEY_PEM TS_AUTHKEY ACCESSKEY "
    "SECRETKEY MASTERKEY PASSCODE PASSPHRASES GH_PATS SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING "
    "connectionString DB_CONNSTR MINIO_ACCESSKEY COSMOS_PRIMARY_KEY accountKey AES_KEY_HEX HTTP_AUTHORIZATION "
    "BEARER BEARER_HEADER PW DB_PW dbPw PIN CARD_PIN OTP_SEED TOTP_SEED MNEMONIC WALLET_MNEMONIC PGPASS SESSION_ID "
    "OPENAI_API_KEY_DEV API_KEY_PROD AWS_ACCESS_KEY_PROD PRIVATE_KEY_DATA SIGNING_KEY_OLD"
)
PLAIN = (
    "TOKENIZERS_PARALLELISM TOKENIZER KEYBOARD MONKEY KEY_FILE PRIMARY_KEYED AUTHOR PATH PATIENCE PASSES PWD OLDPWD "
    "OMP_NUM_THREADS A COMPASS DSNAME DISPATCH HOME ID KEY_SIZE_ID DETOKENIZE "
    "MAX_TOKENS NUM_TOKENS PRIMARY_KEY_COLUMN NUM_KEYS SORT_KEY SORT_KEYS PARTITION_KEY CACHE_KEY IMAGE_KEY LABEL_KEY "
    "CONNECTION STRING CONNECTION_TIMEOUT MODEL_SIGNATURE SIG PATTERN PASSENGER HOTKEYED "
    "KEYWORDS TOKENIZED KEYFRAMES V B BASE PEM COMPASS_PATH XLA_FLAGS LD_LIBRARY_PATH NCCL_DEBUG BYPASS "
    "PIN_MEMORY CPU_PIN THREADS_PIN SPIN PINNED SEED RANDOM_SEED SESSION SESSION_NAME PGPASSFILE PW_TEST PGHOST BEAR "
    "PRIVATE_KEY_PATH API_KEY_FILE SSH_KEY_DIR ACCOUNT_KEY_NAME"
)


@pytest.mark.parametrize("name", SECRET.split())
def test_a_secret_name_must_make_its_value_secret(name):
    assert is_secret(name, "canary-7c1")


@pytest.mark.parametrize("name", PLAIN.split())
def test_a_similar_name_must_not_make_its_value_secret(name):
    assert not is_secret(name, "canary-7c1")


@pytest.mark.parametrize(
    "value",
    [
        "postgres://me:canary@host/db",
        "redis://:canary@host:6379",
        "postgresql+psycopg://me:can/ary@host/db",
        "https://canary@example.org/simple",
        "git+https://x-access-token:canary@example.org/a.git",
        "http://proxy:3128 http://me:canary@proxy:3128",
        "amqp://me:12345@host",
        "https://me@example.org/ postgres://me:canary@host",
        "https://a.blob.core.windows.net/data?sv=2024&sig=canary%3D",
        "https://b.s3.amazonaws.com/x?X-Amz-Expires=60&X-Amz-Signature=canary",
        "https://b.s3.amazonaws.com/x?X-Amz-Security-Token=canary",
        "https://example.org/?access_token=canary#top",
        "https://example.org/#token=canary",
        "url=https://example.org/?api_key=canary",
        "Server=db;Database=d;User Id=me;Password=canary;",
        "Server=db;Pwd=canary",
        "host=db user=me password=canary",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=canary==;EndpointSuffix=core.windows.net",
        "Endpoint=sb://a.example.org/;SharedAccessKey=canary=",
        "BlobEndpoint=https://a.example.org;SharedAccessSignature=canary",
        "--user me --api-key=canary",
        "-----BEGIN PRIVATE KEY-----\\ncanary",
        "x\n-----BEGIN OPENSSH PRIVATE KEY-----\ncanary",
        "-----BEGIN RSA PRIVATE KEY-----",
        *(f"gh{letter}_" + "a1B2" * 9 for letter in "poursp"),
        "github_pat_" + "11AAAA_0" * 5,
        "AKIA" + "ABCD2345" * 2,
        *(f"xox{letter}-1234-5678-canary" for letter in "abpr"),
        "https://hooks.slack.com/services/T0/B0/canary",
        "sk-" + "a1B2" * 12,
        "sk-proj-" + "a1B2" * 12,
        "sk-ant-api03-" + "a1B2" * 12,
        "hf_" + "aBcD" * 8,
        "Authorization: Bearer canary-7c1",
        '{"type": "service_account", "private_key": "canary"}',
        '{"user":"me","password":"canary"}',
        '{"db_password": "canary"}',
        "ssh://canary0123456789ab@example.org/a.git",
    ],
)
def test_a_value_that_contains_a_secret_must_be_secret_under_any_name(value):
    assert is_secret("A", value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "https://example.org",
        "http://host:8080/a@b",
        "ssh://git@example.org/a.git",
        "me@example.org",
        "s3://bucket/a:b@c",
        "tcp://host:29500",
        "a:b@c",
        "https://example.org/?page=2&key=name#top",
        "https://example.org/?max_tokens=4096&use_auth=false",
        "Server=db;Database=d",
        "--sort-key=name --max-tokens=4096 --keys=a,b",
        "a=b c=d",
        "Password=;",
        "x=?sig",
        "-----BEGIN CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
        "ghp_short",
        "hf_transfer",
        "hf_hub_download_of_a_model",
        "sk-learn",
        "sk-learn-pipeline-classifier-large",
        "task-0123456789abcdef0123456789",
        "AKIA",
        "xox",
        "bearer of news",
        "https://hooks.slack.com/",
        "ssh://ubuntu@example.org/a.git",
        "ssh://ec2-user@example.org",
        "ssh://a-user-with-a-long-name@example.org",
        '{"password": "", "private_key_file": "a", "tokens": "4", "lr": 0.1}',
        "{'a': 'private_key'}",
        "sha256:" + "0123456789abcdef" * 4,
    ],
)
def test_a_value_that_contains_no_secret_must_stay_readable(value):
    assert not is_secret("A", value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", ""), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("USE_AUTH", "False"), ("MAX_TOKENS", "4096")],
)
def test_a_switch_or_a_count_must_not_be_secret(name, value):
    assert not is_secret(name, value)
    assert is_secret("PASSWORD", "4096") and is_secret("API_KEY", "123456")


def test_only_secret_values_must_be_replaced():
    env = {"HF_TOKEN": "canary-7c1", "A": "b", "URL": "https://me:canary@host", "EMPTY_TOKEN": ""}
    assert redacted(env) == {"HF_TOKEN": HIDDEN, "A": "b", "URL": HIDDEN, "EMPTY_TOKEN": ""}
    assert env["HF_TOKEN"] == "canary-7c1"


def test_secrets_must_be_masked_in_text():
    key = "-----BEGIN KEY-----\ncanary-line\n-----END KEY-----\n"
    hide = Mask({"HF_TOKEN": "canary-7c1", "LONG_TOKEN": "canary-7c1-more", "URL": "redis://:hunter22@h/0", "KEY": key})
    assert Mask({"KEY": key.replace("\n", "\r\n")})("canary-line") == HIDDEN
    assert hide("a canary-7c1 b canary-7c1-more c") == f"a {HIDDEN} b {HIDDEN} c"
    assert hide("redis://:hunter22@h/0, or hunter22 alone") == f"{HIDDEN}, or {HIDDEN} alone"
    assert hide("canary-line") == HIDDEN
    assert hide("(canary.7c1)") == "(canary.7c1)"


def test_a_token_inside_a_value_must_also_be_masked_on_its_own():
    hide = Mask({"A": "Bearer canary-7c1", "B": '{"user": "someone", "password": "canary-8d2"}'})
    assert hide("canary-7c1 of someone: canary-8d2") == f"{HIDDEN} of someone: {HIDDEN}"


def test_a_password_inside_a_value_must_also_be_masked_on_its_own():
    hide = Mask({"DB": "Server=db;Password=canary-7c1;", "BLOB": "https://a.example.org/x?sv=2024-01-01&sig=canary%3D"})
    assert hide("canary-7c1, canary%3D, 2024-01-01") == f"{HIDDEN}, {HIDDEN}, 2024-01-01"


def test_what_programs_decode_of_a_secret_must_also_be_masked():
    key = {"private_key": "-----BEGIN PRIVATE KEY-----\ncanary-7c1\n-----END PRIVATE KEY-----\n"}
    hide = Mask({"A": json.dumps(key), "B": "postgres://me:p%40ss%2Fword@host"})
    for line in (*key["private_key"].splitlines(), "p@ss/word"):
        assert hide(line) == HIDDEN


def test_many_lines_of_secrets_must_be_found_in_many_variables_in_linear_time():
    """Each line in each variable would take minutes."""
    env = {"A_TOKEN": "\n".join(f"{line:06x}" for line in range(18_000))} | {f"A{n}": f"x{n}" for n in range(10_000)}
    assert secret_names(env | {"B": "is 0000ff"}) == {"A_TOKEN", "B"}


def test_lines_with_a_common_beginning_must_be_looked_for_in_linear_time():
    """Each line at each place of the text would take half a minute."""
    lines = ["exp0rt KEY=canary", *(f"export K{line}=canary-{line:04}" for line in range(6_000))]
    hide = Mask({"A_TOKEN": "\n".join(lines)})
    assert hide("export K" * 100_000 + lines[7]).endswith("export K***")
    assert {hide(line) for line in lines} == {HIDDEN}


def test_a_variable_that_the_job_file_declares_secret_must_be_masked():
    env = {"PLAN": "canary-7c1", "FLAG": "true", "EMPTY": "", "A": "b"}
    secrets = ("PLAN", "FLAG", "EMPTY")
    assert redacted(env, secrets) == {"PLAN": HIDDEN, "FLAG": HIDDEN, "EMPTY": "", "A": "b"}
    assert Mask(env, secrets)("canary-7c1 is true") == f"{HIDDEN} is true"
    assert redacted(env) == env


def test_a_variable_that_contains_another_secret_must_be_secret():
    env = {"HF_TOKEN": "canary-7c1", "ARGS": "--login canary-7c1", "DB": "https://me:canary-8d2@a.example.org"}
    env |= {"ALSO": "canary-8d2", "SHORT_TOKEN": "a1", "A": "a1"}
    hidden = ("HF_TOKEN", "ARGS", "DB", "ALSO", "SHORT_TOKEN")
    assert redacted(env) == env | dict.fromkeys(hidden, HIDDEN)


LONG = {"hosts": "://a:" * 200_000, "host": "@" + "://:" * 200_000, "names": "a=" * 500_000, "query": "?a" * 500_000}
LONG |= {"keys": "sk-a-" * 200_000, "ssh": "ssh://" * 150_000, "user": "ssh://" + "a" * 1_000_000}
LONG |= {"json": '"password":x' * 90_000, "spaces": '"password" ' * 90_000, "begin": "-----BEGIN " * 90_000}
LONG |= {"names_in_json": '"' + "a_" * 500_000, "words": "_" * 1_000_000}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_a_value_of_a_megabyte_must_be_checked_in_linear_time(value):
    """Each would take an hour if it were searched from every position to its end."""
    assert not is_secret("A", value)


@pytest.mark.parametrize(
    "form",
    [json.dumps, partial(json.dumps, ensure_ascii=False), repr, ascii, parse.quote, parse.quote_plus, str.strip],
    ids=["JSON", "JSON with all characters", "repr", "ascii", "URL", "query", "without white space"],
)
def test_a_secret_must_be_masked_in_the_forms_that_programs_print(form):
    secret = ' canary"7c1/\\d é '
    assert "canary" not in Mask({"HF_TOKEN": secret})(f"<{form(secret)}>")


@pytest.mark.parametrize(
    ("first", "last", "part"),
    [(0, None, "a *** b *** c"), (4, None, " b *** c"), (0, 4, "a "), (0, 14, "a *** b "), (3, 16, " b "), (2, 9, "")],
)
def test_a_part_of_a_text_must_have_no_part_of_a_secret(first, last, part):
    assert Mask({"A_TOKEN": "hunter22"}).part("a hunter22 b hunter22 c", first, last) == part


@pytest.mark.parametrize("most", range(1, 60))
def test_a_part_must_be_counted_in_bytes_and_have_no_part_of_a_secret(most):
    hide, text = Mask({"A_TOKEN": "hunter22-é"}), "äöü hunter22-é äöü hunter22-é äöü"
    for found in (hide.first(text.encode(), most), hide.last(text.encode(), most)):
        assert not re.search(r"hunter22|unter|22|-|é", found) and len(found.replace("***", "").encode()) <= most + 4


def test_a_secret_that_is_not_text_must_be_masked_as_a_reader_decodes_it():
    raw = b"canary-7c1\xe9 x"
    hide = Mask({"HF_TOKEN": raw.decode(errors="surrogateescape")})
    assert hide(raw.decode(errors="replace")) == HIDDEN


def test_a_value_that_is_too_short_must_not_be_masked_in_text():
    hide = Mask({"PASSWORD": "rank", "A": "step 1 of 3", "HF_TOKEN": ""})
    assert hide("rank 0: step 1 of 3") == "rank 0: step 1 of 3"
    assert Mask({"PASSWORD": "ranked"})("rank, unranked") == f"rank, un{HIDDEN}"
    assert Mask({})("anything") == "anything"


def test_secrets_must_be_masked_in_data():
    hide = Mask({"HF_TOKEN": "canary-7c1"})
    data = {"config": {"token": "canary-7c1", "lr": 0.1}, "canary-7c1": [1, None, "x canary-7c1"], "loss": 2}
    assert hide.inside(data) == {"config": {"token": HIDDEN, "lr": 0.1}, HIDDEN: [1, None, f"x {HIDDEN}"], "loss": 2}
    ours = [{"cause": "canary-7c1", "canary-7c1": ["canary-7c1"]}]
    assert hide.inside(ours, ours=("cause",)) == [{"cause": "canary-7c1", "canary-7c1": [HIDDEN]}]


def test_deeply_nested_data_must_be_truncated():
    data: list = []
    for _ in range(900):
        data = [data]
    assert str(Mask({}).inside(data)).strip("[]") == f"'{HIDDEN}'"
    assert Mask({}).inside(shallow := [[[[[[[[[["a"]]]]]]]]]]) == shallow


def test_the_longest_of_many_secrets_must_be_replaced():
    lines = [f"{first}{second}cdef{'g' * length}" for first in "a.1" for second in "b(|" for length in range(5)]
    mask = Mask({"TOKEN": "\n".join(lines)})
    assert {mask(f"<{line}>") for line in lines} == {"<***>"} and mask("abcde abxdef") == "abcde abxdef"


@pytest.mark.parametrize("value", ["\ufefftoken-value-1", "token-\u200bvalue-1", "token-value-1\x07"])
def test_a_secret_must_be_hidden_as_it_is_displayed(value):
    """Text is masked after it was cleaned."""
    assert Mask({"API_TOKEN": value})(f"it is {clean(value)}.") == f"it is {HIDDEN}."
