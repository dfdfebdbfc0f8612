"""ClusterService: nodes come, report and go; everybody learns who is there.

A stream that ends takes its node out at once; one that is silent for SILENCE_S does too, and that
is how a frozen node is noticed. Runs on the event loop.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

from coordinator.registry import NO_PROFILE, NodeEntry, NodeLoad, Registry
from engine.cost_wire import cost_profile_from_pb, cost_profile_to_pb
from kvtransfer.messages import NodeKey
from kvtransfer.wire import layout_from_pb, layout_to_pb, node_from_pb, node_to_pb
from protos.errors import Reason, ServingError, invalid
from protos.pd.v1 import cluster_pb2, cluster_pb2_grpc
from protos.serving import PROTOCOL_VERSION, Context, next_message

log = logging.getLogger(__name__)

SILENCE_S = 3.0


class ClusterServicer(cluster_pb2_grpc.ClusterServiceServicer):
    """Feeds the registry. model is the only one that this coordinator can tokenize for."""

    def __init__(self, registry: Registry, *, model: str) -> None:
        self._registry = registry
        self._model = model
        # Nodes that were told to clear their cache and have not answered.
        self._clearing: dict[NodeKey, asyncio.Event] = {}

    async def Register(
        self, requests: AsyncIterator[cluster_pb2.RegisterRequest], context: Context
    ) -> AsyncIterator[cluster_pb2.RegisterResponse]:
        first = await next_message(requests, timeout_s=SILENCE_S)
        entry = self._admit(first.registration)
        self._registry.register(entry)
        log.info("node registered node=%s address=%s", entry.key, entry.address)
        listening = asyncio.create_task(self._listen(entry, requests))
        change = asyncio.Event()
        self._registry.listen(change.set)
        listening.add_done_callback(lambda _: change.set())
        told, told_drain = None, False
        try:
            while not listening.done() and not entry.is_lost:
                # Before looking: what changes while a message goes out must wake the wait below.
                change.clear()
                if told != self._registry.version:
                    told = self._registry.version
                    yield cluster_pb2.RegisterResponse(membership=self._membership())
                if entry.drain_asked and not told_drain:
                    told_drain = True
                    yield cluster_pb2.RegisterResponse(drain=cluster_pb2.Drain())
                if entry.must_clear_cache:
                    entry.must_clear_cache = False
                    yield cluster_pb2.RegisterResponse(clear_cache=cluster_pb2.ClearCache())
                if entry.must_resync_cache:
                    entry.must_resync_cache = False
                    yield cluster_pb2.RegisterResponse(resync_cache=cluster_pb2.ResyncCache())
                await change.wait()
            if not listening.done():
                raise ServingError(
                    Reason.UNKNOWN_NODE, f"{entry.key.node_id} was registered again", node=entry.key
                )
            listening.result()
        finally:
            self._registry.unlisten(change.set)
            listening.cancel()
            self._registry.remove(entry)
            log.info("node gone node=%s", entry.key)

    async def ListNodes(
        self, request: cluster_pb2.ListNodesRequest, context: Context
    ) -> cluster_pb2.ListNodesResponse:
        nodes = sorted(self._registry.nodes.values(), key=lambda node: node.key.node_id)
        return cluster_pb2.ListNodesResponse(nodes=[_info(node) for node in nodes])

    async def DrainNode(
        self, request: cluster_pb2.DrainNodeRequest, context: Context
    ) -> cluster_pb2.DrainNodeResponse:
        entry = self._known(request.node_id)
        log.info("drain asked node=%s", entry.key)
        entry.drain_asked = True
        # Gets nothing new from now on, whenever the node hears of it.
        entry.is_serving = False
        entry.is_draining = True
        self._registry.changed()
        return cluster_pb2.DrainNodeResponse()

    async def ClearCache(
        self, request: cluster_pb2.ClearCacheRequest, context: Context
    ) -> cluster_pb2.ClearCacheResponse:
        entry = self._known(request.node_id)
        log.info("cache clear asked node=%s", entry.key)
        entry.must_clear_cache = True
        cleared = self._clearing.setdefault(entry.key, asyncio.Event())
        self._registry.changed()
        try:
            async with asyncio.timeout(SILENCE_S):
                await cleared.wait()
        except TimeoutError:
            raise ServingError(
                Reason.NODE_LOST, f"{entry.key} did not answer", node=entry.key
            ) from None
        finally:
            self._clearing.pop(entry.key, None)
        return cluster_pb2.ClearCacheResponse()

    def _known(self, node_id: str) -> NodeEntry:
        """Raises ServingError (UNKNOWN_NODE)."""
        entry = self._registry.nodes.get(node_id)
        if entry is None:
            raise ServingError(
                Reason.UNKNOWN_NODE,
                f"node_id: no node {node_id[:128]!r} is registered",
                field="node_id",
            )
        return entry

    def _admit(self, registration: cluster_pb2.Registration) -> NodeEntry:
        """The node's entry. Raises ServingError for a node that could never be paired."""
        if registration.protocol_version != PROTOCOL_VERSION:
            raise ServingError(
                Reason.PROTOCOL_MISMATCH,
                f"protocol version {registration.protocol_version}, "
                f"this coordinator speaks {PROTOCOL_VERSION}",
            )
        try:
            layout = layout_from_pb(registration.layout)
        except ValueError as error:
            raise invalid("registration.layout", str(error)) from error
        if layout.model != self._model:
            raise ServingError(
                Reason.LAYOUT_MISMATCH,
                f"model: {layout.model!r}, this coordinator serves {self._model!r}",
                field="model",
            )
        if registration.role not in (cluster_pb2.NODE_ROLE_PREFILL, cluster_pb2.NODE_ROLE_DECODE):
            raise invalid("registration.role", f"{registration.role} is neither prefill nor decode")
        if not registration.node.node_id or not registration.address:
            raise invalid("registration", "node_id and address must be set")
        return NodeEntry(
            key=node_from_pb(registration.node),
            is_prefill=registration.role == cluster_pb2.NODE_ROLE_PREFILL,
            address=registration.address,
            layout=layout,
            num_blocks=registration.num_blocks,
            max_model_len=registration.max_model_len,
            max_running=registration.max_running,
            step_budget_ms=registration.step_budget_ms or 50.0,
        )

    async def _listen(
        self, entry: NodeEntry, requests: AsyncIterator[cluster_pb2.RegisterRequest]
    ) -> None:
        """Takes in what the node tells until the stream ends. Raises ServingError after a
        silence."""
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    request = await anext(requests, None)
                if request is None:
                    return
                if request.WhichOneof("event") == "cache":
                    self._cache_changed(entry, request.cache)
                elif _update(entry, request.status):
                    self._registry.changed()
                if entry.is_stuck:
                    raise ServingError(
                        Reason.NODE_LOST,
                        f"stuck: a step predicted to take {entry.step_predicted_s:.3f} s has taken "
                        f"{entry.step_age_s:.1f} s",
                        node=entry.key,
                    )
        except TimeoutError:
            log.warning("node silent node=%s seconds=%g", entry.key, SILENCE_S)
            raise ServingError(
                Reason.NODE_LOST, f"no status for {SILENCE_S:g} s", node=entry.key
            ) from None

    def _cache_changed(self, entry: NodeEntry, events: cluster_pb2.CacheEvents) -> None:
        # Pairing is not woken: a status follows, and nobody waits for a cache.
        is_whole = entry.index.take_in(
            seq=events.seq,
            added=events.added,
            evicted=events.evicted,
            is_snapshot=events.is_snapshot,
        )
        if events.is_snapshot and entry.key in self._clearing:
            self._clearing[entry.key].set()
        if not is_whole:
            log.warning("cache events missed node=%s seq=%d", entry.key, events.seq)
            entry.must_resync_cache = True
            self._registry.changed()

    def _membership(self) -> cluster_pb2.Membership:
        return cluster_pb2.Membership(
            version=self._registry.version,
            members=[
                cluster_pb2.Member(
                    node=node_to_pb(node.key),
                    role=_role(node),
                    address=node.address,
                    layout=layout_to_pb(node.layout),
                )
                for node in self._registry.nodes.values()
            ],
        )


