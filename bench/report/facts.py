"""How something was measured, as name and value: whatever the summary says, in a fixed order.

Nested values are written as "name: value; name: value", so that nothing of a summary is lost on its
page because nobody has thought of it here.
"""

from collections.abc import Mapping, Sequence

# These first, in this order; then the others in the summary's.
_FIRST = ("command", "started_at", "ended_at", "seed", "slo", "workload", "target", "pinning")
# Its entries are facts of their own: the command and the versions are among them.
_LIFTED = "machine"


def facts_of(
    summary: Mapping[str, object], *, without: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """One per entry that is neither empty nor named in without."""
    lifted = summary.get(_LIFTED)
    flat = {**summary, **lifted} if isinstance(lifted, Mapping) else dict(summary)
    names = [name for name in _FIRST if name in flat]
    names += [name for name in flat if name not in names and name != _LIFTED]
    return [
        (name.replace("_", " "), _text_of(name, flat[name]))
        for name in names
        if name not in without and flat[name] not in (None, "", [], {}, ())
    ]


def slo_text(slo: Mapping[str, float | None]) -> str:
    """TTFT at most 400 ms, TPOT at most 50 ms."""
    titles = (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_p99_ms", "ITL p99 of a request"))
    return ", ".join(
        f"{title} at most {bound:g} ms"
        for name, title in titles
        if (bound := slo.get(name)) is not None
    )


def _text_of(name: str, value: object) -> str:
    return slo_text(value) if name == "slo" and isinstance(value, Mapping) else text(value)


def text(value: object) -> str:
    """A JSON value for people."""
    if isinstance(value, Mapping):
        return "; ".join(
            f"{key.replace('_', ' ')}: {text(each)}"
            for key, each in value.items()
            if each is not None
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(text(each) for each in value)
    return str(value)
