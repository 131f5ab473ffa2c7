"""The front door: texts and chats in, texts out, with settings on either side."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_engines import Pair, engine_config, letter_tokenizer, new_tokens, tiny_engine, write_tiny_pair

from eagle3core import CheckpointError, ConfigError, EngineConfig, Pipeline, SpeculativeConfig, pipeline

pytestmark = pytest.mark.reference

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} {% endfor %}{% if add_generation_prompt %}e{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose target directory holds a tokenizer with a chat template."""
    pair = write_tiny_pair(tmp_path_factory.mktemp("chatty"))
    letter_tokenizer(TEMPLATE).save_pretrained(pair[0])
    return pair


@pytest.fixture(scope="module")
def pipe(chatty: Pair) -> Pipeline:
    """A pipeline that drafts three tokens a step."""
    return pipeline(chatty[0], engine_config=engine_config(chatty, 3))


def test_a_text_gives_one_response_whose_text_is_its_tokens(pipe: Pipeline, chatty: Pair) -> None:
    response = pipe("bad cab", new_tokens(12))
    (expected,) = tiny_engine(chatty, None).generate([[1, 0, 3, 5, 2, 0, 1]], new_tokens(12))
    assert response.token_ids == expected.token_ids
    assert response.text == "".join("abcde "[token] for token in expected.token_ids)
    assert response.n_prompt_tokens == 7
    assert response.req_metrics.spec_info is not None


def test_a_list_gives_a_response_for_each_text_in_order(pipe: Pipeline) -> None:
    texts = ["bad", "a", "cab dad bed"]
    assert [r.token_ids for r in pipe(texts, new_tokens(6))] == [pipe(t, new_tokens(6)).token_ids for t in texts]
    assert [r.n_prompt_tokens for r in pipe(texts, new_tokens(1))] == [3, 1, 11]
    assert pipe([]) == []


def test_a_chat_is_written_out_by_the_template(pipe: Pipeline) -> None:
    chat = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "cab"}]
    assert pipe.encode(chat) == pipe.encode("bad cab e")
    mixed = pipe([chat, "dad"], new_tokens(5))
    assert [r.token_ids for r in mixed] == [r.token_ids for r in pipe(["bad cab e", "dad"], new_tokens(5))]


def test_one_chat_by_itself_gives_one_response(pipe: Pipeline) -> None:
    chat = [{"role": "user", "content": "bad"}, {"role": "assistant", "content": "cab"}]
    assert pipe(chat, new_tokens(5)).token_ids == pipe([chat], new_tokens(5))[0].token_ids
    with pytest.raises(ConfigError, match="a text, or a list of messages with 'role' and 'content'"):
        pipe([{"role": "user"}])


def test_stop_words_work_through_the_front_door(pipe: Pipeline) -> None:
    whole = pipe("bad cab", new_tokens(12)).text
    word = whole[4:6]
    stopped = pipe("bad cab", new_tokens(12, stop_words=(word,)))
    assert (stopped.finish_reason, stopped.text) == ("stop", whole[: whole.find(word)])


def test_a_request_without_settings_takes_the_documented_ones(chatty: Pair) -> None:
    roomy = pipeline(chatty[0], engine_config=engine_config(chatty, 3, session_len=160))
    assert len(roomy("bad").token_ids) == 128


def test_a_chat_for_a_tokenizer_without_a_template_is_refused(tmp_path: Path, chatty: Pair) -> None:
    target = Path(shutil.copytree(chatty[0], tmp_path / "target"))
    letter_tokenizer(None).save_pretrained(target)
    (target / "chat_template.jinja").unlink()
    plain = pipeline(target, engine_config=engine_config(chatty, 3))
    with pytest.raises(ConfigError, match="a chat prompt for a tokenizer without a chat template"):
        plain([[{"role": "user", "content": "bad"}]])
    assert len(plain("bad", new_tokens(3)).token_ids) == 3


@pytest.mark.parametrize("prompt", [[{"role": "user"}], ["user", "bad"], [3]])
def test_something_that_is_neither_a_text_nor_a_chat_is_refused(pipe: Pipeline, prompt: object) -> None:
    with pytest.raises(ConfigError, match="a text, or a list of messages with 'role' and 'content'"):
        pipe([prompt])  # type: ignore[list-item]


def test_an_empty_text_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(ConfigError, match="prompt 1 is empty"):
        pipe(["bad", ""])


def test_draft_settings_may_sit_on_either_side_or_equal_on_both(chatty: Pair) -> None:
    spec = SpeculativeConfig(model=str(chatty[1]), num_speculative_tokens=2)
    off = engine_config(chatty, None)
    on = engine_config(chatty, None, speculative_config=spec)
    pipes = [
        pipeline(chatty[0], speculative_config=spec, engine_config=off),
        pipeline(chatty[0], engine_config=on),
        pipeline(chatty[0], speculative_config=spec, engine_config=on),
    ]
    assert [pipe.engine.config for pipe in pipes] == [on] * 3
    assert all(pipe.engine.speculation.enabled for pipe in pipes)
    other = SpeculativeConfig(model=str(chatty[1]), num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="two speculative configurations that differ in num_speculative_tokens"):
        pipeline(chatty[0], speculative_config=other, engine_config=on)


def test_defaults_run_a_target_that_is_long_enough(chatty: Pair) -> None:
    assert pipeline(chatty[0]).engine.config == EngineConfig()


def test_a_target_without_a_tokenizer_is_named(pair: Pair) -> None:
    with pytest.raises(CheckpointError, match=r"target has no tokenizer_config\.json"):
        pipeline(pair[0], engine_config=engine_config(pair, None))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 99999999999999999999}, "merges": []}}'),
        ("tokenizer.json", "[" * 5000),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 2147483648}, "merges": []}}'),
        ("tokenizer.json", '{"added_tokens": [{"content": "a", "id": -1}]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"99999999999": {"content": "a"}}}'),
        ("vocab.json", "[1]"),
        ("tokenizer.json", '{"normalizer": [{"content": "aaaaaaaaaaaaa"}, {"content": "aaaaaaaaaaaaa"}]}'),
        (
            "tokenizer.json",
            '{"post_processor": {"single": [{"SpecialToken": {"id": "x"}}], "special_tokens": {"x": {"ids": ['
            + "0, " * 1000
            + "0]}}}}",
        ),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"tokenizer_class": 3}'),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", null]}}'),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named_with_the_reason(
    tmp_path: Path, chatty: Pair, name: str, content: str
) -> None:
    target = Path(shutil.copytree(chatty[0], tmp_path / "target"))
    (target / name).write_text(content)
    (target / "theirs.py").write_text("raise SystemExit('code of a checkpoint ran')")
    with pytest.raises(CheckpointError, match="the tokenizer in target cannot be read: "):
        pipeline(target, engine_config=engine_config(chatty, None))


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": 3}', "[" * 5000])
def test_a_damaged_config_is_refused_in_our_words_before_the_tokenizer_is_read(
    tmp_path: Path, chatty: Pair, content: str
) -> None:
    target = Path(shutil.copytree(chatty[0], tmp_path / "target"))
    (target / "config.json").write_text(content)
    with pytest.raises(CheckpointError) as caught:
        pipeline(target, engine_config=engine_config(chatty, None))
    assert "tokenizer" not in str(caught.value)


def test_a_template_that_raises_is_an_error_in_three_parts(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe.tokenizer, "chat_template", "{{ messages[0].content.nothing.at_all }}")
    with pytest.raises(ConfigError, match="chat template refuses this chat: UndefinedError"):
        pipe([{"role": "user", "content": "hi"}])
