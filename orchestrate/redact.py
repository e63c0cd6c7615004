"""Secrets among environment variables: which they are, and what is shown in their place. Pure.

`job.yaml` is the one file that keeps their values: a second supervisor needs them to start workers again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
WORDS = re.compile(
    r"TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|PASS|SSHPASS|APIKEYS?|CREDENTIALS?|CREDS|AUTH|COOKIES?|DSN|PAT|JWT"
    r"|\w+(TOKEN|SECRET|PASSWORD|PASSWD|APIKEY)"  # as in PGPASSWORD
)
PLURALS = {"TOKENS", "KEYS"}  # which may be a count, such as MAX_TOKENS=4096
SWITCH = re.compile(r"[01]?|true|false|yes|no|on|off|none", re.IGNORECASE)  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
URL = re.compile(  # scheme://user:password@host, where no port looks like a password; https://token@host
    r"://[^\s:/@]*:(?!\d+[/?#])([^\s@]+)@|\bhttps?://([^\s:/?#@]+)@", re.IGNORECASE
)
DEEPEST = 50  # levels of data that are looked into; a job may nest what it writes as deep as it likes
SHORTEST = 6  # characters of a value that is looked for in text; a shorter one is part of too many words


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable is likely to hold a secret, by its name or by a password in a URL."""
    return bool(URL.search(value)) or (_says_so(name, value) and not SWITCH.fullmatch(value))


def redacted(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with `***` in place of each secret."""
    return {name: HIDDEN if is_secret(name, value) else value for name, value in env.items()}


class Mask:
    """Replaces the secrets of an environment where they appear in other text, such as a worker's output."""

    def __init__(self, env: Mapping[str, str]) -> None:
        secrets = [value for name, value in env.items() if is_secret(name, value)]
        found = {text for value in secrets for text in _parts(value) if len(text) >= SHORTEST}
        longest_first = sorted(found, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # which matches nothing

    def __call__(self, text: str) -> str:
        """The text with `***` in place of each secret."""
        return self._pattern.sub(HIDDEN, text)

    def inside(self, data: Any, depth: int = DEEPEST) -> Any:
        """JSON data with `***` in place of each secret, in keys as well as in values, and of what is nested deeper."""
        if isinstance(data, (list, dict)) and not depth:
            return HIDDEN
        if isinstance(data, str):
            return self(data)
        if isinstance(data, list):
            return [self.inside(value, depth - 1) for value in data]
        if isinstance(data, dict):
            return {self(key): self.inside(value, depth - 1) for key, value in data.items()}
        return data


def _says_so(name: str, value: str) -> bool:
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    if any(map(WORDS.fullmatch, words)):
        return True
    if words[-1:] == ["KEY"] or words[-2:] == ["KEY", "ID"] or "PWD" in words[1:]:
        return True
    return bool(PLURALS & set(words)) and not value.isdecimal()


def _parts(value: str) -> list[str]:
    """What of a secret could be shown: all of it, one of its lines, or the password in a URL."""
    return [value, *value.splitlines(), *(part for found in URL.findall(value) for part in found)]
