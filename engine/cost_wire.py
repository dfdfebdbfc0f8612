"""Between a cost profile and its proto."""

from dataclasses import asdict

from engine.cost_model import CostProfile
from protos.pd.v1 import cluster_pb2


def cost_profile_to_pb(profile: CostProfile) -> cluster_pb2.CostProfile:
    return cluster_pb2.CostProfile(**asdict(profile))


def cost_profile_from_pb(profile: cluster_pb2.CostProfile) -> CostProfile:
    return CostProfile(
        base_ms=profile.base_ms,
        decode_row_ms=profile.decode_row_ms,
        prefill_token_ms=profile.prefill_token_ms,
        decode_context_ms=profile.decode_context_ms,
        prefill_context_ms=profile.prefill_context_ms,
    )
