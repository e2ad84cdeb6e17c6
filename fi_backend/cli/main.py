# SPDX-License-Identifier: Apache-2.0
"""The application: its commands and nothing else."""

from __future__ import annotations

import typer

from fi_backend import __version__
from fi_backend.cli.bench import bench
from fi_backend.cli.build import build
from fi_backend.cli.doctor import doctor
from fi_backend.cli.explain import explain
from fi_backend.cli.shell import CommandGroup
from fi_backend.cli.stats import stats

app = typer.Typer(
    name="fi-backend",
    cls=CommandGroup,
    help="Look after the fi_backend attention engine: check, build, measure, explain.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (doctor, build, explain, stats):
    app.command()(command)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    _version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Look after the fi_backend attention engine: check, build, measure, explain."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
