"""A client of two coordinators in front of the same nodes, and what else it asks of one."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coordinator.child import Child
from coordinator.client import AsyncClient
from coordinator.events import Delta, Finished, GenerationError, PromptLogprobs, TokenLogprobs
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model
from tests.e2e.serving import collect, predicted, wait_all_available, wait_until

ROOT = Path(__file__).parents[2]
PROMPT = [5] * 10


@asynccontextmanager
async def programs(*commands: list[str]) -> AsyncIterator[list[Child]]:
    """Children that are listening."""
    children = [
        Child(command[0], [sys.executable, "-m", *command], log_path=None) for command in commands
    ]
    try:
        await asyncio.gather(*(child.read_address() for child in children))
        yield children
    finally:
        for child in children:
            child.kill()
        await asyncio.gather(*(child.exited for child in children))


@asynccontextmanager
async def two_coordinators() -> AsyncIterator[list[Child]]:
    """Both serve the same prefill node and decode node."""
    command = ["coordinator", "--listen", "127.0.0.1:0", "--model", "emulated"]
    async with programs(command, command) as coordinators:
        flags = ["--model", "emulated"]
        for coordinator in coordinators:
            flags += ["--coordinator", coordinator.address]
        async with programs(["prefill_server", *flags], ["decode_server", *flags]):
            for coordinator in coordinators:
                async with AsyncClient(coordinator.address) as client:
                    await wait_until(
                        client, lambda nodes: [n.state for n in nodes] == ["serving"] * 2
                    )
            yield coordinators


class Story:
    """What a client was given; a position or character that comes twice, or not, fails."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finished: Finished | None = None

    def take_in(self, event: Delta | PromptLogprobs | Finished) -> None:
        assert self.finished is None
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, PromptLogprobs):
            assert event.position == 1 + len(self.prompt_logprobs)
            self.prompt_logprobs += event.tokens
        else:
            token_ids = self.token_ids.setdefault(event.choice, [])
            assert event.position == len(PROMPT) + len(token_ids)
            assert len(event.logprobs) in (0, len(event.token_ids))
            token_ids += event.token_ids
            self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
            self.logprobs.setdefault(event.choice, []).extend(event.logprobs)


async def told(client: AsyncClient, **options) -> Story:
    story = Story()
    async for event in client.generate(PROMPT, **options):
        story.take_in(event)
    assert story.finished is not None
    return story


async def assert_served_by(coordinator: AsyncClient, story: Story) -> None:
    """That it was this coordinator that ended the request: no other has its timeline."""
    assert story.finished is not None
    events = await coordinator.explain(story.finished.request_id)
    assert events[-1].details["outcome"] == "ok"


@pytest.mark.parametrize(
    ("end", "num_tokens"),
    # A step takes 2.2 ms: 1,300 outlast the 2 s that a coordinator gives what runs at its stop.
    [("kill", 300), ("terminate", 1_300)],
)
async def test_a_stream_goes_on_through_the_other_coordinator(end, num_tokens):
    options = {"n": 2, "max_tokens": num_tokens, "temperature": 1.0}
    options |= {"logprobs": 2, "prompt_logprobs": 1}
    async with two_coordinators() as coordinators, asyncio.timeout(60):
        both = [child.address for child in coordinators]
        async with AsyncClient(both) as client, AsyncClient(both[1]) as other:
            story, is_ended = Story(), False
            async for event in client.generate(PROMPT, **options):
                story.take_in(event)
                if not is_ended and len(story.token_ids.get(1, [])) >= 20:
                    is_ended = True
                    getattr(coordinators[0], end)()
            await coordinators[0].exited
            await assert_served_by(other, story)
            seed = story.finished.seed
            for choice in (0, 1):
                want = predicted(PROMPT, num_tokens, seed=seed, choice=choice)
                assert story.token_ids[choice] == want
            whole = await told(other, **options, seed=seed)
            assert story.texts == whole.texts
            assert story.logprobs == whole.logprobs
            assert len(story.prompt_logprobs) == 9
            assert story.prompt_logprobs == whole.prompt_logprobs
            await wait_all_available(other)


async def test_all_streams_of_a_client_go_on_and_a_stop_string_still_ends_them():
    async with two_coordinators() as coordinators, asyncio.timeout(60):
        both = [child.address for child in coordinators]
        async with AsyncClient(both) as client, AsyncClient(both[1]) as other:
            text = await other.detokenize(predicted(PROMPT, 230))
            # Far behind the first token, which is when the coordinator goes.
            before, stop = text[:-15], text[-15:]
            assert stop not in before
            options = {"max_tokens": 2_000, "stop_strings": [stop], "ignore_eos": True}
            streams = [client.generate(PROMPT, **options) for _ in range(8)]
            stories = [Story() for _ in streams]
            for stream, story in zip(streams, stories, strict=True):
                story.take_in(await anext(stream))
            coordinators[0].kill()

            async def rest(index: int) -> None:
                async for event in streams[index]:
                    stories[index].take_in(event)

            await asyncio.gather(*map(rest, range(len(streams))))
            for story in stories:
                await assert_served_by(other, story)
                assert story.texts == {0: before}
                assert story.finished.choices[0].stop_string == stop
            await wait_all_available(other)


