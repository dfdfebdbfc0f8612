"""A table of a report for the terminal: the same cells as on the page, with rich.

page.Table --print_table--> the terminal, or whole lines into a pipe or file
"""

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from bench.report.page import Table

# Wider than any table.
_MOST_COLUMNS = 1000
_STYLES = {"good": "bold green", "bad": "bold red"}


def print_table(table: Table) -> None:
    """A terminal wraps cells to its width; elsewhere lines are as long as they need to be."""
    console, shown = Console(), rich_table(table)
    if not console.is_terminal:
        console = Console(width=_MOST_COLUMNS)
        console = Console(width=console.measure(shown).maximum)
    console.print(shown)


def rich_table(table: Table) -> RichTable:
    """Figures to the right, words in colour; the note is the caption."""
    shown = RichTable(
        # As Text everywhere: brackets and colons in names are neither markup nor emoji.
        title=Text(table.title, style="table.title"),
        caption=Text(table.note, style="table.caption") if table.note else None,
        title_justify="left",
        caption_justify="left",
    )
    for index, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if index else "left", no_wrap=index == 0)
    for row in table.rows:
        shown.add_row(*(Text(cell.text, style=_STYLES.get(cell.tone, "")) for cell in row))
    return shown
