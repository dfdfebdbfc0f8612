"""Which split of N machines to take, in words.

    outlook of every split (goodput per seed) --> best --> how sure, and what a user gets there

Two splits differ only if one is better under every seed, by more than the search's tolerance on
average: seeds give both the same requests, so that chance hits both alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.plan.predict import Goodput, Prediction

# Relative: below it two goodputs are one, for a search that stops at 2 %.
TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is predicted of one deployment: its goodput, and what it does at the asked rate."""

    name: str
    num_nodes: int
    is_colocated: bool
    goodput: Goodput
    at_rate: Prediction | None


def best_of(outlooks: Sequence[Outlook]) -> Outlook:
    return max(outlooks, key=lambda outlook: outlook.goodput.mean)


def is_better(one: Outlook, other: Outlook) -> bool:
    """By more than chance and the search's tolerance."""
    pairs = zip(one.goodput.per_seed, other.goodput.per_seed, strict=True)
    is_always = all(mine > theirs for mine, theirs in pairs)
    return is_always and one.goodput.mean > (1 + TOLERANCE) * other.goodput.mean


def advise(outlooks: Sequence[Outlook]) -> list[str]:
    """Sentences; the first is the verdict."""
    best = best_of(outlooks)
    if not best.goodput.mean:
        return ["No split meets the SLO at any rate: relax it, or take faster nodes."]
    alike = [one for one in outlooks if one is not best and not is_better(best, one)]
    return [_verdict(best, alike), *_at_rate(best, outlooks)]


def _verdict(best: Outlook, alike: Sequence[Outlook]) -> str:
    if not alike:
        act = "Colocate" if best.is_colocated else "Disaggregate"
        return f"{act}: {best.name} serves the most within the SLO, {_band(best.goodput)}."
    names = ", ".join(outlook.name for outlook in (best, *alike))
    colocated = next((one for one in (best, *alike) if one.is_colocated), None)
    advice = f" Then colocate ({colocated.name}): it is simpler." if colocated else ""
    return (
        f"No difference beyond the error band between {names}: {_band(best.goodput)} "
        f"with {best.name}.{advice}"
    )


def _at_rate(best: Outlook, outlooks: Sequence[Outlook]) -> list[str]:
    asked = best.at_rate
    if asked is None:
        return []
    enough = [one for one in outlooks if one.at_rate and one.goodput.low >= asked.rate_per_s]
    if not enough:
        return [f"{asked.rate_per_s:.3g} requests/s are more than any split keeps the SLO at."]
    names = ", ".join(one.name for one in enough)
    return [f"At {asked.rate_per_s:.3g} requests/s the SLO is kept by {names}."]


def _band(goodput: Goodput) -> str:
    return f"{goodput.mean:.3g} requests/s ({goodput.low:.3g} to {goodput.high:.3g})"
