"""Secrets among environment variables: which they are, and what is shown in their place. Pure.

The record of a job keeps their values (`records.py`): a second supervisor needs them to start workers again.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

HIDDEN = "***"
WORDS = re.compile(
    r"TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASES?|PASSCODES?|PASS|SSHPASS|CREDENTIALS?|CREDS|AUTH|AUTHORIZATION"
    r"|COOKIES?|DSN|PATS?|JWT|WEBHOOKS?|BEARER|MNEMONICS?|PGPASS|T?OTP_SEED|SESSION_ID"
    r"|(API|AUTH|ACCESS|SECRET|MASTER|PRIVATE|ENCRYPTION|SIGNING|SHARED|ACCOUNT|DEPLOY|LICENSE|SSH)KEYS?"
    r"|CONNSTR|CONNECTIONSTRINGS?|CONNECTION_STRINGS?"
    r"|\w+(TOKEN|SECRET|PASSWORD|PASSWD|APIKEY)"  # as in PGPASSWORD
)
LAST = {"PW", "PIN"}  # which call a secret at the end of a name: DB_PW, but not PIN_MEMORY
PINNED = {"CPU", "CPUS", "CORE", "CORES", "THREAD", "THREADS", "GPU", "NUMA", "IRQ"}  # which are not secret: CPU_PIN
FORMS = {"ID", "V", "B", "BASE", "HEX", "PEM", "DER"}  # which may follow a KEY: ENCRYPTION_KEY_V2, PRIVATE_KEY_BASE64
PLURALS = {"TOKENS", "KEYS"}  # which may be a count, such as MAX_TOKENS=4096
COUNTS = {"NUM", "MAX", "MIN", "N"}  # before one of those
ORDINARY = {"SORT", "FOREIGN", "PARTITION", "ROUTING", "CACHE", "SHARD", "GROUP", "JOIN", "IMAGE", "LABEL", "METRIC"}
SWITCH = re.compile(r"[01]?|true|false|yes|no|on|off|none", re.IGNORECASE)  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
URL = re.compile(  # scheme://user:password@host, where no port looks like a password; https://token@host
    r"://[^\s:/@]*:(?!\d+[/?#])([^\s@]+)@|\bhttps?://([^\s:/?#@]+)@", re.IGNORECASE
)
IN_PAIRS = re.compile(r"pwd|sig|.*signature", re.IGNORECASE)  # names that are as good as a password's in such a pair
PAIR = re.compile(r"(?:^|[;?&#\s])-*([A-Za-z][\w.-]*)=([^;?&#\s]+)")  # of a connection string, or of a URL's query
KNOWN = re.compile(  # values that have the form of a secret; bounded, so that the time is linear
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY"
    r"|\bgh[oprsu]_\w{16,}|\bgithub_pat_\w{16,}|\bhf_[A-Za-z0-9]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|\bxox[abeprs]-[\w-]{10,}|\bhooks\.slack\.com/services/[\w/-]+"
    r"|\bsk-(?:[a-z0-9]{1,12}-){0,3}\w{20,}"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|(?<=\bssh://)(?=[A-Za-z_.-]{0,99}\d)[\w.-]{16,255}(?=@)"  # no user's name, such as git
)
IN_JSON = re.compile(
    r'"(?:\w{0,40}_)?(?:private_key|password|passwd|secret|token|api_?key)"\s{0,9}:\s{0,9}"([^"\\][^"]*)', re.IGNORECASE
)
DEEPEST = 50  # levels of data that are looked into; a job may nest what it writes as deep as it likes
SHORTEST = 6  # characters of a value that is looked for in text; a shorter one is part of too many words


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable is likely to hold a secret: by its name, or by what its value contains."""
    return _calls_one(name, value) or bool(_inside(value))


def secret_names(env: Mapping[str, str], named: Collection[str] = ()) -> set[str]:
    """The variables of an environment that hold secrets: those that are `named`, look like it, or repeat one."""
    found = {name for name, value in env.items() if value and (name in named or is_secret(name, value))}
    texts = {text for name in found for text in _parts(env[name]) if len(text) >= SHORTEST}
    return found | {name for name, value in env.items() if any(text in value for text in texts)}


def redacted(env: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The environment with `***` in place of each secret; `named` ones are secret whatever they look like."""
    secrets = secret_names(env, named)
    return {name: HIDDEN if name in secrets else value for name, value in env.items()}


class Mask:
    """Replaces the secrets of an environment where they appear in other text, such as a worker's output."""

    def __init__(self, env: Mapping[str, str], named: Collection[str] = ()) -> None:
        """`named` are the variables that are secret whatever they look like."""
        secrets = [env[name] for name in secret_names(env, named)]
        found = {text for value in secrets for text in _parts(value) if len(text) >= SHORTEST}
        longest_first = sorted(found, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # which matches nothing

    def __call__(self, text: str) -> str:
        """The text with `***` in place of each secret."""
        return self._pattern.sub(HIDDEN, text)

    def inside(self, data: Any, depth: int = DEEPEST, ours: Collection[str] | None = None) -> Any:
        """JSON data with `***` in place of each secret, in keys as well as in values, and of what is nested deeper.

        `ours` is for data whose keys we have chosen: all keys stay as they are, and so does text of the keys `ours`.
        """
        if isinstance(data, (list, dict)) and not depth:
            return HIDDEN
        if isinstance(data, str):
            return self(data)
        if isinstance(data, list):
            return [self.inside(value, depth - 1, ours) for value in data]
        if isinstance(data, dict) and ours is None:
            return {self(key): self.inside(value, depth - 1) for key, value in data.items()}
        if isinstance(data, dict):
            return {
                key: value if key in (ours or ()) and isinstance(value, str) else self.inside(value, depth - 1, ours)
                for key, value in data.items()
            }
        return data


def _calls_one(name: str, value: str) -> bool:
    """Whether a value is called a secret, and is no switch."""
    return _says_so(name, value) and not SWITCH.fullmatch(value)


def _says_so(name: str, value: str) -> bool:
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    if any(map(WORDS.fullmatch, [*words, *map("_".join, zip(words, words[1:]))])) or "PWD" in words[1:]:
        return True
    if words[-1:] and words[-1] in LAST and not PINNED & set(words[-2:-1]):
        return True
    while words and words[-1] in FORMS:
        words.pop()
    if words[-1:] == ["KEY"] and not ORDINARY & set(words[-2:-1]):
        return True
    counts = {after for before, after in zip(words, words[1:]) if before in COUNTS | ORDINARY}
    return bool(PLURALS & (set(words) - counts)) and not value.isdecimal()


def _inside(value: str) -> list[str]:
    """The secrets in a value: what has a known form, the passwords in its URLs, and what its pairs or JSON call one."""
    # A word that ends at its last @ is searched in linear time.
    heads = [word[: word.rfind("@") + 1] for word in value.split()]
    found = [part for head in heads for groups in URL.findall(head) for part in groups if part]
    for name, text in PAIR.findall(value):
        if IN_PAIRS.fullmatch(name) or (name.upper() not in ("KEY", "KEYS") and _calls_one(name, text)):
            found.append(text)
    return [*found, *KNOWN.findall(value), *IN_JSON.findall(value)]


def _parts(value: str) -> list[str]:
    """What of a secret could be shown: all of it, one of its lines, or the passwords in it."""
    return [value, *value.splitlines(), *_inside(value)]
