"""disagg cache: what nodes keep of prompts that were computed."""

from typing import Annotated

import typer

from coordinator.client import Client
from coordinator.exits import EPILOG, exit_code_of_errors

app = typer.Typer(help="Prefix caches of the nodes.", no_args_is_help=True)


@app.command(epilog=EPILOG)
def clear(
    node: Annotated[
        str | None, typer.Argument(help="A node's name, as disagg nodes lists it.")
    ] = None,
    all_nodes: Annotated[bool, typer.Option("--all", help="Every node.")] = False,
    coordinator: Annotated[
        str, typer.Option(help="Address of the coordinator.")
    ] = "127.0.0.1:50051",
) -> None:
    """Make a node forget the prefixes that it has cached. What runs goes on."""
    if (node is None) != all_nodes:
        raise typer.BadParameter("name a node, or say --all", param_hint="NODE")
    with exit_code_of_errors(coordinator=coordinator), Client(coordinator) as client:
        names = [node] if node is not None else [one.node_id for one in client.list_nodes()]
        for name in names:
            client.clear_cache(name)
