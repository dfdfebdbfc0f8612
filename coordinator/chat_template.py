"""A chat as the text that the model was trained on: the model's own Jinja template, sandboxed.

Renders what transformers' apply_chat_template(..., add_generation_prompt=True) renders: same
environment options, same extra names, same special tokens. Templates come from the internet, hence
the sandbox. A control token that a user writes in a message is a control token, as in transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "user", "assistant")
# The names under which transformers gives special tokens to templates.
_SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class ChatTemplate:
    """The chat template of one model. Raises ValueError for a template with a syntax error."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of messages ({"role", "content"}), up to where the assistant's answer begins.

        Raises ValueError for no messages, an unknown role, or what the template itself refuses.
        """
        if not messages:
            raise ValueError("chat: no messages")
        for index, message in enumerate(messages):
            if message["role"] not in ROLES:
                raise ValueError(
                    f"chat: message {index} has role {message['role']!r}, not one of {ROLES}"
                )
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            # Templates compute on what clients send: whatever fails in there is a bad request.
            raise ValueError(f"chat template: {error}") from error


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """A model folder's template: chat_template.jinja, else tokenizer_config.json, else None.

    Raises ValueError for several templates without a default, or a syntax error.
    """
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text("utf-8")) if config_file.exists() else {}
    template_file = folder / "chat_template.jinja"
    source = (
        template_file.read_text("utf-8") if template_file.exists() else config.get("chat_template")
    )
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        if "default" not in named:
            raise ValueError(f"{config_file}: several chat templates, none named default")
        source = named["default"]
    if source is None:
        return None
    return ChatTemplate(source, special_tokens=_special_tokens(folder, config))


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    # Older folders keep them in a file of their own; tokenizer_config.json goes first.
    map_file = folder / "special_tokens_map.json"
    values = json.loads(map_file.read_text("utf-8")) if map_file.exists() else {}
    values |= {name: value for name, value in config.items() if value is not None}
    return {
        name: value["content"] if isinstance(value, dict) else value
        for name in _SPECIAL_TOKENS
        if (value := values.get(name)) is not None
    }


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what to train on; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    environment.globals.update(functions)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
