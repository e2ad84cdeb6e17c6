# SPDX-License-Identifier: Apache-2.0
"""What all commands share: consoles, JSON, and mistakes that become one red line instead of a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fi_backend import env
from fi_backend.errors import BuildError, PlanError, UnsupportedError

USER_MISTAKE = 2
BROKEN_ENVIRONMENT = 1


class InputError(ValueError):
    """A mistake in what the user typed; the text names argument, expectation and value."""


class CommandGroup(TyperGroup):
    """A group of commands that reports a user's mistake in one red line on stderr and exits with 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command; see the class."""
        run = partial(super().main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            result = run()
        except (InputError, PlanError, UnsupportedError) as error:
            _fail(str(error), USER_MISTAKE)
        except BuildError as error:
            _fail(str(error), BROKEN_ENVIRONMENT)
        except ImportError as error:
            if (error.name or "").startswith("fi_backend"):
                raise
            _fail(f"{type(error).__name__}: {error}; run `fi-backend doctor`", BROKEN_ENVIRONMENT)
        except typer.Abort:
            _fail("interrupted", 130)
        except Exception as error:
            # typer carries its own copy of click or uses an installed one, depending on its version: the
            # classes differ, the two names do not.
            if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
                raise
            _fail(error.format_message() + _got(error, args), error.exit_code)
        sys.exit(result if isinstance(result, int) else 0)


def _got(error: Any, arguments: Sequence[str] | None) -> str:
    """What was typed for the option that typer could not convert; its own message leaves it out."""
    options = getattr(getattr(error, "param", None), "opts", ())
    typed = list(sys.argv[1:] if arguments is None else arguments)
    for option, value in pairwise(typed):
        if option in options:
            return f"; got {value!r}"
    return ""


def _fail(message: str, code: int) -> NoReturn:
    first, _, rest = message.strip().partition("\n")
    error_console().print(Text(f"error: {first}", style="bold red"), soft_wrap=True)
    if rest:
        error_console().print(Text(rest), soft_wrap=True)
    sys.exit(code)


def console() -> Console:
    """Return a console on the standard output of now (tests and pipes replace it)."""
    made = Console(highlight=False)
    # A pipe has no width; rich would take 80 columns and cut the tables.
    if not made.is_terminal and "COLUMNS" not in env.child_environment():
        made.width = 120
    return made


def error_console() -> Console:
    """Return a console on standard error, for progress and complaints."""
    return Console(stderr=True, highlight=False)


@contextmanager
def user_input(**options: str) -> Iterator[None]:
    """Turn errors about values that come from the user into InputError.

    options: argument name inside the package -> what the user typed, such as page_size="--page-size".
    """
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        if isinstance(error, (InputError, BuildError)):
            raise
        message = str(error)
        for name, option in options.items():
            if message.startswith((f"{name}:", f"{name}[")):
                message = option + message[len(name) :]
        raise InputError(message) from error


def integers(option: str, text: str, *, low: int) -> list[int]:
    """Parse a comma-separated list of integers >= low; InputError names the option and the bad entry."""
    values = []
    for entry in text.split(","):
        try:
            value = int(entry)
        except ValueError:
            value = low - 1
        if value < low:
            raise InputError(
                f"{option}: expected integers >= {low} separated by commas; got {entry.strip()!r} in {text!r}"
            )
        values.append(value)
    return values


def names(option: str, values: Sequence[str], allowed: Sequence[str]) -> list[str]:
    """Split repeated and comma-separated names; InputError lists the allowed ones."""
    chosen = [name.strip() for value in values for name in value.split(",")]
    for name in chosen:
        if name not in allowed:
            raise InputError(f"{option}: expected any of {', '.join(allowed)}; got {name!r}")
    return list(dict.fromkeys(chosen))


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write `document`, indented, to `path`; InputError if the file cannot be written."""
    try:
        path.write_text(json.dumps(document, indent=1) + "\n")
    except OSError as error:
        raise InputError(
            f"--json: expected a file that can be written; got {path} ({error.strerror})"
        ) from error


def print_json(document: Any) -> None:
    """Print `document` as JSON, unwrapped and uncoloured."""
    print(json.dumps(document, indent=1))
