"""Later turns are asked after the model's own greedy answers, and first-turn figures say that they are such."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.acceptance.measure import measure_acceptance
from lab.acceptance.turns import WORDS, ask_all_turns, which_turns
from lab.errors import ExperimentError
from lab.pairs import shipped_pair
from lab.pairs.prompts import Prompt, prompts_for

pytestmark = pytest.mark.reference

N_NEW = 6
ENTRIES = [
    {"question_id": 81, "category": "writing", "turns": ["def f(a):", "import os", "class A:"], "reference": []},
    {"question_id": 82, "category": "qa", "turns": ["x = 1"]},
    {"question_id": 83, "category": "qa", "turns": ["for i in range(9):", "return a"]},
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """First turns of a file in MT-bench's shape."""
    path = tmp_path_factory.mktemp("turns") / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, ENTRIES)))
    prompts, source = prompts_for(shipped_pair().target, str(path), limit=9, max_tokens=400)
    assert ", first turns alone, " in source
    assert "first" not in prompts_for(shipped_pair().target, str(path), limit=9, max_tokens=400, turns="all")[1]
    return prompts


def test_each_later_turn_follows_what_hugging_faces_model_answers_to_those_before(given: list[Prompt]) -> None:
    pair = shipped_pair()
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype="float32")
    asked = ask_all_turns(pair.target, pair.draft, given, max_new_tokens=N_NEW, max_prompt_tokens=400)
    assert [(prompt.id, prompt.turn) for prompt in asked.prompts] == [
        ("81", 1), ("82", 1), ("83", 1), ("81", 2), ("83", 2), ("81", 3)
    ]  # fmt: skip
    for entry in ENTRIES:
        chat: list[dict[str, str]] = []
        for turn, question in enumerate(entry["turns"], start=1):  # type: ignore[arg-type, var-annotated]
            chat.append({"role": "user", "content": question})
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
            [prompt] = [p for p in asked.prompts if (p.id, p.turn) == (str(entry["question_id"]), turn)]
            assert list(prompt.ids) == ids["input_ids"][0].tolist()
            answer = model.generate(**ids, max_new_tokens=N_NEW, do_sample=False)[0, len(prompt.ids) :]
            chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    assert asked.n_answers == 3
    assert "6 questions of up to 3 turns, the later ones after 3 answers of the model's own" in asked.source


def test_figures_are_named_for_their_turns_and_divided_by_them(given: list[Prompt]) -> None:
    pair = shipped_pair()
    asked = ask_all_turns(pair.target, pair.draft, given, max_new_tokens=N_NEW, max_prompt_tokens=12)
    assert [which_turns(prompts) for prompts in (given[1:2], given, asked.prompts)] == ["single", "first", "all"]
    assert "First turns alone" in WORDS["first"]
    assert not WORDS["single"]
    assert asked.n_cut_prompts == 3
    assert "keep their last tokens alone" in asked.source
    assert all(len(prompt.ids) <= 12 for prompt in asked.prompts if prompt.turn > 1)
    report = measure_acceptance(pair.target, pair.draft, asked.prompts, (2,), max_new_tokens=N_NEW, ignore_eos=True)
    turns = report.at(2).turns
    assert [(turn.category, turn.n_prompts) for turn in turns] == [("turn 1", 3), ("turn 2", 2), ("turn 3", 1)]
    assert sum(turn.n_steps for turn in turns) == report.at(2).n_steps
    first = measure_acceptance(pair.target, pair.draft, given, (2,), max_new_tokens=N_NEW, ignore_eos=True)
    assert first.at(2).turns == ()
    assert first.at(2).length == turns[0].length


def test_prompts_of_one_turn_stay_as_they_are(given: list[Prompt]) -> None:
    pair = shipped_pair()
    asked = ask_all_turns(pair.target, pair.draft, given[1:2], max_new_tokens=N_NEW, max_prompt_tokens=400)
    assert asked.prompts == given[1:2]
    assert "no prompt has more than one" in asked.source
    with pytest.raises(ExperimentError, match="no prompt"):
        ask_all_turns(pair.target, pair.draft, [], max_new_tokens=N_NEW, max_prompt_tokens=400)
