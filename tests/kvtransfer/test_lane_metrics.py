"""Lanes count by themselves, scraped or not, and free text never becomes a label."""

import pytest
from prometheus_client import CollectorRegistry

from kvtransfer.lane_metrics import LaneMetrics
from tests.scrape import samples


def test_chunks_count_their_bytes_and_their_time_by_direction_and_plane():
    registry = CollectorRegistry()
    metrics = LaneMetrics(registry)
    metrics.chunk_sent(plane="grpc", size_bytes=1000, seconds=0.25)
    metrics.chunk_sent(plane="grpc", size_bytes=24, seconds=0.5)
    metrics.chunk_received(plane="gloo", size_bytes=7, seconds=0.125)
    metrics.stale_chunk()
    metrics.bad_chunk()
    metrics.bad_chunk()
    metrics.exposed(0.002)
    got = samples(registry)
    assert got[("disagg_lane_bytes_total", "sent", "grpc")] == 1024
    assert got[("disagg_lane_chunk_seconds_count", "sent", "grpc")] == 2
    assert got[("disagg_lane_chunk_seconds_sum", "sent", "grpc")] == 0.75
    assert got[("disagg_lane_bytes_total", "received", "gloo")] == 7
    assert got[("disagg_lane_stale_chunks_total",)] == 1
    assert got[("disagg_lane_bad_chunks_total",)] == 2
    # 2 ms are above the bucket of 1 ms and within that of 2.5 ms.
    assert got[("disagg_transfer_exposed_seconds_bucket", "0.001")] == 0
    assert got[("disagg_transfer_exposed_seconds_bucket", "0.0025")] == 1


def test_open_lanes_are_those_opened_less_those_ended():
    registry = CollectorRegistry()
    metrics = LaneMetrics(registry)
    metrics.lane_opened(plane="grpc", epoch=1)
    metrics.lane_opened(plane="grpc", epoch=2)
    metrics.lane_ended(reason="replaced by a new lane")
    got = samples(registry)
    assert got[("disagg_lanes_open",)] == 1
    assert got[("disagg_lane_epoch",)] == 2
    assert got[("disagg_lanes_opened_total", "grpc")] == 2
    assert got[("disagg_lanes_ended_total", "replaced")] == 1


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        (None, "sealed"),
        ("chunk digest differs", "damaged"),
        ("local prefill", "local_prefill"),
        ("prefill call ended", "call_ended"),
        ("decode call ended", "call_ended"),
        ("commit with missing chunks", "protocol"),
        ("node stops", "lane_closed"),
        ("lane lost: Socket closed", "lane_lost"),
        ("a granted chunk did not arrive in time", "lane_lost"),
        ("whatever a peer likes to send", "other"),
        ("", "other"),
    ],
)
def test_a_transfer_ends_under_one_of_a_few_labels(reason, label):
    registry = CollectorRegistry()
    LaneMetrics(registry).transfer_ended(reason=reason)
    assert _counted(registry, "disagg_transfers_ended_total") == {label}


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("lane closed", "closed"),
        ("prefill-0#1 is no member any more", "not_a_member"),
        ("lane lost: a chunk was not acknowledged in time", "timeout"),
        ("grpc: not connected in time", "timeout"),
        ("lane lost: the data plane ended: Socket closed", "plane"),
        ("bytes of seq 3 at 5 were not expected", "plane"),
        ("the sender ended the stream", "peer_gone"),
        ("READY seq 3, expected 4", "protocol"),
        ("whatever a peer likes to send", "other"),
    ],
)
def test_a_lane_ends_under_one_of_a_few_labels(reason, label):
    registry = CollectorRegistry()
    metrics = LaneMetrics(registry)
    metrics.lane_opened(plane="grpc", epoch=1)
    metrics.lane_ended(reason=reason)
    assert _counted(registry, "disagg_lanes_ended_total") == {label}


def test_reasons_are_there_from_zero():
    registry = CollectorRegistry()
    LaneMetrics(registry)
    assert samples(registry)[("disagg_transfers_ended_total", "damaged")] == 0
    assert samples(registry)[("disagg_lanes_ended_total", "timeout")] == 0


def _counted(registry: CollectorRegistry, name: str) -> set[str]:
    return {key[1] for key, value in samples(registry).items() if key[0] == name and value == 1}
