"""Detect secrets in environment variables, and replace them in displayed text. Pure.

The record of a job keeps their values (`records.py`): another supervisor needs them to restart workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import groupby
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from orchestrate.console import clean

HIDDEN = "***"
SECRET_WORDS = re.compile(
    r"TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASES?|PASSCODES?|PASS|SSHPASS|CREDENTIALS?|CREDS|AUTH|AUTHORIZATION"
    r"|COOKIES?|DSN|PATS?|JWT|WEBHOOKS?|BEARER|MNEMONICS?|PGPASS|T?OTP_SEED|SESSION_ID"
    r"|(API|AUTH|ACCESS|SECRET|MASTER|PRIVATE|ENCRYPTION|SIGNING|SHARED|ACCOUNT|DEPLOY|LICENSE|SSH)KEYS?"
    r"|CONNSTR|CONNECTIONSTRINGS?|CONNECTION_STRINGS?"
    r"|\w+(TOKEN|SECRET|PASSWORD|PASSWD|APIKEY)"  # as in PGPASSWORD
)
SUFFIXES = {"PW", "PIN"}  # mark a secret at the end of a name: DB_PW, but not PIN_MEMORY
PLACES = {"PATH", "FILE", "DIR", "NAME"}  # what _KEY_ in the middle of a name belongs to: PRIVATE_KEY_PATH
# Before PIN, mean that something is pinned: CPU_PIN is not secret.
PINNED = {"CPU", "CPUS", "CORE", "CORES", "THREAD", "THREADS", "GPU", "NUMA", "IRQ"}
KEY_FORMATS = {"ID", "V", "B", "BASE", "HEX", "PEM", "DER"}  # may follow KEY: ENCRYPTION_KEY_V2, PRIVATE_KEY_BASE64
PLURALS = {"TOKENS", "KEYS"}  # may be counts, such as MAX_TOKENS=4096
COUNT_WORDS = {"NUM", "MAX", "MIN", "N"}  # before a plural, make it a count
# Before KEY or a plural, mark something other than a secret.
ORDINARY = {"SORT", "FOREIGN", "PARTITION", "ROUTING", "CACHE", "SHARD", "GROUP", "JOIN", "IMAGE", "LABEL", "METRIC"}
SWITCH = re.compile(r"[01]?|true|false|yes|no|on|off|none", re.IGNORECASE)  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
URL = re.compile(  # scheme://user:password@host, but not host:port/…@; https://token@host
    r"://[^\s:/@]*:(?!\d+[/?#])([^\s@]+)@|\bhttps?://([^\s:/?#@]+)@", re.IGNORECASE
)
PAIR_NAMES = re.compile(r"pwd|sig|.*signature", re.IGNORECASE)  # names that mark a secret in a pair
PAIR = re.compile(r"(?:^|[;?&#\s])-*([A-Za-z][\w.-]*)=([^;?&#\s]+)")  # of a connection string, or of a URL's query
KNOWN_FORMATS = re.compile(  # known formats of secrets; bounded, so that the time is linear
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY"
    r"|\bgh[oprsu]_\w{16,}|\bgithub_pat_\w{16,}|\bhf_[A-Za-z0-9]{16,}|\bglpat-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|\bxox[abeprs]-[\w-]{10,}|\bhooks\.slack\.com/services/[\w/-]+"
    r"|\bsk-(?:[a-z0-9]{1,12}-){0,3}\w{20,}"
    r"|(?<=\bBearer )[\w.~+/=-]{8,}"
    r"|(?:(?<=\bssh://)|(?<=\bhttps://))(?=[A-Za-z_.-]{0,99}\d)[\w.-]{16,255}(?=@)"  # not a user name such as git
)
IN_JSON = re.compile(
    r'"(?:\w{0,40}_)?(?:private_key|password|passwd|secret|token|api_?key)"\s{0,9}:\s{0,9}"([^"\\][^"]*)', re.IGNORECASE
)
MAX_DEPTH = 50  # levels of nested data that are searched; a job may write deeper ones
MANY = 20  # secrets
MAX_GROUPS = 40  # levels of groups in a pattern of many secrets
KEPT = re.compile(r"[\w.~-]+", re.ASCII)  # characters that are the same in JSON, in Python's repr and in a URL
MARGIN = 128 << 10  # bytes to read beyond a part, so that no secret is cut: Linux limits a variable to them
MIN_LENGTH = 6  # characters of a secret that is searched for in text; shorter ones are part of too many words


def is_secret(name: str, value: str) -> bool:
    """Whether an environment variable is likely to hold a secret: by its name, or by what its value contains."""
    return _is_named_secret(name, value) or bool(_embedded(value))


def secret_names(env: Mapping[str, str], named: Collection[str] = ()) -> set[str]:
    """Variables that hold secrets: those in `named`, those that look like secrets, and those that contain one."""
    found = {name for name, value in env.items() if value and (name in named or is_secret(name, value))}
    texts = {text for name in found for text in _parts(env[name]) if len(text) >= MIN_LENGTH}
    contained = _search(texts)
    return found | {name for name, value in env.items() if contained(value)}


def redacted(env: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """The environment with `***` in place of each secret; `named` lists variables that are always secret."""
    secrets = secret_names(env, named)
    return {name: HIDDEN if name in secrets else value for name, value in env.items()}


class Mask:
    """Replaces the secrets of an environment in other text, such as a worker's output."""

    def __init__(self, env: Mapping[str, str], named: Collection[str] = ()) -> None:
        """`named` lists variables that are always secret."""
        secrets = [env[name] for name in secret_names(env, named)]
        found, probes = set[str](), set[str]()
        for part in {part for value in secrets for part in _parts(value)}:
            if forms := {form for form in _forms(part) if len(form) >= MIN_LENGTH}:
                found |= forms
                probes |= _probes(part, forms)
        self._probes = [*probes]
        self._pattern = re.compile(_any_of(sorted(found)) or r"(?!)")  # matches nothing

    def __call__(self, text: str) -> str:
        """The text with `***` in place of each secret."""
        few = len(self._probes) < MANY  # searches for each of them are much faster than one for the pattern
        return text if few and not any(map(text.__contains__, self._probes)) else self._pattern.sub(HIDDEN, text)

    def part(self, text: str, first: int = 0, last: int | None = None) -> str:
        """A part of a text with `***` in place of each secret, and without those that its ends would cut."""
        last = len(text) if last is None else last
        for match in self._pattern.finditer(text):
            if match.start() < first < match.end():
                first = match.end()
            if match.start() < last < match.end():
                last = match.start()
        return self(text[first:last])

    def first(self, data: bytes, most: int) -> str:
        """The text of the first bytes of `data`, like `part`; it has `MARGIN` more, unless it is whole."""
        return self.part(data.decode(errors="replace"), 0, len(data[:most].decode(errors="replace")))

    def last(self, data: bytes, most: int) -> str:
        """The text of the last bytes of `data`, like `part`; it has `MARGIN` more, unless it is whole."""
        text = data.decode(errors="replace")
        return self.part(text, len(text) - len(data[-most:].decode(errors="replace")))

    def inside(self, data: Any, depth: int = MAX_DEPTH, ours: Collection[str] | None = None) -> Any:
        """JSON data with `***` in place of each secret in keys and values, and of data nested deeper than `depth`.

        `ours` is for data whose keys are not the job's: all keys stay unchanged, and so does text of the keys `ours`.
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


def _is_named_secret(name: str, value: str) -> bool:
    """Whether the name marks a secret, and the value is not a switch such as `true`."""
    return _name_is_secret(name, value) and not SWITCH.fullmatch(value)


def _name_is_secret(name: str, value: str) -> bool:
    """Whether a name marks a secret; `value` tells plural names from counts."""
    words = re.findall(r"[^\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper())
    pairs = [f"{one}{two if two == 'KEY' else '_' + two}" for one, two in zip(words, words[1:])]
    both = words if {*words[-1:]} & PLACES else [*words, *pairs]
    if any(map(SECRET_WORDS.fullmatch, both)) or "PWD" in words[1:]:
        return True
    if words[-1:] and words[-1] in SUFFIXES and not PINNED & set(words[-2:-1]):
        return True
    while words and words[-1] in KEY_FORMATS:
        words.pop()
    if words[-1:] == ["KEY"] and not ORDINARY & set(words[-2:-1]):
        return True
    counts = {after for before, after in zip(words, words[1:]) if before in COUNT_WORDS | ORDINARY}
    return bool(PLURALS & (set(words) - counts)) and not value.isdecimal()


def _embedded(value: str) -> list[str]:
    """Secrets in a value: known formats, passwords in URLs, and values that a pair or JSON names as secret."""
    # Cut after its last @, a word is searched in linear time.
    heads = [word[: word.rfind("@") + 1] for word in value.split()]
    found = [part for head in heads for groups in URL.findall(head) for part in groups if part]
    for name, text in PAIR.findall(value):
        if PAIR_NAMES.fullmatch(name) or (name.upper() not in ("KEY", "KEYS") and _is_named_secret(name, text)):
            found.append(text)
    return [*found, *KNOWN_FORMATS.findall(value), *IN_JSON.findall(value)]


def _search(texts: Collection[str]) -> Callable[[str], Any]:
    """A function that tells whether a text contains one of `texts`."""
    if len(texts) < MANY:
        return lambda value: any(text in value for text in texts)
    return re.compile(_any_of(sorted(texts))).search


def _any_of(texts: list[str], depth: int = MAX_GROUPS) -> str:
    """A pattern of sorted texts that prefers the longest: what several have in common is compared only once.

    Groups are nested at most `depth` levels deep, as Python compiles a pattern with recursive functions.
    """
    if len(texts) < 2 or not depth:
        return "|".join(map(re.escape, reversed(texts)))
    common = os.path.commonprefix([texts[0], texts[-1]])
    rests = [text[len(common) :] for text in texts]
    groups = [_any_of([*group], depth - 1) for _, group in groupby(filter(None, rests), key=lambda rest: rest[0])]
    return f"{re.escape(common)}(?:{'|'.join(groups)}){'' if rests[0] else '?'}"


def _parts(value: str) -> set[str]:
    """Parts of a secret that text may contain: the whole value, each line, and the secrets in it; also as displayed."""
    embedded = _embedded(value)
    decoded = [text for part in embedded for text in _decoded(part)]
    parts = {value, value.strip(), *embedded, *(line for text in (value, *decoded) for line in text.splitlines())}
    parts |= {part.encode(errors="surrogateescape").decode(errors="replace") for part in parts}
    return parts | {*map(clean, parts)}


def _decoded(part: str) -> Iterator[str]:
    """What a program has once it has decoded a secret in JSON or in a URL, if that differs."""
    if "\\" in part:
        with contextlib.suppress(ValueError):
            yield json.loads(f'"{part}"')
    if "%" in part:
        yield unquote(part)


def _forms(part: str) -> set[str]:
    """A part of a secret as programs print it: as it is, in JSON, as Python's repr and ascii, and in a URL."""
    quotes = (json.dumps, partial(json.dumps, ensure_ascii=False), repr, ascii)
    urls = (quote, partial(quote, safe=""), quote_plus)
    return {part, *(form(part)[1:-1] for form in quotes), *(form(part, errors="surrogateescape") for form in urls)}


def _probes(part: str, forms: set[str]) -> set[str]:
    """What a text contains that contains any form of a part: characters that all forms keep, or else the forms."""
    core = max(KEPT.findall(part), key=len, default="")
    return {core} if len(core) >= MIN_LENGTH else forms
