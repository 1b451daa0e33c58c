"""`quire completion SHELL`: a script that completes commands and flags."""

from __future__ import annotations

import argparse

from argcomplete.shell_integration import shellcode


def run(args: argparse.Namespace) -> int:
    print(shellcode(["quire"], shell=args.shell))
    return 0
