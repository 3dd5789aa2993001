"""Define the command line: ``dask gpurt …`` and ``python -m dask_gpurt …``."""

from __future__ import annotations

import click

from dask_gpurt import __version__


# Dask adds the group under its own name, not under that of the entry point.
@click.group("gpurt", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """See what the runtime for Dask on GPU clusters does, and what it could do here."""


def _add_commands() -> None:
    from dask_gpurt.cli.calibrate import calibrate
    from dask_gpurt.cli.chaos import chaos
    from dask_gpurt.cli.demo import demo
    from dask_gpurt.cli.doctor import doctor
    from dask_gpurt.cli.overlap import overlap
    from dask_gpurt.cli.simulate import simulation
    from dask_gpurt.cli.topology import topology

    for command in (calibrate, chaos, demo, doctor, overlap, simulation, topology):
        main.add_command(command)


_add_commands()
