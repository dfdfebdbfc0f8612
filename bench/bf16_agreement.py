"""python -m bench.bf16_agreement: how often bf16 serving differs from transformers' bf16, and why.

Greedy, 48 tokens, against transformers' generate in the same dtype. Two bf16 implementations round
differently, so a token may differ where two logits nearly tie. For each first difference this
prints the gap of the two tokens in float32 logits, beside the noise: the root mean square by which
transformers' own bf16 logits differ from its float32 logits on these prompts.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.targets import pin
from coordinator.client import AsyncClient
from coordinator.events import Delta
from coordinator.supervisor import Cluster
from engine.catalog import resolve_model

NUM_TOKENS = 48
# A difference of two logits that both carry the noise; three standard deviations of it.
BOUND_IN_NOISE = 3 * 2**0.5
_TOPICS = (
    "the tides", "a lost key", "prime numbers", "baking bread", "an old bridge", "the moon",
    "learning to swim", "a quiet village", "honey bees", "the first train", "rainy days",
    "a broken clock", "mountain paths", "the colour green", "writing letters", "deep sea fish",
    "a market square", "snow in spring", "the number zero", "a wooden boat",
)  # fmt: skip
_FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}:\n1.",
    "Once upon a time there was a town that knew nothing of {}.",
    "def describe():\n    # {}\n    return",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bf16_agreement")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(2)
    folder = resolve_model(args.model, allow_download=False).folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [form.format(topic) for topic in _TOPICS for form in _FORMS][: args.prompts]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    served = asyncio.run(serve(args.model, prompts))
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    noise = logit_noise(half, full, prompts[:10])
    num_differ = num_beyond = 0
    for prompt, ours in zip(prompts, served, strict=True):
        theirs = generate(half, prompt)
        first = next((i for i in range(NUM_TOKENS) if ours[i] != theirs[i]), None)
        if first is None:
            continue
        logits_V = last_logits(full, prompt + theirs[:first])
        gap = abs(float(logits_V[ours[first]] - logits_V[theirs[first]]))
        num_differ += 1
        num_beyond += gap > BOUND_IN_NOISE * noise
        print(f"token {first:2}: {theirs[first]} / {ours[first]}, gap {gap:.3f}", flush=True)
    print(
        f"{num_differ} of {len(prompts)} prompts differ within {NUM_TOKENS} tokens; noise "
        f"{noise:.3f}, bound {BOUND_IN_NOISE * noise:.3f}, beyond it {num_beyond}"
    )


async def serve(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """Disaggregated, one core each, four at a time."""
    limit = asyncio.Semaphore(4)
    with tempfile.TemporaryDirectory() as log_dir:
        async with (
            Cluster(model=model, num_prefill=1, num_decode=1, log_dir=Path(log_dir)) as cluster,
            AsyncClient(cluster.address) as client,
        ):
            pin(cluster, threads=1)

            async def one(prompt: list[int]) -> list[int]:
                tokens: list[int] = []
                async with limit:
                    events = client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                    async for event in events:
                        if isinstance(event, Delta):
                            tokens += event.token_ids
                return tokens

            return await asyncio.gather(*(one(prompt) for prompt in prompts))


def generate(model: Any, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def last_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits_V: torch.Tensor = model(torch.tensor([token_ids])).logits[0, -1].float()
    return logits_V


def logit_noise(half: Any, full: Any, prompts: list[list[int]]) -> float:
    """Of the likeliest hundred tokens: others never win."""
    squares = []
    for prompt in prompts:
        exact_V, rounded_V = last_logits(full, prompt), last_logits(half, prompt)
        top = exact_V.topk(100).indices
        squares.append(((exact_V - rounded_V)[top] ** 2).mean())
    return float(torch.stack(squares).mean().sqrt())


if __name__ == "__main__":
    main()
