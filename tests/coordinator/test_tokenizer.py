"""ModelTokenizer against transformers on the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from toy_tokenizers import SMOLLM2, byte_fallback, byte_level, without_decoder
from transformers import PreTrainedTokenizerFast

from coordinator.tokenizer import ModelTokenizer

CHATML = """{% for message in messages %}
{% if loop.first and messages[0]['role'] != 'system' %}
{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}
{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{% endif %}
"""
# One of everything that templates in the wild use beyond plain Jinja.
EVERYTHING = """{{- bos_token }}{{ strftime_now('%Y') }}{{ messages | tojson }}
{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.turns = ns.turns + 1 %}
    {%- if ns.turns > 2 %}{% break %}{% endif %}
    {% generation %}<{{ message.content | trim }}>{% endgeneration %}
{%- endfor %}
{%- if tools is not none %}{{ raise_exception('tools') }}{% endif %}
{{ {'b': '<é>', 'a': 1} | tojson(indent=2) }}
{{ eos_token }}{{ pad_token is defined }}{{ add_generation_prompt }}
"""
CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " <é> 😀\n"}],
    [{"role": role, "content": role[0] * 3} for role in ("user", "assistant", "user", "assistant")],
    [{"role": "user", "content": "a<|im_end|>b <bos>"}],
]
TEXTS = ["", " ", "Hello world", "naïve 😀 日本 Ġx", "a<eos>b<|im_end|>", "x" * 1000]


def model_folder(
    tmp_path: Path,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = None,
    **config: Any,
) -> Path:
    (tokenizer or byte_level()).save(str(tmp_path / "tokenizer.json"))
    # transformers writes a token either way.
    eos = {"__type": "AddedToken", "content": "<eos>", "special": True}
    config = {"bos_token": "<bos>", "eos_token": eos, **config}
    if template is not None:
        config["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
async def test_ids_are_those_of_transformers(tmp_path: Path, text: str) -> None:
    folder = model_folder(tmp_path)
    tokenizer = ModelTokenizer(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert await tokenizer.encode_async(text) == reference(text)["input_ids"]
    assert tokenizer.encode(text)[0] == tokenizer.vocab_size - 5  # <bos>, by the model's own rule
    without = reference(text, add_special_tokens=False)["input_ids"]
    assert await tokenizer.encode_async(text, add_special_tokens=False) == without


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", [CHATML, EVERYTHING])
async def test_chats_are_those_of_transformers(
    tmp_path: Path, template: str, chat: list[dict[str, str]]
) -> None:
    folder = model_folder(tmp_path, template=template)
    tokenizer = ModelTokenizer(folder)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    want = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.render_chat(chat) == want
    ids = reference.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert await tokenizer.encode_chat_async(chat) == ids


def test_a_template_file_goes_before_the_template_in_the_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}", "utf-8")
    assert ModelTokenizer(folder).render_chat(CHATS[0]) == "new Hi"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    folder = model_folder(tmp_path, chat_template=named)
    assert ModelTokenizer(folder).render_chat(CHATS[0]) == "d"


def test_truncation_left_in_the_file_is_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert len(ModelTokenizer(model_folder(tmp_path, tokenizer=tokenizer)).encode("123456")) == 7


@pytest.mark.parametrize("make", [byte_level, byte_fallback, without_decoder])
def test_a_detokenizer_is_made_for_each_choice(tmp_path: Path, make: Any) -> None:
    tokenizer = ModelTokenizer(model_folder(tmp_path, tokenizer=make()))
    first, second = tokenizer.detokenizer(), tokenizer.detokenizer()
    ids = list(range(3, 40))
    one = "".join([first.push(ids[:7]), second.push(ids[:3])[:0], first.push(ids[7:])])
    assert one + first.finish() == tokenizer.decode(ids)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        ModelTokenizer(tmp_path)


def test_a_model_without_chat_template_refuses_chats_but_encodes_text(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(model_folder(tmp_path))
    assert tokenizer.encode("a")
    with pytest.raises(ValueError, match="has no chat template"):
        tokenizer.render_chat(CHATS[0])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [], "no messages"),
        (CHATML, [{"role": "robot", "content": "x"}], "message 0 has role 'robot'"),
        ("{{ raise_exception('roles must alternate') }}", CHATS[0], "roles must alternate"),
        ("{{ messages[9].content }}", CHATS[0], "no element 9"),
        ("{{ messages[0].content + 1 }}", CHATS[0], "can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", CHATS[0], "unsafe"),
        ("{{ messages.append(1) }}", CHATS[0], "unsafe|not safely callable"),
        ("{% for x in range(99999999) %}{% endfor %}", CHATS[0], "[Rr]ange too big"),
    ],
)
def test_what_a_template_refuses_is_a_value_error(
    tmp_path: Path, template: str, messages: list[dict[str, str]], message: str
) -> None:
    tokenizer = ModelTokenizer(model_folder(tmp_path, template=template))
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat(messages)


@pytest.mark.parametrize("config", [{"chat_template": "{% for %}"}, {"chat_template": []}])
def test_a_broken_template_is_refused_at_start(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ModelTokenizer(model_folder(tmp_path, **config))


@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="the model is not there")
def test_smollm2_is_what_transformers_makes_of_its_folder() -> None:
    tokenizer = ModelTokenizer(SMOLLM2)
    reference = PreTrainedTokenizerFast.from_pretrained(SMOLLM2)
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    for chat in CHATS:
        want = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer.render_chat(chat) == want
