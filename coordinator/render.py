"""What the terminal shows: streamed text, the summary line, the node table, progress bars.

Answers go to stdout and everything about them to stderr, so that a pipe gets the text only.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from coordinator.events import Delta, Finished, Node, PromptLogprobs, TimelineEvent

# Called with what goes on, how much is done, and how much there is (0: not known).
ShowProgress = Callable[[str, int, int], None]

# C0, DEL and C1 without tab and newline: a model can write escape sequences.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if code not in (9, 10)}


def write_text(text: str) -> None:
    """Streams a piece of an answer: as it is into a pipe, without control codes to a terminal."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_json(kind: str, values: object) -> None:
    """One line with one JSON object: {"event": kind, ...the dataclass's fields}."""
    assert dataclasses.is_dataclass(values) and not isinstance(values, type)
    line = json.dumps({"event": kind, **dataclasses.asdict(values)}, ensure_ascii=False)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_event_json(event: Delta | PromptLogprobs | Finished) -> None:
    """An event of a generation as one line of JSON."""
    kinds = {Delta: "delta", PromptLogprobs: "prompt_logprobs", Finished: "finished"}
    write_json(kinds[type(event)], event)


def write_timeline(events: Sequence[TimelineEvent]) -> None:
    """The table of disagg explain."""
    table = Table("at", "what", "details", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for event in events:
        details = ", ".join(f"{name} {value}" for name, value in event.details.items() if value)
        table.add_row(_milliseconds(event.at_s), event.what, Text(details))
    _print_table(table)


def write_heading(heading: str) -> None:
    """A line on stderr, above the text of one choice."""
    Console(stderr=True, highlight=False).print(heading, style="dim", markup=False)


def write_summary(finished: Finished) -> None:
    """The line after an answer: how fast, where, why it ended, and how to get it again."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(
        summary(finished), style="dim", markup=False
    )


def summary(finished: Finished) -> str:
    """The text of write_summary."""
    ttft_s, total_s = finished.timing.ttft_s, finished.timing.total_s
    nodes = [node for node in (finished.prefill_node, finished.decode_node) if node]
    parts = [
        f"TTFT {_milliseconds(ttft_s)}",
        f"TPOT {_milliseconds(finished.tpot_s)}",
        f"{finished.generated_tokens / total_s:.1f} tok/s" if total_s else "- tok/s",
        f"{finished.generated_tokens} tokens",
        *_cached(finished),
        f"{finished.served_as} ({finished.served_as_reason})",
        " -> ".join(nodes) or "no node",
        ",".join(choice.reason for choice in finished.choices),
        f"seed {finished.seed}",
    ]
    return " | ".join(parts)


def _cached(finished: Finished) -> list[str]:
    if not finished.cached_tokens:
        return []
    return [f"{finished.cached_tokens} of {finished.prompt_tokens} prompt tokens cached"]


def write_nodes(nodes: Sequence[Node]) -> None:
    """The table of disagg nodes and disagg up."""
    table = Table("node", "role", "address", "state", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("free / blocks", "running", "queue"):
        table.add_column(name, justify="right")
    for node in sorted(nodes, key=lambda node: (node.role != "prefill", node.node_id)):
        table.add_row(
            node.node_id,
            node.role,
            node.address,
            node.state,
            f"{node.available_blocks} / {node.num_blocks}",
            str(node.num_running),
            str(node.num_queued),
        )
    _print_table(table)


def _print_table(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a pipe has no width to cut to
        console.width = 200
    console.print(table)


def progress_bars() -> AbstractContextManager[ShowProgress]:
    """A bar per stage: called with (stage, done bytes, total bytes), 0 for an unknown total."""
    return _bars(DownloadColumn(binary_units=True), TimeRemainingColumn())


def loading_bars() -> AbstractContextManager[ShowProgress]:
    """A bar per node: called with (node, percent of its weights that are loaded, 100)."""
    return _bars(TaskProgressColumn(), only_on_a_terminal=True)


@contextmanager
def _bars(*columns: ProgressColumn, only_on_a_terminal: bool = False) -> Iterator[ShowProgress]:
    bars: dict[str, TaskID] = {}
    shown = (TextColumn("{task.description}"), BarColumn(), *columns)
    console = Console(stderr=True)
    is_hidden = only_on_a_terminal and not console.is_terminal
    with Progress(*shown, console=console, disable=is_hidden) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=None)
            progress.update(bars[stage], completed=done, total=total or None)

        yield update


def _milliseconds(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1000:.1f} ms"
