"""`quire completion SHELL`: a script that completes commands and flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

BASH = """\
_quire() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}}
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word"))
    return
  fi
  case "$command" in
{cases}
  esac
}}
complete -o default -F _quire quire
"""
BASH_CASE = """\
    {command}) [[ $word == -* ]] && COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;"""

ZSH = """\
#compdef quire
_quire() {{
  local -a commands
  commands=({commands})
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  case "$words[2]" in
{cases}
  esac
}}
(( $+functions[compdef] )) && compdef _quire quire
"""
ZSH_CASE = """\
    {command}) _arguments {flags} '*:file:_files' ;;"""


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its summary and its flags, with their help."""

    name: str
    summary: str
    flags: tuple[tuple[str, str], ...]


def run(args: argparse.Namespace) -> int:
    print(script(args.shell, commands_of(args.whole_parser)), end="")
    return 0


def commands_of(parser: argparse.ArgumentParser) -> list[Command]:
    """The commands of a parser."""
    return list(_commands(parser))


def _commands(parser: argparse.ArgumentParser) -> Iterator[Command]:
    (group,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in group._choices_actions}
    for name, command in group.choices.items():
        flags = ((flag, action.help or "") for action in command._actions for flag in action.option_strings)
        yield Command(name, summaries.get(name, ""), tuple((flag, text) for flag, text in flags if flag[:2] == "--"))


def script(shell: str, commands: list[Command]) -> str:
    """The script for bash, zsh or fish."""
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(commands))
    if shell == "bash":
        cases = (BASH_CASE.format(command=c.name, flags=" ".join(flag for flag, _ in c.flags)) for c in commands)
        return BASH.format(commands=" ".join(c.name for c in commands), cases="\n".join(cases))
    described = " ".join(f"'{c.name}:{_plain(c.summary)}'" for c in commands)
    cases = (
        ZSH_CASE.format(command=c.name, flags=" ".join(f"'{flag}[{_plain(text)}]'" for flag, text in c.flags))
        for c in commands
    )
    return ZSH.format(commands=described, cases="\n".join(cases))


def _fish(commands: list[Command]) -> Iterator[str]:
    for command in commands:
        yield f"complete -c quire -n __fish_use_subcommand -f -a {command.name} -d '{_plain(command.summary)}'"
        for flag, text in command.flags:
            condition = f"__fish_seen_subcommand_from {command.name}"
            yield f"complete -c quire -n '{condition}' -l {flag[2:]} -d '{_plain(text)}'"


def _plain(text: str) -> str:
    """Text without the characters that are special in a quoted string or a description of zsh."""
    return "".join(char for char in text.partition(";")[0] if char not in "'[]:\\`$%\"")
