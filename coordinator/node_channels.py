"""Channels to registered nodes: one per node and life, closed when it is gone."""

import asyncio

import grpc.aio

from coordinator.registry import NodeEntry
from kvtransfer.messages import NodeKey
from protos.pd.v1 import decode_pb2_grpc, prefill_pb2_grpc
from protos.serving import dial


class NodeChannels:
    """Owner of the channels; nodes are dialled at the address that they registered."""

    def __init__(self) -> None:
        self._channels: dict[NodeKey, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def prefill(self, node: NodeEntry) -> prefill_pb2_grpc.PrefillServiceStub:
        return prefill_pb2_grpc.PrefillServiceStub(self._channel(node))

    def decode(self, node: NodeEntry) -> decode_pb2_grpc.DecodeServiceStub:
        return decode_pb2_grpc.DecodeServiceStub(self._channel(node))

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await asyncio.gather(*self._closing)

    def _channel(self, node: NodeEntry) -> grpc.aio.Channel:
        channel = self._channels.get(node.key)
        if channel is None:
            channel = self._channels[node.key] = dial(node.address, purpose="requests")
            node.on_lost.add(lambda: self._drop(node.key))
        return channel

    def _drop(self, key: NodeKey) -> None:
        channel = self._channels.pop(key, None)
        if channel is not None:
            task = asyncio.ensure_future(channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