async def test_without_another_coordinator_the_stream_ends_with_the_one():
    async with (
        two_coordinators() as coordinators,
        asyncio.timeout(60),
        AsyncClient([child.address for child in coordinators]) as client,
    ):
        stream = client.generate(PROMPT, max_tokens=2_000)
        assert isinstance(await anext(stream), Delta)
        for coordinator in coordinators:
            coordinator.kill()
        with pytest.raises(GenerationError) as caught:
            async for _ in stream:
                pass
        assert caught.value.is_unreachable


async def disagg(*args: str) -> tuple[int | None, str, str]:
    """The command's exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", "from coordinator.cli import main; main()", *args],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_drained_node_ends_in_good_order_and_its_request_moves():
    async with (
        Cluster(
            model="emulated",
            num_prefill=1,
            num_decode=2,
            node_options={"drain_grace_s": 0.3},
        ) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        at = ["--coordinator", cluster.address]
        request = asyncio.create_task(
            collect(client, PROMPT, max_tokens=1_500, request_id="mine", ignore_eos=True)
        )
        await wait_until(client, lambda nodes: any(n.num_decoding for n in nodes))
        paired = {event.what: event for event in await client.explain("mine")}["paired"]
        victim = paired.details["decode"].partition("#")[0]
        assert await disagg("drain", victim, *at) == (0, "", "")
        assert await cluster.processes[victim].exited == 0
        result = await request
        assert result.token_ids == predicted(PROMPT, 1_500)
        assert result.finished.served_as == "resumed"
        assert result.finished.num_restarts == 1
        assert result.finished.decode_node != victim
        story = [event.what for event in await client.explain("mine")]
        # What the caches had is told in between.
        steps = [what for what in story if what != "cached"]
        assert steps[:5] == ["arrived", "queued", "paired", "reserved", "first token"]
        assert story[-1] == "ended"
        assert "broken" in story
        code, out, _ = await disagg("explain", "mine", *at)
        assert code == 0
        # The same in the same order, one line each, after the heading.
        lines = [line for line in out.splitlines() if " ms " in line]
        assert len(lines) == len(story)
        assert all(what in line for what, line in zip(story, lines, strict=True))
        code, out, err = await disagg("drain", "decode-9", *at)
        assert (code, out) == (1, "")
        assert "no node 'decode-9'" in err


async def test_text_becomes_tokens_and_tokens_text():
    async with (
        Cluster(model="emulated", num_prefill=0, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        token_ids = await client.tokenize("h\u00e9llo")
        assert token_ids == list("h\u00e9llo".encode())
        assert await client.detokenize(token_ids) == "h\u00e9llo"
        chat = await client.tokenize([{"role": "user", "content": "hi"}])
        assert bytes(chat) == b"user: hi\nassistant: "
        with pytest.raises(GenerationError, match="ids are not in"):
            await client.detokenize([256])
        model = await client.get_model()
        assert (model.model, model.vocab_size, model.has_chat_template) == ("emulated", 256, True)
        assert 0 < model.max_model_len <= 32_768
        # The limits are those that are held.
        with pytest.raises(GenerationError, match="n: "):
            await anext(client.generate(PROMPT, n=model.limits.max_choices + 1))
        with pytest.raises(GenerationError, match="logprobs: "):
            await anext(client.generate(PROMPT, logprobs=model.limits.max_logprobs + 1))


async def test_a_chat_is_tokenized_as_by_the_model_s_own_tokenizer(tmp_path):
    """The default model's tokenizer and template, in front of a node that computes nothing."""
    from transformers import AutoTokenizer

    try:
        real = resolve_model("smollm2-135m", allow_download=False).folder
    except ValueError:
        pytest.skip("the default model is not here; the emulated one's tokenizer is tested above")
    folder = tmp_path / "real-text"
    shutil.copytree(resolve_model("emulated", allow_download=False).folder, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(real / name, folder / name)
    reference = AutoTokenizer.from_pretrained(real)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(reference)}))
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tea, 茶? 🍵"}]
    text = "  Why is the sky blue?\n\n1 + 1 = 2 — \u00fcber 茶 🍵"
    async with (
        Cluster(model=str(folder), num_prefill=0, num_decode=1) as cluster,
        AsyncClient(cluster.address) as client,
    ):
        rendered = reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        want = reference(rendered, add_special_tokens=False)["input_ids"]
        assert await client.tokenize(chat) == want
        token_ids = await client.tokenize(text)
        assert token_ids == reference(text)["input_ids"]
        assert await client.detokenize(token_ids) == text
        assert (await client.get_model()).vocab_size == len(reference)
