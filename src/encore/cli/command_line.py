"""What every command has in common: how arguments are read, how errors are printed, and exit codes.

Exit codes: 0 done; 1 an error, in one line on stderr; 2 a budget that cannot be met, and nothing else.
Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from encore.errors import BudgetError, EncoreError

DONE, FAILED, DOES_NOT_FIT = 0, 1, 2
TIERS = "where activations may be offloaded to, such as disk or host,disk"


class CommandParser(argparse.ArgumentParser):
    """argparse exits with 2 for arguments that it cannot read; here 2 means a budget that cannot be met."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(FAILED, f"{self.prog}: {message}\n")


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """Read the arguments, call the function that the parser sets as `run`, and return the exit code."""
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except BudgetError as error:
        print(f"encore: {error}", file=sys.stderr)
        return DOES_NOT_FIT
    except EncoreError as error:
        print(f"encore: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:  # a disk that is full, a pipe that is closed: nothing that a trace of ours would explain
        print(f"encore: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("encore: interrupted", file=sys.stderr)
        return FAILED
