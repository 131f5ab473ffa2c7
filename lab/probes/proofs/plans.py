"""What each part proves, over which pairs: built when it is needed, and the kernels it needs, known without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch

from eagle3core.checkpoint import load_draft, load_target
from eagle3core.config import EngineConfig
from eagle3core.kernels import Variant, cubins, launch
from eagle3core.step import EagerReplayer, GraphReplayer, variants_of
from eagle3core.weights import PackedDraft, PackedTarget, pack_checkpoints, pack_draft, pack_target
from lab.options.formats import Formats
from lab.options.proofs import PartName
from lab.pairs import shipped_pair
from lab.pairs.planted import PlantedGeometry, TokenMap, empty_models, find_geometry
from lab.pairs.prompts import prompts_for
from lab.parity.recording import PairUnderTest
from lab.probes.proofs.adaptive import Adaptive, AdaptivePlan, draft_of_length
from lab.probes.proofs.check import Check
from lab.probes.proofs.identity import Identity, IdentityPlan
from lab.probes.proofs.kernel_parity import KernelParity, ParityPlan, wide_pair
from lab.probes.proofs.long import LongPlan, LongRuns
from lab.probes.proofs.memory_access import MemoryAccess
from lab.probes.proofs.prefill.checks import Prefill, PrefillPlan
from lab.probes.proofs.quiet import Quiet, QuietPlan
from lab.probes.proofs.serving.checks import Serving
from lab.probes.proofs.serving.plan import ServingPlan
from lab.probes.proofs.slots import FinishedSlots, SlotsPlan
from lab.probes.proofs.subject import Setting, Subject, open_subject
from lab.probes.proofs.tree_cost import H200_TREES, TreeCostPlan, TreeCosts
from lab.probes.proofs.waiting import Waiting, WaitingPlan
from lab.probes.proofs.watched_run import WatchedPlan

PARTS: tuple[str, ...] = get_args(PartName)
SHIPPED = "shipped"
SHIPPED_IDENTITY = IdentityPlan(
    tuple(range(8)), (1, 3, 8, 16, 64), 256, 768, shuffled=8, logit_slots=(1, 3), logit_tokens=48,
    trees=("dynamic-8/3/4", "dynamic-24/5/6", "mc_sim_7b_63", "dynamic-60/7/10"), tree_slots=(1, 3, 8, 16),
    crowded_ks=(0, 3, 7), crowded_slots=16, crowded_blocks=48,
)  # fmt: skip
PLANTED_IDENTITY = IdentityPlan(tuple(range(8)), (1,), 512, 32768 + 512 + 8)
PLANTED_COMPANY = IdentityPlan((0, 3, 7), (3,), 128, 4096 + 128 + 8, logit_slots=(1,), logit_tokens=32)


@dataclass(frozen=True)
class Plans:
    """Sizes of every part; the defaults are those that an engine on a GPU has to hold.

    Attributes:
        geometry: of the planted pair.
        shipped, planted: identity over trained prompts, and over one long planted prompt of `context` tokens.
        company: identity over four planted prompts of `company_context` tokens.
        n_prompts, prompt_tokens: of the trained ones.
        formats: of the planted pair's maps and caches.
    """

    geometry: str = "llama-3.1-8b"
    shipped: IdentityPlan = field(default_factory=lambda: SHIPPED_IDENTITY)
    planted: IdentityPlan = field(default_factory=lambda: PLANTED_IDENTITY)
    company: IdentityPlan = field(default_factory=lambda: PLANTED_COMPANY)
    context: int = 32768
    company_context: int = 4096
    n_prompts: int = 64
    prompt_tokens: int = 256
    parity: ParityPlan = field(default_factory=ParityPlan)
    parity_prompt_tokens: int = 48
    quiet: QuietPlan = field(default_factory=QuietPlan)
    slots: SlotsPlan = field(default_factory=SlotsPlan)
    long: LongPlan = field(default_factory=LongPlan)
    trees: TreeCostPlan = field(default_factory=lambda: H200_TREES)
    waiting: WaitingPlan = field(default_factory=WaitingPlan)
    prefill: PrefillPlan = field(default_factory=PrefillPlan)
    serving: ServingPlan = field(default_factory=ServingPlan)
    adaptive: AdaptivePlan = field(default_factory=AdaptivePlan)
    formats: Formats = field(default_factory=Formats)

    def settings(self, part: str) -> dict[str, list[Setting]]:
        """Engines that a part makes, by pair: "shipped", or the geometry's name."""
        parity = [self.parity.setting(self.parity_prompt_tokens)]
        return {
            "identity": {
                SHIPPED: self.shipped.settings(),
                self.geometry: [*self.planted.settings(), *self.company.settings()],
            },
            "parity": {SHIPPED: parity, self.geometry: parity},
            "quiet": {self.geometry: [self.quiet.setting()]},
            "slots": {self.geometry: [self.slots.setting()]},
            "long": {self.geometry: self.long.settings()},
            "memory": {SHIPPED: WatchedPlan().settings()},
            "trees": {self.geometry: self.trees.settings()},
            "waiting": {self.geometry: self.waiting.settings()},
            "prefill": {self.geometry: self.prefill.settings()},
            "serving": {SHIPPED: self.serving.settings()},
            "adaptive": {self.geometry: self.adaptive.settings()},
        }[part]


