"""Chats are written out as transformers writes them, by templates that cannot take the machine with them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from tiny_engines import letter_tokenizer

from eagle3core import ConfigError
from eagle3core.chat import ChatWriter, writer

pytestmark = pytest.mark.reference

# As published with the models (Hugging Face, tokenizer_config.json), cut to the parts that write chats.
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA31 = (
    "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n"
    "{%- if not date_string is defined %}\n    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
    "{%- if not tools is defined %}\n    {%- set tools = none %}\n{%- endif %}\n"
    "{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|trim %}\n"
    "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}{%- if tools is not none %}{{- tools | tojson(indent=4) }}"
    "{%- endif %}\n{{- 'Today Date: ' + date_string + '\n\n' }}{{- system_message }}{{- '<|eot_id|>' }}\n"
    "{%- for message in messages %}\n    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n"
    "        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim }}\n"
    "    {%- else %}{{- raise_exception('no tools') }}{%- endif %}\n{%- endfor %}\n{{ messages | tojson }}"
)
QWEN = (
    "{%- if messages[0]['role'] == 'system' %}\n    {{- '<|im_start|>system\n' + messages[0]['content'] + "
    "'<|im_end|>\n' }}\n{%- else %}\n    {{- '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}\n{%- endif %}\n"
    "{%- set ns = namespace(multi=true, last=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n"
    "{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi and message.role == 'user' %}"
    "{%- set ns.multi = false %}{%- set ns.last = index %}{%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n"
    "    {%- if message.role in ('user', 'assistant') %}\n        {{- '<|im_start|>' + message.role + '\n' + "
    "message.content + '<|im_end|>' + '\n' }}\n    {%- endif %}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\n' }}\n{%- endif %}\n{{ ns.last }}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = 'A chat.' %}{% set rest = messages %}{% endif %}{{ system }}{% for message in rest %}"
    "{% if message['role'] == 'user' %}{{ ' USER: ' + message['content'].strip() }}{% elif message['role'] == "
    "'assistant' %}{{ ' ASSISTANT: ' + message['content'].strip() + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# In the manner of gpt-oss's: macros with variables that may not be given, the date, a developer's part, channels.
CHANNELS = (
    "{#- channels -#}\n{%- macro system() -%}\n    {%- if effort is not defined %}{%- set effort = 'medium' %}"
    "{%- endif %}\n"
    "    {{- 'Today is ' + strftime_now('%Y-%m-%d') + '\n\nReasoning: ' + effort }}\n"
    "    {%- if tools %}{{- tools | tojson }}{%- endif %}\n{%- endmacro -%}\n"
    "{{- '<|start|>system<|message|>' }}{{- system() }}{{- '<|end|>' }}\n"
    "{%- if messages[0].role in ('developer', 'system') %}\n    {%- set rest = messages[1:] %}\n"
    "    {{- '<|start|>developer<|message|># Instructions\n\n' + messages[0].content + '<|end|>' }}\n"
    "{%- else %}\n    {%- set rest = messages %}\n{%- endif %}\n{%- set last = namespace(call=none) %}\n"
    "{%- for message in rest -%}\n    {%- if message.role == 'assistant' and '<|channel|>' in message.content %}\n"
    "        {{- raise_exception('channels belong into fields of their own') }}\n    "
    "{%- elif message.role == 'assistant' %}\n        "
    "{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}\n    {%- else %}\n"
    "        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}\n    {%- endif %}\n"
    "{%- endfor -%}\n{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
TEMPLATES = {
    "channels": CHANNELS,
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "qwen": QWEN,
    "vicuna": VICUNA,
    "mistral": MISTRAL,
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "  Bad cab? <&> é 𝔘 \ud83d"}],
    "turns": [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "b 'c' \"d\""},
        {"role": "user", "content": "d"},
    ],
    "system": [{"role": "system", "content": "be  brief\n"}, {"role": "user", "content": "e"}],
}


def written_by(template: str, chat: list[dict[str, Any]] | None = None) -> str:
    """What a template makes of a chat."""
    return ChatWriter(letter_tokenizer(template)).text(chat or CHATS["one"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_published_templates_write_what_transformers_writes(name: str) -> None:
    tokenizer = letter_tokenizer(TEMPLATES[name])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    chats = ChatWriter(tokenizer)
    for chat in CHATS.values():
        try:
            expected = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except Exception as reason:  # the template's own refusal, which transformers hands on
            with pytest.raises(ConfigError, match=re.escape(f"{type(reason).__name__}: {reason}")):
                chats.text(chat)
            continue
        assert chats.text(chat) == expected
        letters = [{**message, "content": "bad cab"} for message in chat]
        encoded = tokenizer.apply_chat_template(letters, add_generation_prompt=True, return_dict=True)
        assert chats.ids(letters) == list(encoded["input_ids"])


def test_a_template_is_told_further_settings_and_none_in_the_place_of_its_own() -> None:
    chats = ChatWriter(letter_tokenizer("{{ effort }}{{ messages[0].content }}{{ add_generation_prompt }}"))
    chat = [{"role": "user", "content": "a"}]
    assert chats.text(chat, {"effort": "high", "add_generation_prompt": "no", "nobody": 1}) == "highaTrue"
    assert chats.text(chat) == "aTrue"


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = letter_tokenizer("a")
    tokenizer.chat_template = {"default": "b", "tool_use": "c"}
    assert ChatWriter(tokenizer).text(CHATS["one"]) == "b"
    tokenizer.chat_template = {"rag": "b"}
    with pytest.raises(ConfigError, match="one is called default"):
        ChatWriter(tokenizer).text(CHATS["one"])


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 10**9 }}",
        "{% set n = namespace(t='x') %}{% for i in range(90) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
        "{{ 'x'|center(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        pytest.param("{{ lipsum(n=10**7) }}", marks=pytest.mark.slow),  # it ends by the limit of processor time
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
        "{{ messages[0].nothing.at_all }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ range(10**9)|list }}",
        "{% for",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_that_asks_for_too_much_is_refused_at_once(template: str) -> None:
    begun = time.process_time()
    with pytest.raises(ConfigError, match="chat template refuses this chat: ") as caught:
        written_by(template)
    assert all((caught.value.what, caught.value.allowed, caught.value.remedy))
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 10) }}",
    ],
)
def test_a_template_that_takes_too_long_is_ended_and_the_next_chat_is_written(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MOST_CPU_S", 1)
    tokenizer = letter_tokenizer(template)
    chats = ChatWriter(tokenizer)
    with pytest.raises(ConfigError, match="it took more than"):
        chats.text(CHATS["one"])
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert chats.text(CHATS["one"]) == "user"


def test_a_template_that_sleeps_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_WALL_S", 0.0)
    with pytest.raises(ConfigError, match="it took more than"):
        written_by("a")


def test_a_chat_that_is_no_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="a chat holds what is no JSON"):
        written_by("a", [{"role": "user", "content": {1, 2}}])


def test_half_a_letter_is_refused_in_a_text_and_in_a_chat() -> None:
    chats = ChatWriter(letter_tokenizer("{{ messages[0].content }}"))
    for encode in (chats.text_ids, lambda text: chats.ids([{"role": "user", "content": text}])):
        with pytest.raises(ConfigError, match="half a letter"):
            encode("a\ud83d")


def test_a_tokenizer_that_stumbles_over_a_text_is_an_error_in_three_parts() -> None:
    chats = ChatWriter(letter_tokenizer())
    with pytest.raises(ConfigError, match="the tokenizer cannot read a text: "):
        chats._encoded("a", no_such_setting=True, max_length=-1)
