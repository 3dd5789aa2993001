"""Define the command line: ``dask gpurt …`` and ``python -m dask_gpurt …``."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module

import click

from dask_gpurt import __version__

#: The commands: the module and the name of each command object.
COMMANDS: Mapping[str, str] = {
    "calibrate": "cli.calibrate:calibrate",
    "demo": "tools.demo.command:demo",
    "doctor": "cli.doctor:doctor",
    "explain": "cli.explain:explain",
    "qualify": "tools.qualify.command:qualify",
    "trace": "cli.trace:trace",
}

#: The exit code after ctrl-C, 128 and the number of the signal.
INTERRUPTED = 130


class _Commands(click.Group):
    """Import each command only when it is used, so that ``doctor`` runs with an unsupported Dask."""

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; after ctrl-C say so in one line, and exit as a shell's own commands do."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(INTERRUPTED)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest one with a similar name."""
        if args and args[0] not in COMMANDS and (close := get_close_matches(args[0], COMMANDS, n=1)):
            ctx.fail(f"No such command {args[0]!r}: did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(import_module(f"dask_gpurt.{module}"), name)
        return found


# Dask registers the group by its own name, not by that of the entry point.
@click.group("gpurt", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Inspect the runtime for Dask on GPU clusters, and try it out."""