def _update(entry: NodeEntry, status: cluster_pb2.NodeStatus) -> bool:
    """Takes in a status unless a later one is known. True if pairing could decide otherwise."""
    if status.seq <= entry.status_seq:
        return False
    before = entry.pairing_view
    entry.is_serving = status.state == cluster_pb2.NODE_STATE_SERVING and not entry.drain_asked
    entry.is_draining = status.state == cluster_pb2.NODE_STATE_DRAINING or entry.drain_asked
    entry.take_in(
        NodeLoad(
            seq=status.seq,
            available_blocks=status.available_blocks,
            num_running=status.num_running,
            num_queued=status.num_queued,
            queued_tokens=status.queued_tokens,
            num_decoding=status.num_decoding,
            decode_context=status.decode_context,
        )
    )
    entry.num_steps = status.step
    entry.step_predicted_s = status.step_predicted.ToNanoseconds() / 1e9
    if status.HasField("cost_profile"):
        entry.profile = cost_profile_from_pb(status.cost_profile)
    entry.loaded_percent = status.loaded_percent
    has_step = status.HasField("step_age")
    entry.step_age_s = status.step_age.ToNanoseconds() / 1e9 if has_step else None
    return before != entry.pairing_view


def _role(node: NodeEntry) -> cluster_pb2.NodeRole:
    return cluster_pb2.NODE_ROLE_PREFILL if node.is_prefill else cluster_pb2.NODE_ROLE_DECODE


def _info(node: NodeEntry) -> cluster_pb2.NodeInfo:
    state = cluster_pb2.NODE_STATE_STARTING
    if node.is_serving:
        state = cluster_pb2.NODE_STATE_SERVING
    if node.is_draining:
        state = cluster_pb2.NODE_STATE_DRAINING
    status = cluster_pb2.NodeStatus(
        seq=node.status_seq,
        state=state,
        available_blocks=node.available_blocks,
        num_running=node.num_running,
        num_queued=node.num_queued,
        queued_tokens=node.queued_tokens,
        step=node.num_steps,
        loaded_percent=node.loaded_percent,
        num_decoding=node.num_decoding,
        decode_context=node.decode_context,
    )
    if node.profile is not NO_PROFILE:
        status.cost_profile.CopyFrom(cost_profile_to_pb(node.profile))
    if node.step_age_s is not None:
        status.step_age.FromNanoseconds(int(node.step_age_s * 1e9))
        status.step_predicted.FromNanoseconds(int(node.step_predicted_s * 1e9))
    registration = cluster_pb2.Registration(
        protocol_version=PROTOCOL_VERSION,
        node=node_to_pb(node.key),
        role=_role(node),
        address=node.address,
        layout=layout_to_pb(node.layout),
        num_blocks=node.num_blocks,
        max_model_len=node.max_model_len,
        max_running=node.max_running,
        step_budget_ms=node.step_budget_ms,
    )
    return cluster_pb2.NodeInfo(registration=registration, status=status)
