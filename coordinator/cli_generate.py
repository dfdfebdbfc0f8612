"""disagg generate and disagg chat: one answer, or a conversation, on the terminal."""

import sys
from collections import defaultdict

from coordinator.client import Client
from coordinator.events import Delta, Finished, GenerationError, GenerationOptions, Prompt
from coordinator.exits import report
from coordinator.render import write_event_json, write_heading, write_summary, write_text


def generate(
    client: Client,
    prompt: Prompt,
    *,
    options: GenerationOptions,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    """Streams one answer to stdout, then its summary. Raises GenerationError."""
    if as_json:
        for event in client.generate(prompt, timeout_s=timeout_s, **options):
            write_event_json(event)
        return
    stream_answer(client, prompt, options=options, timeout_s=timeout_s, texts=[])


def stream_answer(
    client: Client,
    prompt: Prompt,
    *,
    options: GenerationOptions,
    timeout_s: float | None,
    texts: list[str],
) -> None:
    """Writes an answer as it comes; texts gets its pieces, also of one that is interrupted.

    Of several choices the first one streams; the others wait, or lines of all would mix.
    """
    finished: Finished | None = None
    others: defaultdict[int, list[str]] = defaultdict(list)
    try:
        for event in client.generate(prompt, timeout_s=timeout_s, **options):
            if isinstance(event, Delta) and event.choice > 0:
                others[event.choice].append(event.text)
            elif isinstance(event, Delta):
                texts.append(event.text)
                write_text(event.text)
            elif isinstance(event, Finished):
                finished = event
    finally:
        if texts:  # what follows starts on a line of its own
            write_text("\n")
        for choice, pieces in sorted(others.items()):
            write_heading(f"choice {choice}")
            write_text(f"{''.join(pieces)}\n")
    if finished is not None:
        write_summary(finished)


def chat(
    client: Client,
    *,
    system: str | None,
    options: GenerationOptions,
    timeout_s: float | None,
) -> None:
    """Reads lines and answers them until /exit or Ctrl-D; Ctrl-C ends the current answer only.

    The history is here; the coordinator keeps nothing between turns. What was out of an
    interrupted answer stays in it. Raises GenerationError when the coordinator is gone.
    """
    history = [{"role": "system", "content": system}] if system else []
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        texts: list[str] = []
        try:
            stream_answer(client, history, options=options, timeout_s=timeout_s, texts=texts)
        except KeyboardInterrupt:
            pass
        except GenerationError as error:
            if error.is_unreachable:
                raise
            report(str(error))
        if texts:
            history.append({"role": "assistant", "content": "".join(texts)})
        else:
            history.pop()  # most templates want turns to alternate


def _read_line() -> str | None:
    while True:
        try:
            line = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            continue
        return None if line.strip() == "/exit" else line
