"""`completion`: commands, options and jobs in bash, zsh and fish.

The script of a shell calls this command with the words before the cursor, so that it never gets old.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from orchestrate import console, errors
from orchestrate.cli import options
from orchestrate.cli.parser import EXPORTS, Parser
from orchestrate.cli.table import COMMANDS
from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME

# Each prints files where nothing is found: the arguments of a script, a job file.
SCRIPTS = {
    "bash": """\
_orchestrate() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _orchestrate orchestrate torch-orchestrate
""",
    "zsh": """\
#compdef orchestrate torch-orchestrate
_orchestrate() {
    local -a found
    found=(${(f)"$("$words[1]" completion -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
if [ "$funcstack[1]" = _orchestrate ]; then _orchestrate; else compdef _orchestrate orchestrate torch-orchestrate; fi
""",
    "fish": """\
function __orchestrate
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    $words[1] completion -- $words[2..] (commandline --current-token)
end
complete --command orchestrate --arguments '(__orchestrate)'
complete --command torch-orchestrate --arguments '(__orchestrate)'
""",
}


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `completion`."""
    parser.usage = "%(prog)s [SHELL] [--install]"
    parser.add_argument("shell", nargs="?", choices=[*SCRIPTS], help="the shell (default: that of your account)")
    parser.add_argument("--install", action="store_true", help="write the script to where the shell finds it")


def run(args: argparse.Namespace) -> int:
    """Print the script of a shell, or install it; with words after `--`, print what the last of them can become."""
    if args.script is not None:
        for word in candidates(args.script):
            console.out(word)
        return errors.SUCCEEDED
    shell = args.shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SCRIPTS:
        raise UsageError(f"no completion for {console.quoted(shell)}", f"use {', '.join(SCRIPTS)}")
    if not args.install:
        console.out(SCRIPTS[shell].removesuffix("\n"))
        return errors.SUCCEEDED
    path = place(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SCRIPTS[shell])
    console.print_message(f"wrote {path}; new shells complete {console.called()}")
    if shell == "zsh":
        console.print_message(f"hint: ~/.zshrc needs this before compinit: fpath+=({path.parent})")
    return errors.SUCCEEDED


def place(shell: str) -> Path:
    """Return the path at which a shell looks for the completion of a command of this account."""
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion" / "completions" / "orchestrate",
        "zsh": data / "zsh" / "site-functions" / "_orchestrate",
        "fish": settings / "fish" / "completions" / "orchestrate.fish",
    }[shell]


def candidates(words: Sequence[str]) -> list[str]:
    """Return what the last word, which may be empty, can become; nothing where any file can follow."""
    *before, current = words or [""]
    return sorted({word for word in _all(before, current) if word.startswith(current)})


def _all(before: list[str], current: str) -> Iterable[str]:
    if not before:
        return [*COMMANDS, "--help", "--version"]
    name, about = before[0], COMMANDS.get(before[0])
    if about is None or "--" in before:
        return []
    parser = options.parser(name).subparser(name)
    if name == "export":
        if len(before) == 1:
            return EXPORTS
        if before[1] not in EXPORTS:
            return []
        parser = parser.subparser(before[1])
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    if (action := actions.get(before[-1])) and action.nargs != 0:
        return _values(action, before)
    if current.startswith("-"):
        return [flag for flag, action in actions.items() if action.help != argparse.SUPPRESS]
    if about.job:
        return _jobs(before)
    return _topics() if name == "help" else [*SCRIPTS] if name == "completion" else []


def _values(action: argparse.Action, before: list[str]) -> Iterable[str]:
    """Return the values of an option, as far as they are known."""
    if action.dest == "set":
        from orchestrate.spec.spec import FIELDS

        return [f"{key}=" for key in FIELDS]
    if action.metavar == "JOB":
        return _jobs(before)
    names = str(action.metavar).split("|") if "|" in str(action.metavar) else []
    return [*map(str, action.choices or ()), *(name for name in names if name.islower())]


def _jobs(before: list[str]) -> Iterable[str]:
    """Return the names of the jobs and clusters in the folder of run directories."""
    after = dict(zip(before, before[1:]))
    runs = Path(after.get("--runs", options.RUNS))
    try:
        return [options.LATEST, *(name for name in os.listdir(runs) if NAME.fullmatch(name))]
    except OSError:
        return [options.LATEST]


def _topics() -> Iterable[str]:
    from orchestrate.cli.commands.help import topics

    return [*COMMANDS, *topics()]
