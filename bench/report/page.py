"""A page: what a report says, and one self-contained HTML file of it with PNG files beside it.

    Page(title, stamp, verdict, facts, tables, plots) --write--> FOLDER/report.html, FOLDER/*.png

The page loads nothing and runs nothing: plots are SVG within it, styles too. It follows the
reader's choice of dark or light. All text is escaped. A run that was not valid says so before
anything else, in the title too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report.look import SHADES, svg, write_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE_FILE = "report.html"
_TEMPLATE = "page.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Whether figures may be believed; reasons: what was wrong, or what was checked."""

    is_valid: bool
    reasons: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a table; tone: "", "good" or "bad"."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A header and rows of as many cells; the first column names its row."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A figure, its file's name without the ending, and how to read it."""

    title: str
    file: str
    figure: "Figure"
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """verdict is the sentence that answers what was asked; facts are how it was measured."""

    title: str
    stamp: Stamp
    verdict: str = ""
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = field(default_factory=tuple)


def write(page: Page, folder: Path) -> Path:
    """Writes the page and its PNG files, over older ones, and returns the page's path."""
    for plot in page.plots:
        write_png(plot.figure, folder / f"{plot.file}.png")
    path = folder / PAGE_FILE
    path.write_text(render(page), encoding="utf-8")
    return path


def render(page: Page) -> str:
    """The page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawings = [
        # What matplotlib wrote, with its texts escaped by it.
        (plot, Markup(svg(plot.figure, description=f"{plot.title}. {plot.caption}")))
        for plot in page.plots
    ]
    return environment.get_template(_TEMPLATE).render(page=page, drawings=drawings, shades=SHADES)


def plain(text: object) -> Cell:
    return Cell("" if text is None else str(text))
