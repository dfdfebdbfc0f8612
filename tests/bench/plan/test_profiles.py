"""Node models from files and from a cluster that runs."""

import json

import pytest

from bench.plan.profiles import faster, read_cluster, read_profile_file
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model
from engine.emulated_executor import read_profile


async def test_a_running_cluster_tells_its_profiles_and_limits():
    folder = resolve_model("emulated", allow_download=False).folder
    async with Cluster(
        model="emulated",
        num_prefill=0,
        num_decode=1,
        node_options={"max_running": 7, "step_budget_ms": 20, "kv_memory_gb": 0.00064},
    ) as cluster:
        known = await read_cluster(cluster.address)
    assert known.decode.profile == read_profile(folder)
    # There is no prefill node: one would be like the others.
    assert known.prefill == known.decode
    assert (known.decode.max_running, known.decode.step_budget_ms) == (7, 20.0)
    # Four bytes a token, 64 a block of 16.
    assert (known.block_size, known.kv_bytes_per_token) == (16, 4)
    assert known.decode.num_blocks == 10_000


def test_a_file_that_is_no_profile_is_named(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"cost_profile": {"base_ms": 1}}))
    with pytest.raises(ValueError, match=r"p\.json is no cost profile"):
        read_profile_file(path)


def test_twice_as_fast_takes_half_of_every_step(tmp_path):
    profile = read_profile(resolve_model("emulated", allow_download=False).folder)
    twice = faster(profile, 2.0)
    assert twice.base_ms == profile.base_ms / 2
    assert twice.prefill_context_ms == profile.prefill_context_ms / 2
