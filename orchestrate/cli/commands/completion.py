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
from orchestrate.cli.args import Args
from orchestrate.cli.parser import EXPORTS, Parser
from orchestrate.cli.table import COMMANDS
from orchestrate.errors import UsageError
from orchestrate.files.paths import NAME

# Where nothing is found, shells complete files: the arguments of a script, a job file. A program is only asked if it is
# found on the PATH, not in the current folder.
SCRIPTS = {
    "bash": """\
_orchestrate() {
    local IFS=$'\\n' words=() word after= last=-1
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do  # bash splits --option=value
        if [[ $last -ge 0 && ( $word == = || $after ) ]]; then words[last]+=$word; else words[++last]=$word; fi
        [[ $word == = ]] && after=1 || after=
    done
    COMPREPLY=($(command "${1##*/}" completion -- "${words[@]}" 2>/dev/null))
    [[ ${words[last]} == --*=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
}
complete -o default -F _orchestrate orchestrate torch-orchestrate
""",
    "zsh": """\
#compdef orchestrate torch-orchestrate
_orchestrate() {
    local -a found
    found=(${(f)"$(command "${words[1]:t}" completion -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ! $#found )); then _files
    elif [[ $found[1] == *= ]]; then compadd -S '' -- $found
    else compadd -- $found; fi
}
if [ "$funcstack[1]" = _orchestrate ]; then _orchestrate; else compdef _orchestrate orchestrate torch-orchestrate; fi
""",
    "fish": """\
function __orchestrate
    set --local words (commandline --tokenize --cut-at-cursor --current-process)
    set --local program (string replace --regex '.*/' '' -- $words[1])
    command $program completion -- $words[2..] (commandline --current-token) 2>/dev/null
end
complete --command orchestrate --arguments '(__orchestrate)'
complete --command torch-orchestrate --arguments '(__orchestrate)'
""",
}
NAMES = ("orchestrate", "torch-orchestrate")


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `completion`."""
    parser.usage = "%(prog)s [SHELL] [--install]"
    parser.add_argument("shell", nargs="?", metavar="SHELL", help="bash, zsh or fish (default: that of your account)")
    parser.add_argument("--install", action="store_true", help="write the script to where the shell finds it")


def run(args: Args) -> int:
    """Print the script of a shell, or install it; with words after `--`, print what the last of them can become."""
    if args.script is not None:
        for word in candidates(args.script):
            console.out(word)
        return errors.SUCCEEDED
    shell = args.shell or os.path.basename(os.environ.get("SHELL", ""))
    if not shell:
        raise UsageError("which shell is not known, since SHELL is not set", f"name one: {', '.join(SCRIPTS)}")
    if shell not in SCRIPTS:
        raise UsageError(f"no completion for {console.quoted(shell)}", f"use {', '.join(SCRIPTS)}")
    if not args.install:
        console.out(SCRIPTS[shell].removesuffix("\n"))
        return errors.SUCCEEDED
    for path in places(shell):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SCRIPTS[shell])
        console.print_message(f"wrote {path}")
    console.print_message("new shells complete orchestrate")
    if shell == "bash":
        console.print_message(
            "hint: without the package bash-completion, add to ~/.bashrc: . <(orchestrate completion bash)"
        )
    elif shell == "zsh":
        console.print_message(f"hint: ~/.zshrc needs this before compinit: fpath+=({path.parent})")
    return errors.SUCCEEDED


def places(shell: str) -> list[Path]:
    """Return the paths at which a shell looks for the completion of our commands; raises UsageError without a home."""
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        raise UsageError("the variable HOME is not set to a folder", "export HOME")
    data = Path(os.environ.get("XDG_DATA_HOME") or f"{home}/.local/share")
    settings = Path(os.environ.get("XDG_CONFIG_HOME") or f"{home}/.config")
    return {
        "bash": [data / "bash-completion" / "completions" / name for name in NAMES],
        "zsh": [data / "zsh" / "site-functions" / "_orchestrate"],  # whose first line names both
        "fish": [settings / "fish" / "completions" / f"{name}.fish" for name in NAMES],
    }[shell]


def candidates(words: Sequence[str]) -> list[str]:
    """Return what the last word, which may be empty, can become; nothing where any file can follow."""
    *before, current = words or [""]
    option, equals, value = current.partition("=")
    if option.startswith("--") and equals:
        return [f"{option}={word}" for word in candidates([*before, option, value])]
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
    values = {at + 1 for at, word in enumerate(before) if (known := actions.get(word)) and known.nargs != 0}
    given = [word for at, word in enumerate(before) if at and at not in values and not word.startswith("-")]
    if given[name == "export" :] and not (about.job and current.startswith("-")):
        return []  # the job's own command, or the second job
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
    after = dict(zip(before, before[1:])) | dict(word.split("=", 1) for word in before if "=" in word)
    runs = Path(after.get("--runs", options.RUNS)).expanduser()
    try:
        return [options.LATEST, *(name for name in os.listdir(runs) if NAME.fullmatch(name))]
    except OSError:
        return [options.LATEST]


def _topics() -> Iterable[str]:
    from orchestrate.cli.commands.help import topics

    return [*COMMANDS, *topics()]
