"""Sampled drafts, accepted with min(1, p/q): the draft draws from its own distribution, the rest keeps the target's.

q is what the request's temperature and limits leave of the draft's logits, over the target's vocabulary and 0 for
tokens that the draft does not know; p the same of the target's. A draft d is accepted if u q(d) < p(d), u even in
[0, 1); at the first that is not, the token is drawn from max(p - q, 0), which holds none of d. Behind the last draft
the target's own draw stays. Numbers depend on seed, position and use alone: a position is decided about once, since
what was drafted behind a rejected draft is thrown away without having been looked at.
Source: Leviathan et al., arXiv 2211.17192, section 2.3 and appendix A.1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from eagle3core.kernels.card import Call
from eagle3core.kernels.choice.sample_kernels import COLDEST
from eagle3core.step.acceptance.rewritten import Verified
from eagle3core.step.draw import KEY, TEMPERATURE, TOP_K, DrawSettings, first_beyond, kept_tokens, mixed, uniform

DRAFT_NUMBERS, ACCEPT_NUMBERS = 1, 2  # uses of a position's numbers beside the target's own draw
_USE = 0x2545F4914F6CDD1D  # odd 64-bit constant (Marsaglia's xorshift64*), which keeps the uses apart


def numbers_of(key: Tensor, position: Tensor, use: int) -> Tensor:
    """f32 numbers in [0, 1) of positions under keys, int64 of one shape, for one of the uses."""
    return uniform(mixed(key ^ use * _USE), position)


def draw_drafts(
    logits: Tensor, lengths: Tensor, slots: Tensor, settings: DrawSettings, to_target: Tensor | None, level: int,
    drafted: Tensor,
) -> Call:  # fmt: skip
    """Replace the likeliest drafts of a chain's level by drawn ones, in rows that draw.

    Args:
        logits: `[B, Vd]` of the draft, -inf where a column is no token. lengths: `[B]` position of each root.
        slots: `[B]` whose rows, -1 for dead ones. to_target: `[Vd]` target ids, None where both are one.
        drafted: `[B]` int32 target ids of the likeliest, -1 where the logits are not finite; changed.
    """
    operands = {"logits": logits, "lengths": lengths, "slots": slots, "to_target": to_target, "level": level,
                "shares": settings.shares, "counts": settings.counts, "drafted": drafted}  # fmt: skip
    meaning = partial(_draw_drafts, logits, lengths, slots, settings, to_target, level, drafted)
    return Call("draw_drafts", operands, meaning)


def rejected(at: Verified, level_logits: Tensor, to_target: Tensor | None) -> Call:
    """Rewrite `at.choices` of a chain's rows that draw; their drafts were drawn from `level_logits: [k, S, Vd]`."""
    operands = {**at.operands, "level_logits": level_logits, "to_target": to_target}
    return Call("accept_by_rejection", operands, partial(_reject, at, level_logits, to_target))


def _draw_drafts(
    logits: Tensor, lengths: Tensor, slots: Tensor, settings: DrawSettings, to_target: Tensor | None, level: int,
    drafted: Tensor,
) -> None:  # fmt: skip
    shares, counts, draws = _settings_of(settings, slots)
    draws = draws & (drafted >= 0)
    kept = _kept(logits, shares, counts, draws)
    numbers = numbers_of(counts[:, KEY], lengths.long() + 1 + level, DRAFT_NUMBERS)
    drawn = first_beyond(kept, numbers)
    ids = drawn if to_target is None else to_target[drawn]
    drafted.copy_(ids.to(drafted.dtype).where(draws, drafted))


def _reject(at: Verified, level_logits: Tensor, to_target: Tensor | None) -> None:
    batch, nodes = at.tokens.shape
    shares, counts, draws = _settings_of(at.draws, at.slots)
    draws = draws & at.goes_by_rule
    logits = at.logits.view(batch, nodes, -1)
    for level in range(nodes - 1):
        token, chosen = at.tokens[:, level + 1].long(), at.choices[:, level]
        decides = draws & (chosen >= 0)
        p = _shared_out(_kept(logits[:, level], shares, counts, decides))
        q = over_target(_shared_out(_kept(level_logits[level, :batch], shares, counts, decides & (token >= 0))), p,
                        to_target)  # fmt: skip
        # Without a draft there is nothing to reject: what is left to draw from is p.
        q = q.where((token >= 0)[:, None], 0.0)
        position = at.positions[:, level].long() + 1
        ratio = numbers_of(counts[:, KEY], position, ACCEPT_NUMBERS).to(p.dtype)
        at_token = token.clamp_min(0)[:, None]
        of_p, of_q = p.gather(1, at_token)[:, 0], q.gather(1, at_token)[:, 0]
        is_accepted = (token >= 0) & (ratio * of_q < of_p)
        rest = (p - q).clamp_min(0.0)
        has_rest = rest.sum(dim=1) > 0  # rounding alone can leave none, where p and q are one
        drawn = first_beyond(rest, uniform(counts[:, KEY], position)).to(chosen.dtype).where(has_rest, chosen)
        at.choices[:, level] = token.to(chosen.dtype).where(is_accepted, drawn).where(decides, chosen)


def over_target(q: Tensor, p: Tensor, to_target: Tensor | None) -> Tensor:
    """The draft's probabilities `q: [B, Vd]` over the columns of the target's `p: [B, V]`, 0 for what it does not know.

    Columns that pad either vocabulary hold 0.
    """
    n = q.shape[1]
    columns = torch.arange(n, device=q.device) if to_target is None else to_target[:n].long()
    full = torch.zeros_like(p)
    # A padding column may name any token, and adds 0 to it; columns behind the target's last are padding too.
    return full.index_add_(1, columns.clamp(0, p.shape[1] - 1), q.to(p.dtype))


def _settings_of(settings: DrawSettings, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Settings of rows, `[B, 4]` and `[B, 2]`, and which of them draw."""
    row = slots.clamp_min(0).long()
    shares, counts = settings.shares[row], settings.counts[row]
    return shares, counts, (shares[:, TEMPERATURE] >= COLDEST) & (slots >= 0)


def _kept(logits: Tensor, shares: Tensor, counts: Tensor, draws: Tensor) -> Tensor:
    """`kept_tokens` of rows that draw, and of others something finite that nobody uses."""
    shares = shares.clone()
    shares[:, TEMPERATURE] = shares[:, TEMPERATURE].where(draws, 1.0)
    return kept_tokens(logits.where(draws[:, None], 0.0), shares, counts[:, TOP_K])


def _shared_out(kept: Tensor) -> Tensor:
    return kept / kept.sum(dim=1, keepdim=True)
