"""What the lanes of a node count: chunks and their bytes, lanes, transfers, and why they ended.

    sender:    chunk_sent, exposed            receiver: chunk_received, stale_chunk, bad_chunk
    both:      lane_opened, lane_ended, transfer_ended

Reasons are free text, some of it a peer's; as labels they are a bounded set. Callable from any
thread.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A chunk is at most a few MiB: from loopback to a slow or busy network.
_CHUNK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_EXPOSED_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_OTHER = "other"
# Label and what a reason with it has in it; the first that fits counts.
_TRANSFER_REASONS = (
    ("damaged", ("digest differs",)),
    ("local_prefill", ("local prefill",)),
    ("call_ended", ("call ended",)),
    ("protocol", ("unknown transfer", "past the transfer's end", "twice", "missing chunks")),
    ("lane_closed", ("lane closed", "node stops", "replaced by a new lane", "no member")),
    (
        "lane_lost",
        ("lane lost", "lane to", "in time", "the data plane", "the sender", "gloo", "seq"),
    ),
)
_LANE_REASONS = (
    ("replaced", ("replaced by a new lane",)),
    ("closed", ("lane closed", "node stops")),
    ("not_a_member", ("no member",)),
    ("timeout", ("in time",)),
    ("plane", ("data plane", "gloo", "not connected", "process group", "not expected", "overruns")),
    ("peer_gone", ("ended the stream", "not heard any more", "Socket closed", "keepalive")),
    ("protocol", ("seq", "no place", "rendezvous", "bytes for", "NACK")),
)


class LaneMetrics:
    """All lanes of one node. plane is the data plane's name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._chunk_seconds = Histogram(
            "disagg_lane_chunk_seconds",
            "Of each chunk: sent is from READY to ACK, received from GRANT to copied.",
            ["direction", "plane"],
            buckets=_CHUNK_BUCKETS_S,
            registry=registry,
        )
        self._bytes = Counter(
            "disagg_lane_bytes",
            "KV bytes of the chunks that were sent or received.",
            ["direction", "plane"],
            registry=registry,
        )
        self._stale_chunks = Counter(
            "disagg_lane_stale_chunks",
            "Chunks that arrived after their transfer had ended; dropped.",
            registry=registry,
        )
        self._bad_chunks = Counter(
            "disagg_lane_bad_chunks",
            "Chunks whose bytes did not have the digest that was announced; refused.",
            registry=registry,
        )
        self._opened = Counter("disagg_lanes_opened", "Lanes opened.", ["plane"], registry=registry)
        self._ended = Counter("disagg_lanes_ended", "Lanes ended.", ["reason"], registry=registry)
        self._open = Gauge("disagg_lanes_open", "Lanes that are open.", registry=registry)
        self._epoch = Gauge(
            "disagg_lane_epoch", "Epoch of the lane that was opened last.", registry=registry
        )
        self._transfers = Counter(
            "disagg_transfers_ended",
            "Transfers of one request's KV that have ended; reason is sealed for a complete one.",
            ["reason"],
            registry=registry,
        )
        self._exposed = Histogram(
            "disagg_transfer_exposed_seconds",
            "From the last chunk's compute to sealed: what computing did not hide.",
            buckets=_EXPOSED_BUCKETS_S,
            registry=registry,
        )
        # From zero, so that the first of a kind is seen as a rise.
        for label in ("sealed", _OTHER, *dict(_TRANSFER_REASONS)):
            self._transfers.labels(label)
        for label in (_OTHER, *dict(_LANE_REASONS)):
            self._ended.labels(label)

    def chunk_sent(self, *, plane: str, size_bytes: int, seconds: float) -> None:
        """Acknowledged; seconds are since its READY."""
        self._chunk("sent", plane, size_bytes, seconds)

    def chunk_received(self, *, plane: str, size_bytes: int, seconds: float) -> None:
        """In its blocks; seconds are since its GRANT."""
        self._chunk("received", plane, size_bytes, seconds)

    def stale_chunk(self) -> None:
        self._stale_chunks.inc()

    def bad_chunk(self) -> None:
        self._bad_chunks.inc()

    def lane_opened(self, *, plane: str, epoch: int) -> None:
        self._opened.labels(plane).inc()
        self._open.inc()
        self._epoch.set(epoch)

    def lane_ended(self, *, reason: str) -> None:
        """Once for each lane that was opened."""
        self._ended.labels(_label(reason, _LANE_REASONS)).inc()
        self._open.dec()

    def transfer_ended(self, *, reason: str | None) -> None:
        """reason is None for a transfer that is sealed."""
        label = "sealed" if reason is None else _label(reason, _TRANSFER_REASONS)
        self._transfers.labels(label).inc()

    def exposed(self, seconds: float) -> None:
        """Seconds from the last chunk's compute to sealed."""
        self._exposed.observe(seconds)

    def _chunk(self, direction: str, plane: str, size_bytes: int, seconds: float) -> None:
        self._chunk_seconds.labels(direction, plane).observe(seconds)
        self._bytes.labels(direction, plane).inc(size_bytes)


def _label(reason: str, labels: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    for label, parts in labels:
        if any(part in reason for part in parts):
            return label
    return _OTHER
