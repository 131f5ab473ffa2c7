"""One row's experts, chosen by every block that reads them: no launch between the router's logits and the maps.

A launch of one block there takes as long as an expert's matrices to be read (docs/log.md). Of one row a warp needs no
lists: it picks the experts in turn, each is a group of one row, and copies of the first begin before anything else is
known. One block leaves choice and shares for those who come later.

Source: derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3core.kernels.experts.routing.choose import check_choice
from eagle3core.kernels.experts.routing.lists import Routed
from eagle3core.kernels.experts.routing.pick import make_leave, make_pick, words_of


@dataclass(frozen=True)
class Choice:
    """What the maps choose by: experts there are, those of a row, and whether shares are of these alone."""

    experts: int
    n_chosen: int
    is_normalised: bool

    @property
    def name(self) -> str:
        return f"_{self.n_chosen}of{self.experts}{'' if self.is_normalised else '_all'}"


def choice_of(routed: Routed, is_normalised: bool) -> Choice | None:
    """What the maps choose the experts of these rows by; None where `choose` has done so for them.

    Raises:
        KernelLimit: more experts, or chosen ones, than a warp handles.
    """
    (n, n_chosen), experts = routed.chosen.shape, routed.logits.shape[1]
    check_choice(experts, n_chosen)
    return Choice(experts, n_chosen, is_normalised) if n == 1 else None


def make_groups(isa: Any, choice: Choice | None, *, hurries: bool = True) -> tuple[Any, Any, Any, Any]:
    """Inlined `find(given, values, logits, at, warp, lane)`, `group_of`, `place_of`, `leave_choice`, of whole warps.

    `find` gives (groups there are, groups, taken, top): those `given`, as `Lists` has them, or where there is a
    `choice` what the row of `logits` picks. `group_of(groups, i)`: (expert, first place, rows, 0); `place_of(places,
    i)`; `leave_choice(values, taken, top, chosen, shares, lane)`, with what `find` gave.
    `hurries`: each warp of a block picks for itself; else the first does, and leaves it at shared address `at`, for
    which all meet: while another kernel still multiplies on the processor.
    """
    i32, i64 = isa.i32, isa.i64
    if choice is None:

        def find(given: Any, values: Any, logits: Any, at: Any, warp: Any, lane: Any) -> Any:
            return isa.load_u32(given), given, i32(0), isa.f32_of_bits(i32(0))

        def group_of(groups: Any, i: Any) -> Any:
            return isa.load_u32x4(groups + 16 + i64(i) * 16)

        def place_of(places: Any, i: Any) -> Any:
            return isa.load_u32(places + i64(i) * 4)

        def leave_choice(values: Any, taken: Any, top: Any, chosen: Any, shares: Any, lane: Any) -> None:
            pass

    else:
        n_words, n_chosen = words_of(choice.experts), choice.n_chosen
        pick = make_pick(isa, experts=choice.experts, n_chosen=n_chosen)
        leave = make_leave(isa, experts=choice.experts, n_chosen=n_chosen, is_normalised=choice.is_normalised)

        def pick_groups(values: Any, logits: Any, lane: Any) -> Any:
            taken, top, mine = pick(values, logits, i32(0), lane)
            place = i32(0)  # how many of the row's experts have a lower number
            for j in range(n_words):
                word, first = isa.ballot((taken >> j) & 1), i32(mine - j * 32)
                if first >= 32:
                    place = i32(place + isa.popcount(word))
                elif first > 0:
                    place = i32(place + isa.popcount(i32(word & ((1 << first) - 1))))
            return taken, top, mine, place

        pick_groups = isa.inlined(pick_groups)

        def find(given: Any, values: Any, logits: Any, at: Any, warp: Any, lane: Any) -> Any:
            if hurries:
                taken, top, mine, place = pick_groups(values, logits, lane)
                return i32(n_chosen), (mine, place), taken, top
            if warp == 0:
                _, _, mine, place = pick_groups(values, logits, lane)
                if lane < n_chosen:
                    isa.shared_store_u32(i32(at + lane * 8), mine)
                    isa.shared_store_u32(i32(at + lane * 8 + 4), place)
            isa.cuda.syncthreads()
            mine = place = i32(0)
            if lane < n_chosen:
                mine, place = isa.shared_load_u32(i32(at + lane * 8)), isa.shared_load_u32(i32(at + lane * 8 + 4))
            return i32(n_chosen), (mine, place), i32(0), isa.f32_of_bits(i32(0))

        def group_of(groups: Any, i: Any) -> Any:
            return isa.shuffle_i32(groups[0], i), isa.shuffle_i32(groups[1], i), i32(1), i32(0)

        def place_of(places: Any, i: Any) -> Any:
            return i32(i)

        def leave_choice(values: Any, taken: Any, top: Any, chosen: Any, shares: Any, lane: Any) -> None:
            leave(values, taken, top, chosen, shares, i32(0), lane)

    return isa.inlined(find), isa.inlined(group_of), isa.inlined(place_of), isa.inlined(leave_choice)