@dataclass
class Proofs:
    """Builds the checks of parts; pairs are opened once, when a part first needs one.

    Args:
        open_pair: gives the pair of a name, as `subject.open_subject`.
    """

    plans: Plans
    open_pair: Callable[[str], Subject] = open_subject
    _open: dict[str, Subject] = field(default_factory=dict)
    _folders: ExitStack = field(default_factory=ExitStack)

    def checks(self, part: str) -> Iterator[Check]:
        """Checks of a part, in the order to run them."""
        yield from {
            "identity": self._identity, "parity": self._parity, "quiet": self._quiet, "slots": self._slots,
            "long": self._long, "memory": self._memory, "trees": self._trees, "waiting": self._waiting,
            "prefill": self._prefill, "serving": self._serving, "adaptive": self._adaptive,
        }[part]()  # fmt: skip

    def close(self) -> None:
        """Remove what was written for Hugging Face to read."""
        self._folders.close()

    def pair(self, name: str) -> Subject:
        """The pair of that name."""
        if name not in self._open:
            self._open[name] = self.open_pair(name)
        return self._open[name]

    def _identity(self) -> Iterator[Check]:
        plans = self.plans
        prompts = self._trained_prompts(plans.n_prompts, plans.prompt_tokens)
        yield from Identity(self.pair(SHIPPED), prompts, plans.shipped).checks()
        wide = self.pair(plans.geometry)
        yield from Identity(wide, self._planted_prompts(1, plans.context), plans.planted).checks()
        together = replace(wide, name=f"{wide.name} x 4 prompts")
        yield from Identity(together, self._planted_prompts(4, plans.company_context), plans.company).checks()

    def _parity(self) -> Iterator[Check]:
        plans, shipped = self.plans, shipped_pair()
        prompts = self._trained_prompts(2, plans.parity_prompt_tokens)
        pair = PairUnderTest(shipped.target, shipped.draft, "bfloat16", self.pair(SHIPPED).target.device.type)
        yield from KernelParity(pair, self.pair(SHIPPED), prompts, plans.parity).checks()
        folder = Path(self._folders.enter_context(TemporaryDirectory()))
        device = self.pair(SHIPPED).target.device
        pair = wide_pair(folder / "pair", find_geometry(plans.geometry), device)
        wide = packed_from_disk(f"random {plans.geometry} layers", pair)
        random = torch.Generator().manual_seed(3)
        n_vocab = wide.target.geometry.vocab_size
        ids = [torch.randint(n_vocab, (n,), generator=random).tolist() for n in (37, 23)]
        yield from KernelParity(pair, wide, ids, plans.parity).checks()

    def _quiet(self) -> Iterator[Check]:
        [prompt] = self._planted_prompts(1, self.plans.quiet.context)
        yield from Quiet(self.pair(self.plans.geometry), prompt, self.plans.quiet).checks()

    def _slots(self) -> Iterator[Check]:
        plan = self.plans.slots
        prompts = self._planted_prompts(plan.slots, plan.context)
        yield from FinishedSlots(self.pair(self.plans.geometry), prompts, plan).checks()

    def _long(self) -> Iterator[Check]:
        [prompt] = self._planted_prompts(1, self.plans.long.context)
        yield from LongRuns(self.pair(self.plans.geometry), prompt, self.plans.long).checks()

    def _memory(self) -> Iterator[Check]:
        yield from MemoryAccess().checks()

    def _trees(self) -> Iterator[Check]:
        subject = self.pair(self.plans.geometry)
        yield from TreeCosts(subject, lambda n: self._planted_prompts(1, n)[0], self.plans.trees).checks()

    def _waiting(self) -> Iterator[Check]:
        yield from Waiting(self.pair(self.plans.geometry), self._planted_prompts, self.plans.waiting).checks()

    def _prefill(self) -> Iterator[Check]:
        yield from Prefill(self.pair(self.plans.geometry), self._planted_prompts, self.plans.prefill).checks()

    def _serving(self) -> Iterator[Check]:
        yield from Serving(self.plans.serving).checks()

    def _adaptive(self) -> Iterator[Check]:
        plans, subject = self.plans, self.pair(self.plans.geometry)
        block = subject.config(plans.adaptive.setting(1, drafts=True)).block_size

        def draft(length: float) -> PackedDraft:
            return draft_of_length(subject, find_geometry(plans.geometry), plans.adaptive.k, length, block)

        yield from Adaptive(subject, draft, self._planted_prompts, plans.adaptive).checks()

    def _trained_prompts(self, n: int, most: int) -> list[list[int]]:
        return [list(prompt.ids) for prompt in prompts_for(shipped_pair().target, limit=n, max_tokens=most)[0]]

    def _planted_prompts(self, n: int, length: int) -> list[list[int]]:
        subject = self.pair(self.plans.geometry)
        assert subject.tokens is not None, "the pair is planted"
        return planted_prompts(subject.tokens, n, length)


