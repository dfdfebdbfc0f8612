"""Both clients against a server that speaks the contract."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from fake_coordinator import FakeCoordinator, serve_fake

from coordinator.client import AsyncClient, Client
from coordinator.events import (
    ChoiceFinish,
    Delta,
    Finished,
    GenerationError,
    PromptLogprobs,
    TimelineEvent,
    Timing,
    TokenLogprobs,
)
from coordinator.model_info import ModelInfo, RequestLimits


@pytest_asyncio.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with serve_fake() as fake:
        yield fake


@pytest_asyncio.fixture
async def other() -> AsyncIterator[FakeCoordinator]:
    async with serve_fake() as other:
        yield other


async def test_a_generation_is_deltas_and_one_finished(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        events = [event async for event in client.generate("two words")]
    assert events == [
        Delta(choice=0, position=0, token_ids=(1000,), text="two"),
        Delta(choice=0, position=1, token_ids=(1001,), text="words"),
        Finished(
            request_id="r1",
            choices=(ChoiceFinish(choice=0, reason="stop", stop_string="\n", stop_token_id=None),),
            prompt_tokens=9,
            generated_tokens=2,
            cached_tokens=0,
            seed=2**64 - 1,
            served_as="disaggregated",
            served_as_reason="paired",
            prefill_node="prefill-0",
            decode_node="decode-0",
            timing=Timing(
                queue_s=None,
                reserve_s=None,
                prefill_s=None,
                transfer_s=None,
                handoff_gap_s=None,
                decode_s=None,
                ttft_s=0.5,
                total_s=0.6,
            ),
        ),
    ]
    assert isinstance(events[-1], Finished)
    assert events[-1].tpot_s == pytest.approx(0.1)


async def test_options_go_to_the_fields_of_their_names(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        stream = client.generate(
            "x",
            timeout_s=60,
            request_id="mine",
            max_tokens=5,
            temperature=0.5,
            top_p=None,
            seed=2**64 - 1,
            stop_strings=["a"],
            logit_bias={3: -1.0},
            ignore_eos=True,
            n=2,
        )
        assert [event async for event in stream]
    (request,) = fake.requests
    assert (request.text, request.request_id, request.n) == ("x", "mine", 2)
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 2**64 - 1)
    assert not request.sampling.HasField("top_p")
    assert dict(request.sampling.logit_bias) == {3: -1.0}
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (5, ["a"])
    assert request.stop.ignore_eos
    # On the wire a deadline has three digits, rounded up.
    assert 50 < (fake.deadlines_s[0] or 0) <= 60.1


async def test_a_prompt_is_text_token_ids_or_a_chat(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        for prompt in ("text", [5, 6], [], [{"role": "user", "content": "hi"}]):
            assert [event async for event in client.generate(prompt)]
    text, ids, empty, chat = fake.requests
    assert (text.text, list(ids.token_ids.ids), chat.chat.messages[0].role) == (
        "text",
        [5, 6],
        "user",
    )
    assert empty.WhichOneof("prompt") == "token_ids"
    assert fake.deadlines_s == [None] * 4


@pytest.mark.parametrize("options", [{"seed": -1}, {"max_tokens": 2**32}, {"top_q": 1}])
async def test_what_cannot_be_sent_is_a_value_error(
    fake: FakeCoordinator, options: dict[str, int]
) -> None:
    async with AsyncClient(fake.address) as client:
        with pytest.raises(ValueError):
            await anext(client.generate("x", **options))  # type: ignore[arg-type]
    assert not fake.requests


async def test_a_refusal_carries_reason_message_and_metadata(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        with pytest.raises(GenerationError) as caught:
            await anext(client.generate("refuse"))
    error = caught.value
    assert error.status is grpc.StatusCode.UNAVAILABLE
    assert (error.reason, error.message) == ("NO_NODES", "no decode node")
    assert (error.metadata, error.retry_after_s) == ({"role": "decode"}, 1.5)
    assert not error.is_unreachable


async def test_a_coordinator_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as taken:  # bound and not listening: refuses, and nobody else gets it
        taken.bind(("127.0.0.1", 0))
        async with AsyncClient(f"127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(GenerationError) as caught:
                await client.list_nodes()
            assert caught.value.is_unreachable
            with pytest.raises(GenerationError) as caught:
                await anext(client.generate("x"))
            assert caught.value.is_unreachable


async def test_a_deadline_is_an_error_with_its_status(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        with pytest.raises(GenerationError) as caught:
            async for _ in client.generate("hang", timeout_s=0.2):
                pass
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_without_its_last_message_is_an_error(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        with pytest.raises(GenerationError, match="no end"):
            async for _ in client.generate("cut"):
                pass


async def test_leaving_the_loop_cancels_the_call(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        async for event in client.generate("hang"):
            assert isinstance(event, Delta)
            break
        # The client is still open: the loop's end alone did it.
        await asyncio.wait_for(fake.cancelled.wait(), 10)


async def test_cancelling_the_task_cancels_the_call(fake: FakeCoordinator) -> None:
    got_one = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("hang"):
            got_one.set()

    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(read())
        await asyncio.wait_for(got_one.wait(), 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(fake.cancelled.wait(), 10)


async def test_closing_the_client_cancels_what_is_open(fake: FakeCoordinator) -> None:
    client = AsyncClient(fake.address)
    events = client.generate("hang")
    await anext(events)
    await client.close()
    await asyncio.wait_for(fake.cancelled.wait(), 10)
    await events.aclose()


async def test_nodes_are_listed(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        prefill, decode = await client.list_nodes()
    assert (prefill.node_id, prefill.role, prefill.state) == ("prefill-0", "prefill", "serving")
    assert (decode.role, decode.address, decode.model) == ("decode", "127.0.0.1:1002", "toy")
    assert (decode.available_blocks, decode.num_blocks) == (90, 100)
    assert (decode.num_running, decode.num_queued) == (2, 1)
    assert (decode.num_decoding, decode.step_predicted_s) == (2, 0.0125)


async def test_logprobs_come_with_their_tokens(fake: FakeCoordinator) -> None:
    def logprobs(token_id: int) -> TokenLogprobs:
        return TokenLogprobs(token_id=token_id, logprob=-0.5, top=((7, -0.25),))

    async with AsyncClient(fake.address) as client:
        stream = client.generate("a b", logprobs=0, prompt_logprobs=1)
        prompt, first, second, _ = [event async for event in stream]
    assert prompt == PromptLogprobs(position=1, tokens=(logprobs(1),))
    assert isinstance(first, Delta)
    assert isinstance(second, Delta)
    assert (first.logprobs, second.logprobs) == ((logprobs(1000),), (logprobs(1001),))
    # 0 alternatives is not the same as no logprobs.
    assert (fake.requests[0].HasField("logprobs"), fake.requests[0].prompt_logprobs) == (True, 1)


async def test_text_tokens_model_and_story_are_told(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        assert await client.tokenize("hi") == [104, 105]
        assert await client.tokenize([{"role": "user", "content": "h"}]) == [104]
        assert await client.detokenize([104, 105]) == "hi"
        assert await client.get_model() == ModelInfo(
            model="toy",
            vocab_size=8,
            max_model_len=9,
            has_chat_template=True,
            limits=RequestLimits(
                max_choices=1,
                max_logprobs=2,
                max_stop_strings=3,
                max_stop_string_bytes=4,
                max_stop_token_ids=5,
                max_logit_bias=6,
                max_message_bytes=7,
            ),
        )
        assert await client.explain("r1") == [
            TimelineEvent(at_s=0.0, what="queued", details={"waiting": "0"}),
            TimelineEvent(at_s=0.0025, what="ended", details={"outcome": "ok"}),
        ]
        with pytest.raises(GenerationError, match="UNKNOWN_REQUEST"):
            await client.explain("r2")
        await client.drain_node("decode-0")
    assert fake.drained == ["decode-0"]


@pytest.mark.parametrize("given", [None, 7])
async def test_a_stream_that_breaks_goes_on_at_the_next_address(
    fake: FakeCoordinator, other: FakeCoordinator, given: int | None
) -> None:
    fake.may_leave = asyncio.Event()
    fake.may_leave.set()
    async with AsyncClient([fake.address, other.address]) as client:
        stream = client.generate("a leave b", request_id="mine", seed=given, prompt_logprobs=0)
        scores, *deltas, finished = [event async for event in stream]
    assert isinstance(scores, PromptLogprobs)
    assert [one.token_id for one in scores.tokens] == [1, 2]
    assert [(d.position, d.text) for d in deltas if isinstance(d, Delta)] == [
        (0, "a"),
        (1, "leave"),
        (2, "b"),
    ]
    assert isinstance(finished, Finished)
    (first,), (second,) = fake.requests, other.requests
    assert first == second
    assert first.request_id == "mine"
    assert first.sampling.HasField("seed")
    assert given in (None, first.sampling.seed)


async def test_streams_that_break_together_move_on_together(
    fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    fake.may_leave = asyncio.Event()
    async with AsyncClient([fake.address, other.address]) as client:
        streams = [client.generate("a leave") for _ in range(5)]
        for stream in streams:
            assert isinstance(await anext(stream), Delta)
        fake.may_leave.set()

        async def rest(stream: AsyncIterator[object]) -> int:
            return len([event async for event in stream])

        assert await asyncio.gather(*map(rest, streams)) == [2] * 5
        # And what begins after that begins there.
        assert await rest(client.generate("b")) == 2
    assert (len(fake.requests), len(other.requests)) == (5, 6)


async def test_a_request_that_breaks_everywhere_at_the_same_token_is_given_up(
    fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    for each in (fake, other):
        each.may_leave = asyncio.Event()
        each.may_leave.set()
    texts = []
    async with AsyncClient([fake.address, other.address]) as client:
        with pytest.raises(GenerationError, match="Socket closed"):
            async for event in client.generate("a leave", timeout_s=30):
                assert isinstance(event, Delta)
                texts.append(event.text)
    assert texts == ["a"]
    assert (len(fake.requests), len(other.requests)) == (1, 1)


async def test_one_address_is_asked_once_and_makes_no_seed(fake: FakeCoordinator) -> None:
    fake.may_leave = asyncio.Event()
    fake.may_leave.set()
    async with AsyncClient([fake.address]) as client:
        with pytest.raises(GenerationError, match="Socket closed"):
            await anext(client.generate("leave"))
    (request,) = fake.requests
    assert not request.sampling.HasField("seed")


async def test_a_refusal_is_an_answer_and_goes_nowhere_else(
    fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    async with AsyncClient([fake.address, other.address]) as client:
        with pytest.raises(GenerationError, match="NO_NODES"):
            await anext(client.generate("refuse"))
    assert (len(fake.requests), len(other.requests)) == (1, 0)


async def test_the_deadline_is_that_of_all_addresses_together(
    fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    fake.may_leave = asyncio.Event()
    async with AsyncClient([fake.address, other.address]) as client:
        stream = client.generate("a leave", timeout_s=60)
        await anext(stream)
        # What the first one took is gone for the second; the wire rounds up to 0.1 s.
        asyncio.get_running_loop().call_later(0.5, fake.may_leave.set)
        assert len([event async for event in stream]) == 2
    assert 50 < (other.deadlines_s[0] or 0) <= 59.6


async def test_closing_a_client_of_several_sends_nothing_again(
    fake: FakeCoordinator, other: FakeCoordinator
) -> None:
    client = AsyncClient([fake.address, other.address])
    events = client.generate("hang")
    await anext(events)
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await anext(events)
    assert not other.requests


async def test_a_call_goes_to_the_address_that_answers(fake: FakeCoordinator) -> None:
    with socket.socket() as taken:  # bound and not listening, as above
        taken.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{taken.getsockname()[1]}"
        async with AsyncClient([gone, fake.address]) as client:
            assert (await client.get_model()).model == "toy"
        async with AsyncClient([gone, gone]) as client:
            with pytest.raises(GenerationError) as caught:
                await client.list_nodes()
            assert caught.value.is_unreachable


async def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        AsyncClient([])


async def test_a_prompt_of_several_megabytes_is_sent(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        events = [event async for event in client.generate("x" * (12 << 20))]
    assert isinstance(events[0], Delta)
    assert len(events[0].text) == 12 << 20


async def test_the_sync_client_gives_the_same_events(fake: FakeCoordinator) -> None:
    async with AsyncClient(fake.address) as client:
        want = [event async for event in client.generate("two words", seed=1)]
        nodes = await client.list_nodes()

    def read() -> None:
        with Client(fake.address) as client:
            assert list(client.generate("two words", seed=1)) == want
            assert client.list_nodes() == nodes
            assert client.detokenize(client.tokenize("hi")) == "hi"
            assert client.get_model().model == "toy"
            assert [event.what for event in client.explain("r1")] == ["queued", "ended"]
            client.drain_node("decode-0")
            client.clear_cache("decode-0")
            with pytest.raises(GenerationError, match="NO_NODES"):
                list(client.generate("refuse"))

    await asyncio.to_thread(read)


async def test_leaving_the_loop_of_the_sync_client_cancels_the_call(fake: FakeCoordinator) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        with Client(fake.address) as client:
            for _ in client.generate("hang"):
                break
            cancelled = asyncio.run_coroutine_threadsafe(fake.cancelled.wait(), loop)
            assert cancelled.result(10)

    await asyncio.to_thread(read)


async def test_the_sync_client_closes_with_a_generation_open(fake: FakeCoordinator) -> None:
    def read() -> None:
        client = Client(fake.address)
        events = client.generate("hang")
        next(events)
        client.close()
        events.close()
        client.close()

    await asyncio.to_thread(read)
    await asyncio.wait_for(fake.cancelled.wait(), 10)
