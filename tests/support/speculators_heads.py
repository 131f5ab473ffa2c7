"""Heads written by vllm-project/speculators itself, and what its own model computes of them.

Run by the Python of an environment that has speculators (tools/speculators_env.py), never imported by the tests: its
pins are other people's. Reads a request, a JSON object of `target` (directory), `prompt` (ids), `k` (passes) and
`heads` (name to `Head`'s fields); writes for every head a directory as `save_pretrained` does, and in it `logits.pt`:

    served, trained: `[k, Vd]` fp32 logits of the first pass and of k - 1 chained ones, greedy, at the prompt's end, the
        window counted by position, as heads are served, or by root, as speculators trains; equal without a window.
    tokens: `[k]` target ids that `served` chooses. first: the target's own next token, with which they begin.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, core
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.cli import create_transformer_layer_config
from speculators.train.config.schema import TrainConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
        layer: "llama" or "qwen3". keys: further ones of the layer's config.
        flags: keys of the head. draft_vocab: None for the target's. window: of its attention, or None.
        trained: options of the training command, which then makes the head, in place of all the above; {} none.
    """

    layer: str = "llama"
    keys: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    draft_vocab: int | None = None
    window: int | None = None
    trained: dict[str, Any] | None = None


def layer_config(head: Head, target: Any) -> Any:
    """The decoder layer's config: the target's widths, then what the head says."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    shared = {name: getattr(target, name) for name in names if hasattr(target, name)}
    slides = {} if head.window is None else {"sliding_window": head.window, "layer_types": ["sliding_attention"]}
    if head.window is not None and head.layer == "qwen3":
        slides["use_sliding_window"] = True
    return LAYERS[head.layer](**{**shared, "num_hidden_layers": 1, **slides, **head.keys})


def vocabulary(draft: int, full: int) -> tuple[Tensor | None, Tensor | None]:
    """t2d and d2t as `build_vocab_mappings_from_distribution` gives them for random counts; None of a full one."""
    if draft == full:
        return None, None
    ids = torch.randperm(full)[:draft].sort().values
    t2d = torch.zeros(full, dtype=torch.bool).index_fill_(0, ids, True)
    return t2d, ids - torch.arange(draft)


def new_model(head: Head, directory: str, target: Any) -> Eagle3DraftModel:
    """A model with random weights."""
    if head.trained is not None:
        model = as_trained(directory, target, head.trained)
    else:
        layer = layer_config(head, target)
        layer._attn_implementation = "eager"
        config = Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=head.draft_vocab or target.vocab_size,
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy", verifier=VerifierConfig.from_pretrained(directory),
            ),
            **head.flags,
        )  # fmt: skip
        model = Eagle3DraftModel(config)
        model.load_vocab_mappings(*vocabulary(model.draft_vocab_size, target.vocab_size))
    for name, tensor in model.named_parameters():
        scale = 0.5 if "embed" in name else 3.0 if "lm_head" in name else tensor.shape[-1] ** -0.5
        random = torch.randn_like(tensor)
        tensor.data = 1.0 + 0.3 * random if tensor.dim() == 1 and "norm" in name else scale * random
    return model.float().eval()


def as_trained(directory: str, target: Any, draft: dict[str, Any]) -> Eagle3DraftModel:
    """A model as the training command makes it, by its own functions and every default that `draft` leaves."""
    asked = TrainConfig(
        speculator_type="eagle3",
        verifier={"verifier_name_or_path": directory},
        draft={**draft, "draft_attn_impl": "eager"},
    ).flatten()
    layer = create_transformer_layer_config(
        directory, asked["num_layers"], asked["draft_arch"], asked["draft_hidden_act"], asked["sliding_window"],
        asked["full_attention_indices"], asked["draft_mrope_full_head_hack"],
    )  # fmt: skip
    asked["draft_vocab_size"] = asked["draft_vocab_size"] or target.vocab_size
    t2d, d2t = vocabulary(asked["draft_vocab_size"], target.vocab_size)
    return Eagle3DraftModel.from_training_args(layer, t2d=t2d, d2t=d2t, **asked)


def target_states(model: Any, ids: list[int], taps: list[int]) -> tuple[Tensor, int]:
    """`[n, taps * H]` inputs of layers (id n: what leaves the last) over `ids`, and the next token."""
    last: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    streams = [*out.hidden_states[:-1], last[0]]
    return torch.cat([streams[i][0] for i in taps], dim=-1), int(out.logits[0, -1].argmax())


class Window:
    """The mask of chained passes: theirs, in which the keys of the first pass stay, or one of positions.

    In pass s a row stands s positions past its root, so of the first pass it sees s keys fewer.
    """

    def __init__(self, length: int | None) -> None:
        self.length, self.theirs = length, core.extend_dense_mask_for_draft_tokens

    def __call__(self, mask: Tensor, rows: int) -> Tensor:
        extended = self.theirs(mask, rows)
        if self.length is None:
            return extended
        step = mask.shape[-1] // rows  # of the pass that this mask is for
        back = torch.arange(rows)[:, None] - torch.arange(rows)
        extended[..., :rows].masked_fill_(back >= self.length - step, float("-inf"))
        return extended


def logits_of(model: Eagle3DraftModel, states: Tensor, ids: list[int], k: int, mask: Window) -> tuple[Tensor, Tensor]:
    """Logits `[k, Vd]` and target ids `[k]` that follow `ids`, each token drafted from the logits before it.

    Passes of the model are teacher-forced, so it is run again with every token that it has chosen.
    """
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *given: seen.append(given[2][0].detach()))
    root, drafted = len(ids) - 2, list[int]()
    core.extend_dense_mask_for_draft_tokens = mask
    for _ in range(k):
        entries = [*ids[1:], *drafted, *[0] * (k - len(drafted))]
        fed = torch.cat([states, torch.zeros(len(entries) - len(states), states.shape[1])])
        seen.clear()
        with torch.no_grad():
            model(
                fed[None], torch.tensor([entries]), torch.zeros(1, len(entries), dtype=torch.long),
                position_ids=torch.arange(len(entries))[None], ttt_steps=k,
            )  # fmt: skip
        choice = int(seen[len(drafted)][root].argmax())
        drafted.append(choice if model.d2t is None else choice + int(model.d2t[choice]))
    hook.remove()
    core.extend_dense_mask_for_draft_tokens = mask.theirs
    return torch.stack([logits[root] for logits in seen]), torch.tensor(drafted)


def main(request: dict[str, Any], out: Path) -> None:
    """Every head of a request, under `out`."""
    target = AutoModelForCausalLM.from_pretrained(request["target"], dtype=torch.float32, attn_implementation="eager")
    for i, (name, fields) in enumerate(request["heads"].items()):
        torch.manual_seed(i)
        head = Head(**fields)
        model = new_model(head, request["target"], target.config)
        model.save_pretrained(out / name)
        n = target.config.num_hidden_layers
        taps = model.config.eagle_aux_hidden_state_layer_ids or [2, n // 2, n - 3]
        states, first = target_states(target, request["prompt"], taps)
        ids, theirs = [*request["prompt"], first], core.extend_dense_mask_for_draft_tokens
        window = model.sliding_window if model.uses_sliding_window_attn else None
        trained, _ = logits_of(model, states, ids, request["k"], Window(None))
        served, tokens = logits_of(model, states, ids, request["k"], Window(window))
        assert core.extend_dense_mask_for_draft_tokens is theirs
        torch.save(
            {"served": served, "trained": trained, "tokens": tokens, "first": torch.tensor([first])},
            out / name / "logits.pt",
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