def planted_prompts(tokens: TokenMap, n: int, length: int, seed: int = 1) -> list[list[int]]:
    """Prompts of random tokens that end on the cycle, evenly spaced, so that outputs differ."""
    random = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(len(tokens.successor), (n, length), generator=random).tolist()
    ids = tokens.draft_to_target
    cycle = tokens.follow(int(ids[0]), len(ids))
    for i, prompt in enumerate(prompts):
        prompt[-1] = cycle[i * len(ids) // n]
    return prompts


def packed_from_disk(name: str, pair: PairUnderTest) -> Subject:
    """The pair that Hugging Face reads, packed on its device, a GPU."""
    device = pair.torch_device
    target, draft = packed(pair)
    return Subject(name, target, draft, None, launch.device_arch(device), GraphReplayer(device))


def packed(pair: PairUnderTest) -> tuple[PackedTarget, PackedDraft]:
    """Both models of a pair on disk."""
    target = load_target(pair.target, dtype=pair.torch_dtype)
    draft = load_draft(str(pair.draft), target.geometry, dtype=pair.torch_dtype)
    both, head = pack_checkpoints(target, draft, device=pair.torch_device, block=EngineConfig().block_size)
    assert head is not None, "the pair has a draft"
    return both, head


def needed_variants(plans: Plans, parts: Sequence[str], arch: str) -> list[Variant]:
    """Every kernel that parts run, found on the meta device: no GPU, no weights."""
    found: dict[tuple[str, str], Variant] = {}
    subjects = {
        SHIPPED: _shapes_of_shipped(arch),
        plans.geometry: shapes_of(find_geometry(plans.geometry), arch, plans.formats),
    }
    for part in parts:
        for name, settings in plans.settings(part).items():
            for setting in settings:
                runner = subjects[name].runner(setting)
                for variant in variants_of(runner.all_programs):
                    found[variant.name, repr(variant.constants)] = variant
    return [found[key] for key in sorted(found)]


def build(
    plans: Plans, parts: Sequence[str], arch: str, out: Path, *, share: tuple[int, int] = (0, 1),
    tell: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Compile what parts need into a folder of cubins, or every n-th of it (`share` = which, n); how many were made."""
    variants = needed_variants(plans, parts, arch)
    tell(f"{len(variants)} kernels for {arch}, {', '.join(parts)}")
    return cubins.build_cubins(variants[share[0] :: share[1]], arch, out, tell=tell)


_META = torch.device("meta")


def shapes_of(geometry: PlantedGeometry, arch: str, formats: Formats | None = None) -> Subject:
    """A geometry's pair without weights."""
    named: dict[str, Any] = {**(formats or {})}
    packed, head = empty_models(
        geometry, *(named.get(name, "as_stored") for name in ("draft_weights", "target_weights"))
    )
    target_cache, draft_cache = (named.get(name, "as_computed") for name in ("cache_dtype", "draft_cache_dtype"))
    settings = {"device": "cpu", "cache_dtype": target_cache}
    return Subject(geometry.name, packed, head, None, arch, _nothing(), settings, draft_cache_dtype=draft_cache)


def _shapes_of_shipped(arch: str) -> Subject:
    pair, block = shipped_pair(), EngineConfig().block_size
    target = load_target(pair.target, dtype=torch.bfloat16)
    draft = load_draft(str(pair.draft), target.geometry, dtype=torch.bfloat16)
    packed = pack_target(
        target.geometry, lambda name: target.weights[name].to(_META), dtype=torch.bfloat16, device=_META, block=block,
        taps=draft.geometry.taps,
    )  # fmt: skip
    weights = draft.weights
    head = pack_draft(draft.geometry, lambda name: weights[name].to(_META), draft.draft_to_target, packed, block=block)
    return Subject(SHIPPED, packed, head, None, arch, _nothing(), {"device": "cpu"})


def _nothing() -> EagerReplayer:
    """Programs of shapes are looked at, never run."""
    return EagerReplayer(lambda calls: None)
