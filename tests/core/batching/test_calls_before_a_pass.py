"""What an engine asks of torch between a prompt's arrival and the launch of its pass: as little as a copy or three."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_engines import Pair, new_tokens, plain_tokens, random_prompts, tiny_engine
from torch.utils._python_dispatch import TorchDispatchMode

from eagle3core import Engine, GenerationConfig
from eagle3core.step.replay import EagerReplayer, Enqueue
from eagle3core.step.state import _tensors

pytestmark = pytest.mark.reference


class Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes what torch is asked for until a program runs, and which of it changes the device's state."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.written: list[tuple[str, bool]] = []
        self._state = {tensor.untyped_storage().data_ptr() for tensor in _tensors(engine.runner.state)}
        self._is_over = False
        engine.runner.replay_by(self)  # type: ignore[arg-type]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_over:
            self.calls.append(str(func))
            into = kwargs.get("out", args[0] if args else None)
            is_of_state = isinstance(into, torch.Tensor) and into.untyped_storage().data_ptr() in self._state
            if func._schema.is_mutable and is_of_state:
                waits_for_nothing = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
                self.written.append((str(func), bool(waits_for_nothing)))
        return func(*args, **kwargs)

    def whole(self, program: Any) -> Enqueue:
        """A program, at which the noting ends."""
        run = EagerReplayer().whole(program)

        def enqueue() -> None:
            self._is_over = True
            run()

        return enqueue


COPY = ("aten.copy_.default", True)


def asked_by(engine: Engine, prompt: list[int], limits: GenerationConfig) -> tuple[Asked, list[int]]:
    """What a prompt that arrives asks for, and the tokens that it gets."""
    with Asked(engine) as asked:
        handle = engine.add_request(prompt, limits)
        engine.advance()
    while engine.step():
        pass
    return asked, handle.token_ids


@pytest.mark.parametrize("n_tokens", [3, 30])
@pytest.mark.parametrize("k", [None, 3])
def test_a_prompt_like_the_one_before_takes_one_copy(pair: Pair, k: int | None, n_tokens: int) -> None:
    engine, prompts = tiny_engine(pair, k, prefill_chunk=64), random_prompts([n_tokens, n_tokens])
    engine.generate(prompts[:1], new_tokens(9))
    asked, tokens = asked_by(engine, prompts[1], new_tokens(9))
    assert (asked.calls, asked.written) == (["aten.slice.Tensor", COPY[0]], [COPY])
    assert [tokens] == plain_tokens(pair, prompts[1:], 9)


def test_a_prompt_of_other_length_and_temperature_takes_three_copies(pair: Pair) -> None:
    engine, prompts = tiny_engine(pair, 3, prefill_chunk=64), random_prompts([3, 30])
    drawn = GenerationConfig(9, ignore_eos=True, temperature=0.7, top_k=3, seed=7)
    [expected] = tiny_engine(pair, None).generate(prompts[1:], drawn)
    engine.generate(prompts[:1], new_tokens(9))
    asked, tokens = asked_by(engine, prompts[1], drawn)
    assert asked.written == [COPY] * 3, "its blocks, its draws, its tokens"
    assert len(asked.calls) <= 20, asked.calls  # of which 14 make the seed's key, on the host
    assert tokens == expected.token_ids
    asked, tokens = asked_by(engine, prompts[0], new_tokens(9))
    assert asked.written == [COPY] * 3, "blocks and draws are others again"
    assert [tokens] == plain_tokens(pair, prompts[:1], 9)


def test_prompts_that_arrive_together_take_a_copy_each_and_one(pair: Pair) -> None:
    engine, prompts = tiny_engine(pair, 3, prefill_chunk=256), random_prompts([5, 8, 11])
    with Asked(engine) as asked:
        handles = [engine.add_request(prompt, new_tokens(9)) for prompt in prompts]
        engine.advance()
    assert asked.written == [COPY] * 4
    while engine.step():
        pass
    assert [handle.token_ids for handle in handles] == plain_tokens(pair, prompts, 9)
