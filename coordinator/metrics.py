"""What the coordinator counts: requests by how they ended, and the times that their clients saw.

    with metrics.request(marks) as meter:      in flight
        meter.accepted(...)                    prompt tokens
        meter.told(response), ...              TTFT, the gaps between tokens; how it was served
                                               after the block: outcome, queue, handoff, pairings

Pairings, recoveries and cache hits are read from the request's timeline when it has ended. Nodes
and the line are read at a scrape, on the scraper's thread; all else happens on the event loop.
"""

from collections import Counter as Tally
from collections.abc import Iterator, Sized
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.answer import Marks
from coordinator.registry import NodeEntry, Registry
from coordinator.timeline import Timeline
from protos.errors import Reason, ServingError
from protos.pd.v1 import generation_pb2

OK = "OK"
# The client left, by itself or because its own deadline had passed.
CANCELLED = "CANCELLED"
# served_as of a request that did not finish.
NOT_SERVED = "none"

_LATENCY_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0),
)
_GAP_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5),
)


class GenerationMetrics:
    """All requests of one coordinator. queue has the number of those that wait as its length."""

    def __init__(self, registry: CollectorRegistry, *, nodes: Registry, queue: Sized) -> None:
        self._registry = registry
        self.in_flight = Gauge(
            "disagg_requests_in_flight",
            "Generate calls that have arrived and not ended.",
            registry=registry,
        )
        self.requests = self._counter(
            "disagg_requests",
            "Generate calls that have ended: OK, CANCELLED or the reason of the error.",
            "outcome",
            "served_as",
        )
        self.prompt_tokens = self._counter(
            "disagg_prompt_tokens", "Prompt tokens of requests that were accepted."
        )
        self.generated_tokens = self._counter(
            "disagg_generated_tokens", "Tokens that were delivered to clients."
        )
        self.cached_tokens = self._counter(
            "disagg_cached_tokens",
            "Tokens that a node had cached, counted when their request has ended: not computed on "
            "the prefill side; not shipped, or not computed, on the decode side.",
            "side",
        )
        self.pairings = self._counter(
            "disagg_pairings", "Pairing decisions of requests that have ended.", "reason"
        )
        self.recoveries = self._counter(
            "disagg_recoveries",
            "Times that a request was paired again, by what had ended its attempt.",
            "reason",
        )
        self.ttft = self._histogram(
            "disagg_ttft_seconds", "From arrival to the first token.", _LATENCY_BUCKETS_S
        )
        self.itl = self._histogram(
            "disagg_itl_seconds",
            "Between two tokens of a choice; 0 for tokens that came together.",
            _GAP_BUCKETS_S,
        )
        self.e2e = self._histogram(
            "disagg_e2e_seconds",
            "From arrival to the last token, of requests that ended OK.",
            _LATENCY_BUCKETS_S,
        )
        self.queue_time = self._histogram(
            "disagg_queue_seconds", "From arrival to the first pairing.", _LATENCY_BUCKETS_S
        )
        self.handoff_gap = self._histogram(
            "disagg_handoff_gap_seconds",
            "From the first to the second token where the KV was moved between them.",
            _LATENCY_BUCKETS_S,
        )
        Gauge(
            "disagg_queue_length", "Requests that wait for a pair of nodes.", registry=registry
        ).set_function(lambda: len(queue))
        registry.register(_NodeCounts(nodes))
        ProcessCollector(registry=registry)

    @contextmanager
    def request(self, marks: Marks) -> Iterator["RequestMeter"]:
        """Counts the request that the block serves, however it ends."""
        meter = RequestMeter(self, marks)
        self.in_flight.inc()
        try:
            yield meter
        except ServingError as error:
            meter.failed(error.reason.name)
            raise
        except Exception:
            meter.failed(Reason.INTERNAL.name)
            raise
        finally:
            self.in_flight.dec()
            meter.ended()

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(name, what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self._registry)


class RequestMeter:
    """One request's part in the metrics."""

    def __init__(self, metrics: GenerationMetrics, marks: Marks) -> None:
        self._metrics = metrics
        self._marks = marks
        self._timeline: Timeline | None = None
        # When a choice's last token came.
        self._last: dict[int, float] = {}
        self._outcome = CANCELLED
        self._served_as = NOT_SERVED

    def accepted(self, *, num_prompt_tokens: int, timeline: Timeline) -> None:
        """The request was found good; the timeline will tell of its pairings."""
        self._timeline = timeline
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def told(self, response: generation_pb2.GenerateResponse) -> None:
        """Before the client is: it may leave as soon as it has the last message."""
        match response.WhichOneof("event"):
            case "delta":
                self._tokens(response.delta.choice, len(response.delta.token_ids))
            case "finished":
                name = generation_pb2.ServedAs.Name(response.finished.served_as)
                self._served_as = name.removeprefix("SERVED_AS_").lower()
                self._outcome = OK

    def failed(self, outcome: str) -> None:
        self._outcome = outcome

    def ended(self) -> None:
        marks, metrics = self._marks, self._metrics
        metrics.requests.labels(self._outcome, self._served_as).inc()
        if marks.paired is not None:
            metrics.queue_time.observe(marks.paired - marks.arrived)
        if marks.sealed and marks.first_token and marks.second_token:
            metrics.handoff_gap.observe(marks.second_token - marks.first_token)
        if self._outcome == OK and marks.last_token is not None:
            metrics.e2e.observe(marks.last_token - marks.arrived)
        if self._timeline is not None:
            self._pairings(self._timeline)

    def _tokens(self, choice: int, num_tokens: int) -> None:
        now = self._marks.last_token
        if now is None or not num_tokens:
            return
        if not self._last:
            self._metrics.ttft.observe(now - self._marks.arrived)
        self._metrics.generated_tokens.inc(num_tokens)
        if choice in self._last:
            self._metrics.itl.observe(now - self._last[choice])
        for _ in range(num_tokens - 1):
            self._metrics.itl.observe(0.0)
        self._last[choice] = now

    def _pairings(self, timeline: Timeline) -> None:
        broken_by: str | None = None
        for event in timeline.events:
            if event.what == "broken":
                broken_by = event.details["reason"]
            elif event.what == "paired":
                self._metrics.pairings.labels(event.details["reason"]).inc()
                if broken_by is not None:
                    self._metrics.recoveries.labels(broken_by).inc()
                broken_by = None
            elif event.what == "cached":
                tokens = int(event.details["tokens"])
                self._metrics.cached_tokens.labels(event.details["side"]).inc(tokens)


class _NodeCounts(Collector):
    """Registered nodes by role and state."""

    def __init__(self, nodes: Registry) -> None:
        self._nodes = nodes

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("disagg_nodes", "Registered nodes.", labels=["role", "state"])
        # list() of the values is one step that the event loop's thread cannot come between.
        tally = Tally((_role(node), _state(node)) for node in list(self._nodes.nodes.values()))
        for labels, count in sorted(tally.items()):
            family.add_metric(labels, count)
        yield family


def _role(node: NodeEntry) -> str:
    return "prefill" if node.is_prefill else "decode"


def _state(node: NodeEntry) -> str:
    if node.is_draining:
        return "draining"
    if not node.is_serving:
        return "starting"
    return "stuck" if node.is_stuck else "serving"
