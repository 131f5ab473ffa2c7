"""What is asked of the server: questions whose answers an offline engine gave before, and requests to be refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3core import EngineConfig, GenerationConfig, Response, pipeline
from lab.pairs import shipped_pair
from lab.pairs.prompts import load_prompts, uneven_prompts
from lab.probes.proofs.serving.plan import ServingPlan
from lab.serve.forms import REASONS

COMPLETIONS, CHATS, JSON = "/v1/completions", "/v1/chat/completions", "application/json"


@dataclass(frozen=True)
class Question:
    """A request and the answer that it has to get.

    Attributes:
        path, body: of the request. text, reason, n_tokens: of the answer.
    """

    path: str
    body: dict[str, Any]
    text: str
    reason: str
    n_tokens: int


@dataclass(frozen=True)
class Bad:
    """A request to be refused.

    Attributes:
        body: JSON, or the raw bytes. status: that refuses it.
    """

    body: dict[str, Any] | bytes
    status: int = 400
    path: str = COMPLETIONS
    method: str = "POST"
    kind: str = JSON


BAD = (
    Bad({}), Bad({"prompt": 7}), Bad({"prompt": []}), Bad({"prompt": "a", "max_tokens": 0}),
    Bad({"prompt": "a", "max_tokens": 10**9}), Bad({"prompt": "a", "temperature": -1}),
    Bad({"prompt": "a", "top_p": 2}), Bad({"prompt": "a", "n": 2}), Bad({"prompt": "a", "logprobs": 99}),
    Bad({"prompt": [10**9]}), Bad({"prompt": [1] * 5000}), Bad({"prompt": "a", "stop": [""]}),
    Bad({"messages": []}, path=CHATS), Bad({"messages": "a"}, path=CHATS),
    Bad({"messages": [{"role": "user", "content": 1}]}, path=CHATS),
    Bad(b"{"), Bad(b"[1]"), Bad(b'{"prompt": "a", "top_p": NaN}'), Bad(b"\xff\xfe"),
    Bad({"prompt": "a", "model": "another"}, 404), Bad({}, 404, "/v1/embeddings"), Bad({}, 405, method="PUT"),
    Bad({"prompt": "a"}, 415, kind="text/plain"),
)  # fmt: skip


def asked_offline(plan: ServingPlan) -> list[Question]:
    """Questions about the texts of the pair that ships, answered by plain greedy decoding, one at a time."""
    config = EngineConfig(session_len=plan.session_len, max_batch_size=1, dtype=plan.dtype, device=plan.device)
    with pipeline(shipped_pair().target, engine_config=config) as pipe:
        bodies = list(_bodies(plan, pipe.tokenizer))

        def answer(body: dict[str, Any], n: int) -> Response:
            prompt = body["messages"] if "messages" in body else body["prompt"]
            is_ids = isinstance(prompt, list) and isinstance(prompt[0], int)
            ids = prompt if is_ids else pipe.encode(prompt)
            return pipe.engine.generate([ids], GenerationConfig(max_new_tokens=n))[0]

        return [_question(path, body, n, answer(body, n)) for path, body in bodies for n in plan.n_tokens]


def _bodies(plan: ServingPlan, tokenizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Path and prompt of each question: a text, a chat about it, and as many token ids of joined texts."""
    pair = shipped_pair()
    assert pair.prompts is not None, "the pair that ships has prompts"
    texts = [prompt.text for prompt in load_prompts(pair.prompts, tokenizer, limit=plan.n_prompts)]
    ids = uneven_prompts(pair.target, len(texts), lengths=plan.prompt_tokens)
    for text, tokens in zip(texts, ids, strict=True):
        yield COMPLETIONS, {"prompt": text}
        yield COMPLETIONS, {"prompt": tokens}
        yield CHATS, {"messages": [{"role": "user", "content": text}]}


def _question(path: str, body: dict[str, Any], n: int, answer: Response) -> Question:
    common = {"max_tokens": n, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return Question(path, {**body, **common}, answer.text, REASONS[answer.finish_reason], len(answer.token_ids))
