"""How every plot looks: one colour and dash per deployment in all reports, axes, and both outputs.

    new_axes --> matplotlib Figure --png--> a file with a white ground
                                    \\-svg--> inline SVG whose colours are the page's variables

A figure is drawn in the light colours; in SVG each of them becomes var(--name), so that a page
shows it in dark too. Split deployments are blue to green and solid, colocated ones red to orange
and dashed, other servers purple to grey and dotted: told apart without colour as well.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Shade:
    """One colour, for a light ground and for a dark one; name is its CSS variable."""

    name: str
    light: str
    dark: str


INK = Shade(name="ink", light="#1b1f23", dark="#e6e8ea")
MUTED = Shade(name="muted", light="#5b646e", dark="#a3adb8")
GRID = Shade(name="grid", light="#d9dde2", dark="#353c44")
PAPER = Shade(name="paper", light="#fefefd", dark="#14181c")
GOOD = Shade(name="good", light="#1a7f37", dark="#4cc26b")
BAD = Shade(name="bad", light="#c62828", dark="#ff7b72")
LONG = Shade(name="long", light="#b58900", dark="#d9b343")

_SPLIT = (
    Shade(name="split-0", light="#0067a5", dark="#58aee8"),
    Shade(name="split-1", light="#007e62", dark="#35c39b"),
    Shade(name="split-2", light="#3d4db8", dark="#8f9bf5"),
    Shade(name="split-3", light="#10808f", dark="#46c6d8"),
)
_COLOCATED = (
    Shade(name="colocated-0", light="#cb4b16", dark="#f08a5d"),
    Shade(name="colocated-1", light="#a8710a", dark="#e0ab45"),
    Shade(name="colocated-2", light="#a3264c", dark="#ef7d9f"),
)
_OTHER = (
    Shade(name="other-0", light="#8b4a9e", dark="#cf97e0"),
    Shade(name="other-1", light="#60656b", dark="#b4bac1"),
    Shade(name="other-2", light="#6d4c41", dark="#c3a195"),
)
SHADES = (INK, MUTED, GRID, PAPER, GOOD, BAD, LONG, *_SPLIT, *_COLOCATED, *_OTHER)

DPI = 150
# Highest / lowest value of a log axis with room for three ticks a decade.
_ROOMY = 200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Colour and dash of one deployment."""

    colour: str
    dash: str


def looks(names: Iterable[str]) -> dict[str, Look]:
    """A look per name, the same for a name whichever others it is shown with, as far as the family
    of its kind has colours; after that they repeat."""
    found: dict[str, Look] = {}
    taken: dict[str, int] = {}
    for name in dict.fromkeys(names):
        family, shades, dash = _family(name)
        if family == "colocated":
            # One node with all threads, and one node per core: the usual two have their own.
            index = 0 if "colocated 1x" in name.lower() else 1
            index = index if f"{family}{index}" not in taken else 2
            taken[f"{family}{index}"] = 1
        else:
            index = taken.get(family, 0) % len(shades)
            taken[family] = taken.get(family, 0) + 1
        found[name] = Look(colour=shades[index].light, dash=dash)
    return found


def new_axes(
    *, num_rows: int = 1, num_columns: int = 1, width_in: float = 9.0, height_in: float = 4.2
) -> tuple["Figure", list["Axes"]]:
    """A figure without a window, and its axes from left to right, or from the top down: then with
    one x axis for all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", facecolor=PAPER.light)
    grid = figure.subplots(num_rows, num_columns, squeeze=False, sharex=num_rows > 1)
    axes = list(grid.flat)
    for each in axes:
        each.set_facecolor(PAPER.light)
        each.grid(visible=True, which="major", color=GRID.light, linewidth=0.7)
        each.set_axisbelow(True)
        each.tick_params(colors=MUTED.light, which="both", labelsize=9)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(MUTED.light)
    return figure, axes


def name_axes(axes: "Axes", *, x: str, y: str, title: str = "") -> None:
    """Labels, with their units in them."""
    axes.set_xlabel(x, color=INK.light, fontsize=9)
    axes.set_ylabel(y, color=INK.light, fontsize=9)
    if title:
        axes.set_title(title, color=INK.light, fontsize=10, loc="left", fontweight="bold")


def plain_log(axis: "Axis") -> None:
    """Ticks of a log axis, whose limits are set, as plain numbers: 1, 10, 100; and 2 and 5 between
    where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < _ROOMY * low else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=10))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def label_lines(axes: "Axes", ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Names right of the lines' ends, each (x, y, name, colour), moved apart to be read."""
    placed = sorted(ends, key=lambda end: axes.transData.transform((end[0], end[1]))[1])
    last_px = float("-inf")
    for x, y, name, colour in placed:
        _, y_px = axes.transData.transform((x, y))
        moved_px = max(y_px, last_px + 13 * axes.figure.dpi / 72)
        last_px = moved_px
        axes.annotate(
            name,
            (x, y),
            xytext=(6, (moved_px - y_px) * 72 / axes.figure.dpi),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            va="center",
            fontweight="bold",
            annotation_clip=False,
        )


def write_png(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


def svg(figure: "Figure", *, description: str) -> str:
    """The figure as an element of a page: no metadata, no address, the page's colours."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "disagg", "font.family": "sans-serif"}
    ):
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(file, format="svg", metadata=nothing, dpi=DPI)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    # Groups carry ids that nobody refers to and that would be twice on a page of several figures.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*pt"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*pt"', r"\1", text, count=1)
    for shade in SHADES:
        text = text.replace(shade.light, f"var(--{shade.name})")
    return text.replace("<svg", f'<svg role="img" aria-label="{_quoted(description)}"', 1)


def _family(name: str) -> tuple[str, tuple[Shade, ...], str]:
    if "colocated" in name.lower():
        return "colocated", _COLOCATED, "--"
    if re.search(r"\d+P\d+D", name, re.IGNORECASE):
        return "split", _SPLIT, "-"
    return "other", _OTHER, ":"


def _quoted(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
