"""A node: what both roles are made of, and the order in which it comes up and goes down.

    find model -> pool, memory -> listen (NOT_SERVING) -> register (STARTING)
      -> load weights, calibrate -> engine, SERVING -> stop: DRAINING, calls end, engine ends

A role adds its servicers (serve_node's make_role) and gets this node, to which it belongs.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from engine.admission import Admission
from engine.calibration import calibrate
from engine.emulated_executor import EmulatedExecutor
from engine.executor import Executor
from engine.incoming import read_sequence
from engine.knobs import NodeConfig
from engine.loop import Engine, StepFailed
from engine.membership import Membership
from engine.process import StartError, announce
from engine.scheduler import Scheduler
from engine.sequence import GenerationSpec
from engine.served_model import ServedModel, find_model, pool_blocks
from kvtransfer.blocks import BlockPool
from kvtransfer.memory import HostMemory
from kvtransfer.messages import NodeKey
from kvtransfer.wire import layout_to_pb, node_to_pb
from protos.errors import Reason, ServingError
from protos.pd.v1 import cluster_pb2, types_pb2
from protos.serving import PROTOCOL_VERSION, GrpcServer

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0


class Role(Protocol):
    """What prefill and decode differ in."""

    def members_changed(self, members: set[NodeKey]) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Serving:
    """What there is once the weights are loaded."""

    engine: Engine
    executor: Executor


class Node:
    """One node of a role. Everything here runs on the event loop."""

    def __init__(self, *, config: NodeConfig, role: cluster_pb2.NodeRole, model: ServedModel):
        max_model_len = min(config.max_model_len or model.max_model_len, model.max_model_len)
        num_blocks = pool_blocks(
            model,
            kv_memory_gb=config.kv_memory_gb,
            max_model_len=max_model_len,
            max_running=config.max_running,
        )
        self.config = config
        self.role = role
        self.model = model
        self.max_model_len = min(max_model_len, num_blocks * model.layout.block_size - 1)
        self.key = NodeKey(node_id=config.node_id, incarnation=secrets.randbits(63) | 1)
        self.pool = BlockPool(num_blocks, on_free=self._blocks_came_free)
        self.memory = HostMemory(model.layout, num_blocks)
        self.admission = Admission(
            self.pool, max_running=config.max_running, on_change=self._status_changed
        )
        self.state = cluster_pb2.NODE_STATE_STARTING
        self.membership: Membership | None = None
        self._loop = asyncio.get_running_loop()
        self._serving: _Serving | None = None
        self._status_seq = itertools.count(1)

    @property
    def engine(self) -> Engine:
        """Raises ServingError (NOT_READY) until the node serves and while it drains."""
        if self._serving is None or self.state != cluster_pb2.NODE_STATE_SERVING:
            raise ServingError(Reason.NOT_READY, f"{self.key} is not serving", node=self.key)
        return self._serving.engine

    def read(self, sequence: types_pb2.Sequence) -> GenerationSpec:
        """The spec of a request, checked against this node. Raises ServingError."""
        if self._serving is None:
            raise ServingError(Reason.NOT_READY, f"{self.key} is not serving", node=self.key)
        return read_sequence(
            sequence,
            model=self.model.name,
            vocab_size=self._serving.executor.vocab_size,
            max_model_len=self.max_model_len,
        )

    async def address_of(self, key: NodeKey, *, role: cluster_pb2.NodeRole) -> str | None:
        """Address of a registered node, after a short wait for it; None if it is not one."""
        assert self.membership is not None
        member = await self.membership.find(key, role=role)
        return None if member is None else member.address

    def status(self) -> cluster_pb2.NodeStatus:
        """A new status; its seq orders it against all earlier ones."""
        status = cluster_pb2.NodeStatus(
            seq=next(self._status_seq),
            state=self.state,
            available_blocks=self.pool.counts().available,
            num_running=self.admission.num_running,
            num_queued=self.admission.num_queued,
        )
        if self._serving is not None:
            engine = self._serving.engine.status()
            status.queued_tokens = engine.num_queued_tokens
            status.step = engine.num_steps
            if engine.step_age_s is not None:
                status.step_age.FromNanoseconds(int(engine.step_age_s * 1e9))
        return status

    def registration(self, address: str) -> cluster_pb2.Registration:
        return cluster_pb2.Registration(
            protocol_version=PROTOCOL_VERSION,
            node=node_to_pb(self.key),
            role=self.role,
            address=address,
            layout=layout_to_pb(self.model.layout),
            num_blocks=self.pool.num_blocks,
            max_model_len=self.max_model_len,
            max_running=self.config.max_running,
        )

    async def load(self) -> None:
        """Loads and warms up in a thread, then serves. Raises StartError."""
        started = time.monotonic()
        try:
            executor, scheduler = await asyncio.to_thread(self._load)
        except ValueError as error:
            raise StartError(str(error)) from error
        engine = Engine(executor=executor, scheduler=scheduler, pool=self.pool)
        engine.start()
        self._serving = _Serving(engine, executor)
        self.state = cluster_pb2.NODE_STATE_SERVING
        self._status_changed()
        log.info(
            "serving model=%s layout=%s blocks=%d tokens=%d seconds=%.1f",
            self.model.name,
            self.model.layout.fingerprint,
            self.pool.num_blocks,
            self.pool.num_blocks * self.model.layout.block_size,
            time.monotonic() - started,
        )

    def drain(self) -> None:
        """Nothing new from here on."""
        self.state = cluster_pb2.NODE_STATE_DRAINING
        self._status_changed()

    async def stop(self) -> None:
        if self._serving is not None:
            await self._serving.engine.stop()

    def _load(self) -> tuple[Executor, Scheduler]:
        executor = self.model.load(self.memory, _log_progress(self.config.node_id))
        if isinstance(executor, EmulatedExecutor):
            profile = executor.profile
        else:
            profile = calibrate(executor, self.pool, max_model_len=self.max_model_len)
        log.info("cost profile %s", profile)
        return executor, Scheduler(
            profile=profile,
            step_budget_ms=self.config.step_budget_ms,
            block_size=self.model.layout.block_size,
            eos_token_ids=executor.eos_token_ids,
        )

    def _status_changed(self) -> None:
        if self.membership is not None:
            self.membership.status_changed()

    def _blocks_came_free(self) -> None:
        # The pool calls from the thread that let go last.
        self._loop.call_soon_threadsafe(self.admission.blocks_came_free)


async def serve_node(
    config: NodeConfig,
    stop: asyncio.Event,
    *,
    role: cluster_pb2.NodeRole,
    role_name: str,
    make_role: Callable[[Node, GrpcServer], Role],
) -> None:
    """Runs a node until stop is set. Raises StartError."""
    # Before torch is imported: two processes with two OpenMP threads each on two cores collapse.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    try:
        model = find_model(config.model, dtype=config.dtype, block_size=config.block_size)
        node = Node(config=config, role=role, model=model)
    except ValueError as error:
        raise StartError(str(error)) from error
    server = GrpcServer()
    parts = make_role(node, server)
    try:
        address = await server.start(config.listen)
    except OSError as error:
        raise StartError(str(error)) from error
    node.membership = Membership(
        registration=node.registration(config.advertise or address),
        status=node.status,
        on_change=parts.members_changed,
    )
    announce(role=role_name, node_id=config.node_id, address=address)
    registered = asyncio.create_task(node.membership.run(config.coordinators))
    try:
        await _load_or_stop(node, server, stop)
        await stop.wait()
        node.drain()
    finally:
        await server.set_serving(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await node.admission.wait_idle()
        await parts.close()
        await server.stop(grace_s=0)
        registered.cancel()
        await asyncio.gather(registered, return_exceptions=True)
        await node.stop()


async def _load_or_stop(node: Node, server: GrpcServer, stop: asyncio.Event) -> None:
    """A stop while weights load does not wait for them."""
    loading = asyncio.create_task(node.load())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if loading.done():
        loading.result()
        await server.set_serving(True)


def _log_progress(node_id: str) -> Callable[[int, int], None]:
    """Logs every quarter of the weights."""
    last = -1

    def progress(done: int, in_all: int) -> None:
        nonlocal last
        quarter = 4 * done // max(1, in_all)
        if quarter > last:
            last = quarter
            log.info("loading node=%s done=%d%%", node_id, 25 * quarter)

    return progress


@contextmanager
def run_errors() -> Iterator[None]:
    """Turns a failed step into the error that a caller gets."""
    try:
        yield
    except StepFailed as error:
        raise ServingError(Reason.STEP_FAILED, f"a step failed: {error}") from error
