"""The whole disagg command: serving (coordinator/cli.py) and, on top of it, measuring.

Each cli_*.py here declares the options of its commands; this file only puts them together,
in the app of the serving commands.
"""

import typer

from bench import cli_compare, cli_interfere, cli_plan, cli_ratio, cli_run
from coordinator.cli import app
from coordinator.exits import EPILOG

__all__ = ["app"]

bench = typer.Typer(
    help="Measure: load, comparisons with colocated serving and with other servers, ratios.",
    no_args_is_help=True,
)
bench.command("run", epilog=EPILOG)(cli_run.run)
bench.command("compare", epilog=EPILOG)(cli_compare.compare)
bench.command("interfere", epilog=EPILOG)(cli_interfere.interfere)
bench.command("ratio", epilog=EPILOG)(cli_ratio.ratio)
app.add_typer(bench, name="bench")
app.command("plan", epilog=EPILOG)(cli_plan.plan)
