"""disagg bench ratio: goodput of every split of N nodes, measured, beside what the plan predicts.

    colocated Nx1, 1P(N-1)D, ..., (N-1)P1D --start, search, stop--> one RatioPoint each --> JSON

One split is up at a time. Emulated nodes (model "emulated") make as many as wanted on two cores;
they go through real servers and lanes, the plan does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.contender import Served
from bench.deployment import Deployment
from bench.figures import GOODPUT
from bench.rounds import Measure

# Predicted goodput in requests/s: (mean, low, high).
Predict = Callable[[Deployment], tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioPoint:
    """Goodput of one split, in requests/s. The prediction and its band are None without a plan;
    problems are the load generator's with itself."""

    name: str
    num_prefill: int
    num_decode: int
    goodput_rps: float
    predicted_rps: float | None = None
    predicted_low_rps: float | None = None
    predicted_high_rps: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        if self.predicted_rps is None or not self.goodput_rps:
            return None
        return self.predicted_rps / self.goodput_rps - 1

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


async def sweep(
    deployments: Sequence[Deployment],
    *,
    model: str,
    kv_memory_gb: float,
    folder: Path,
    search: Measure,
    seed: int = 0,
    predict: Predict | None = None,
    tell: Callable[[RatioPoint], None] = lambda point: None,
) -> list[RatioPoint]:
    """Measures the goodput of one after the other with search. Raises ChildFailed."""
    points = []
    for deployment in deployments:
        log_dir = folder / "logs" / deployment.name.replace(" ", "-")
        served = Served(deployment, model=model, kv_memory_gb=kv_memory_gb, log_dir=log_dir)
        async with served, served.awake():
            measured = await search(served, deployment.name, seed)
        mean, low, high = predict(deployment) if predict else (None, None, None)
        point = RatioPoint(
            name=deployment.name,
            num_prefill=deployment.num_prefill,
            num_decode=deployment.num_decode,
            goodput_rps=measured.figures[GOODPUT.name] or 0.0,
            predicted_rps=mean,
            predicted_low_rps=low,
            predicted_high_rps=high,
            problems=measured.problems,
        )
        points.append(point)
        tell(point)
    return points


def advice(points: Sequence[RatioPoint]) -> str:
    """Which split was best, in a sentence."""
    best = max(points, key=lambda point: point.goodput_rps)
    if not best.goodput_rps:
        return "no split meets the SLO at any rate that was tried"
    others = [point for point in points if point is not best]
    if not others:
        return f"{best.name}: {best.goodput_rps:.3g} requests/s"
    second = max(others, key=lambda point: point.goodput_rps)
    return (
        f"{best.name} is best with {best.goodput_rps:.3g} requests/s; "
        f"then {second.name} with {second.goodput_rps:.3g}"
    )
