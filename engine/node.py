"""A node: what both roles are made of. engine/node_program.py brings it up and down.

    Node: pool, memory, admission, membership, and once the weights are loaded the engine

A role (prefill_server, decode_server) adds its services to a node. Everything here runs on the
event loop, but for the loading of the model.
"""

import asyncio
import itertools
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import CollectorRegistry

from engine.admission import Admission
from engine.backlog import Backlog
from engine.calibration import calibrate
from engine.cost_wire import cost_profile_to_pb
from engine.emulated_executor import EmulatedExecutor
from engine.executor import Executor
from engine.incoming import read_sequence
from engine.knobs import NodeConfig
from engine.loop import Engine, EngineStatus
from engine.membership import Membership
from engine.node_metrics import NodeMetrics
from engine.process import StartError
from engine.reuse import Reuse, reuse_of
from engine.run import Preempted, StepFailed
from engine.scheduler import Scheduler
from engine.sequence import GenerationSpec
from engine.served_model import ServedModel, pool_blocks
from kvtransfer.blocks import BlockPool
from kvtransfer.host_pages import HostPages
from kvtransfer.lane_metrics import LaneMetrics
from kvtransfer.memory import HostMemory
from kvtransfer.messages import NodeKey
from kvtransfer.wire import layout_to_pb, node_to_pb
from protos.errors import Reason, ServingError
from protos.pd.v1 import cluster_pb2, types_pb2
from protos.serving import PROTOCOL_VERSION

log = logging.getLogger(__name__)

T = TypeVar("T")


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
        if config.plane not in ("auto", *model.planes):
            raise ValueError(f"--plane: {config.plane} is not one of {', '.join(model.planes)}")
        self.planes = model.planes if config.plane == "auto" else (config.plane,)
        placed = model.place(num_blocks)
        self.config = config
        self.role = role
        self.model = model
        self.max_model_len = min(max_model_len, num_blocks * model.layout.block_size - 1)
        self.key = NodeKey(node_id=config.node_id, incarnation=secrets.randbits(63) | 1)
        self.pool = BlockPool(num_blocks, on_free=self._blocks_came_free)
        self.memory = placed.memory
        self._pages = HostPages(placed.memory) if isinstance(placed.memory, HostMemory) else None
        self._load_executor = placed.load
        self.admission = Admission(
            self.pool, max_running=config.max_running, on_change=self._status_changed
        )
        self.backlog = Backlog(on_change=self._status_changed)
        self.state = cluster_pb2.NODE_STATE_STARTING
        self.registry = CollectorRegistry()
        self.lane_metrics = LaneMetrics(self.registry)
        NodeMetrics(
            self.registry,
            node_id=config.node_id,
            role=role,
            model=model.name,
            state=lambda: self.state,
            pool=self.pool,
            block_size=model.layout.block_size,
            admission=self.admission,
            engine=self._engine_status,
        )
        self.membership: Membership | None = None
        # The engine cannot go on; the process must end.
        self.crashed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._serving: _Serving | None = None
        self._loaded_percent = 0
        self._status_seq = itertools.count(1)

    @property
    def engine(self) -> Engine:
        """Raises ServingError (NOT_READY) until the node serves and while it drains."""
        if self._serving is None or self.state != cluster_pb2.NODE_STATE_SERVING:
            raise ServingError(Reason.NOT_READY, f"{self.key} is not serving", node=self.key)
        return self._serving.engine

    @property
    def vocab_size(self) -> int:
        """Raises ServingError (NOT_READY) until the model is loaded."""
        if self._serving is None:
            raise ServingError(Reason.NOT_READY, f"{self.key} is not serving", node=self.key)
        return self._serving.executor.vocab_size

    def read(self, sequence: types_pb2.Sequence) -> GenerationSpec:
        """The spec of a request, checked against this node. Raises ServingError."""
        return read_sequence(
            sequence,
            model=self.model.name,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )

    def reuse(self, spec: GenerationSpec) -> Reuse:
        """What spec may find in the prefix cache, and how its blocks get there."""
        is_on = self.config.prefix_cache == "on"
        return reuse_of(spec, self.model.layout, is_on=is_on)

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
            queued_tokens=self.backlog.num_tokens,
            loaded_percent=self._loaded_percent,
        )
        engine = self._engine_status()
        if engine is not None:
            status.step = engine.num_steps
            status.num_decoding = engine.num_decoding
            status.decode_context = engine.decode_context
            status.cost_profile.CopyFrom(cost_profile_to_pb(engine.profile))
            if engine.step_age_s is not None:
                status.step_age.FromNanoseconds(int(engine.step_age_s * 1e9))
                status.step_predicted.FromNanoseconds(int(engine.step_predicted_s * 1e9))
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
            step_budget_ms=self.config.step_budget_ms,
        )

    async def load(self) -> None:
        """Loads and warms up in a thread, then serves. Raises StartError."""
        started = time.monotonic()
        try:
            if self._pages is not None:
                self._pages.start()
            executor, scheduler = await _in_daemon_thread(self._load)
        except ValueError as error:
            raise StartError(str(error)) from error
        engine = Engine(
            executor=executor,
            scheduler=scheduler,
            pool=self.pool,
            memory=self.memory,
            on_crash=self.crashed.set,
        )
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
        executor = self._load_executor(self._loaded, self.max_model_len)
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

    def _loaded(self, done: int, in_all: int) -> None:
        # On the loading thread; the next heartbeat tells of it.
        self._loaded_percent = 100 * done // max(1, in_all)

    def _engine_status(self) -> EngineStatus | None:
        serving = self._serving
        return None if serving is None else serving.engine.status()

    def _status_changed(self) -> None:
        if self._pages is not None:
            self._pages.reached(self.pool.num_reached)
        if self.membership is not None:
            self.membership.status_changed()

    def _blocks_came_free(self) -> None:
        # The pool calls from the thread that let go last.
        self._loop.call_soon_threadsafe(self.admission.blocks_came_free)
        if self._serving is not None:
            self._serving.engine.blocks_came_free()


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but the end of the process does not wait for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def deliver(deliver_it: Callable[[], None]) -> None:
        if not done.done():
            deliver_it()

    def run() -> None:
        try:
            result = function()
        except Exception as error:
            failure = error
            loop.call_soon_threadsafe(deliver, lambda: done.set_exception(failure))
        else:
            loop.call_soon_threadsafe(deliver, lambda: done.set_result(result))

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done


@contextmanager
def run_errors() -> Iterator[None]:
    """Turns a failed step into the error that a caller gets."""
    try:
        yield
    except StepFailed as error:
        raise ServingError(Reason.STEP_FAILED, f"a step failed: {error}") from error
    except Preempted as error:
        raise ServingError(Reason.PREEMPTED, str(error)) from error


@asynccontextmanager
async def request_log(spec: GenerationSpec) -> AsyncIterator[None]:
    """One line when the request has left this node, whatever ended it."""
    started, outcome = time.monotonic(), "ok"
    try:
        yield
    except BaseException as error:
        outcome = f"{type(error).__name__} {error}".strip()
        raise
    finally:
        log.info(
            "request left request=%r prompt_tokens=%d outcome=%r seconds=%.3f",
            spec.request_id,
            spec.num_prompt_tokens,
            outcome,
            time.monotonic() - started,
            extra={"request": spec.request_id},
        )
