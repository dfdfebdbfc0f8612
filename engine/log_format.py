"""How a program of ours writes its log: a line of text or a JSON object for each record.

    log.info("request left request=%r ...", id, extra={"request": id})
        text:  2030-01-31 12:00:00,123 decode-0 INFO request left request='id' ...
        json:  {"time": ..., "level": "INFO", "logger": ..., "program": "decode-0",
                "message": "request left ...", "request": "id"}

A record about one request names it as the extra "request", so that lines of all programs can be
joined by it without parsing messages.
"""

import json
import logging
from datetime import UTC, datetime

LOG_FORMATS = ("text", "json")


def log_formatter(log_format: str, *, program: str) -> logging.Formatter:
    """The formatter of that name, one of LOG_FORMATS."""
    if log_format == "json":
        return _JsonFormatter(program)
    return logging.Formatter(f"%(asctime)s {program} %(levelname)s %(message)s")


class _JsonFormatter(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "program": self._program,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if request is not None:
            line["request"] = request
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
