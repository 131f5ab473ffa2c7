"""A head from one published format to another: nothing is lost unsaid, and what was written is read back and compared.

Source: docs/requirements.md R-146, R-147, R-94, R-97.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle3core.checkpoint.containers.turbomind import DTYPES
from eagle3core.checkpoint.plan import HEAD
from eagle3core.checkpoint.writing.cut import cut_head
from eagle3core.checkpoint.writing.flat import write_flat
from eagle3core.checkpoint.writing.forms import FEATURES, FORMS, losses, without
from eagle3core.checkpoint.writing.gguf import write_gguf
from eagle3core.checkpoint.writing.head import Head, read_head, stand_in, target_of, with_tables, without_copies
from eagle3core.checkpoint.writing.turbomind import write_turbomind
from eagle3core.errors import CheckpointError, InvariantViolated
from eagle3core.geometry import Decision, DraftGeometry, TargetGeometry

FORMATS = tuple(FORMS)
_FLAT = ("specforge", "modelopt", "speculators")  # from the smallest file to the largest
GGUF_NAME = "eagle3.gguf"


@dataclass(frozen=True)
class Conversion:
    """What came of a conversion.

    Attributes:
        out: the directory written. geometry: of the head in it.
        names: stored name of every tensor, by SafeAILab name. decisions: how the source was read.
        said: what was dropped, copied or left out, a line each.
    """

    out: Path
    geometry: DraftGeometry
    names: dict[str, str]
    decisions: tuple[Decision, ...]
    said: tuple[str, ...]


def convert_draft(
    source: str | Path,
    out: str | Path,
    to: str,
    *,
    target: str | Path | None = None,
    dtype: torch.dtype | None = None,
    drop: Collection[str] = (),
    norm_output: str | None = None,
    kept: Sequence[int] | None = None,
) -> Conversion:
    """Write a head in another format, or with fewer tokens to choose among.

    Args:
        source: directory of a head. out: a directory that does not exist yet. to: one of `FORMATS`.
        target: its target; needed where the head's files leave open what the format has to say.
        dtype: of the tensors written; None keeps their bits.
        drop: names of features that may be lost. norm_output: as of `load_draft`.
        kept: target ids that the head shall choose among, any of those it has; None keeps them all.

    Raises:
        CheckpointError: `out` exists, the source cannot be read, `kept` names what the head does not choose among, or
            the format cannot hold something that `drop` does not name; nothing is written.
    """
    place, form = Path(out), FORMS[to]
    if place.exists() or place.is_symlink():
        raise CheckpointError(f"{place} exists", "a directory that does not exist yet", "name another, or remove it")
    shapes, knows_taps = (target_of(target), True) if target is not None else stand_in(source)
    head = read_head(source, shapes, taps_known=knows_taps, norm_output=norm_output, dtype=dtype)
    decisions = head.geometry.decisions
    _require_taps(head, target, form.names_taps)
    if kept is not None:  # of a head that the target shares, the target's own rows
        head = cut_head(with_tables(head, [HEAD], Path(target) if target is not None else None, dtype), kept)
    head, said = _fitted(head, to, shapes, target, drop, dtype)
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        names = _write(head, unfinished, to)
        _compare(head, read_head(unfinished, shapes, taps_known=head.taps_known))
        unfinished.chmod(0o755)
        unfinished.rename(place)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Conversion(place, head.geometry, names, decisions, tuple(said))


def fitting_format(source: str | Path, target: str | Path, *, norm_output: str | None = None) -> str:
    """The first flat format that loses nothing of a head, of those with a map that says which tokens it has.

    Raises:
        CheckpointError: the pair cannot be read.
    """
    shapes = target_of(target)
    head = read_head(source, shapes, taps_known=True, norm_output=norm_output)
    return next((to for to in _FLAT if not losses(head, FORMS[to], shapes.default_taps)), _FLAT[0])


def _require_taps(head: Head, target: str | Path | None, names_taps: bool) -> None:
    """Refuse to guess taps that a target would tell."""
    open_ones = [said for said in head.geometry.decisions if said.about == "taps" and said.other]
    is_unnamed = names_taps and not head.taps_known
    if target is None and (open_ones or is_unnamed):
        state = open_ones[0].line if open_ones else "the files name no taps, and the format has to"
        raise CheckpointError(
            f"which layers the head reads is open: {state}", "a target that tells", "give --target DIR"
        )


def _fitted(
    head: Head,
    to: str,
    shapes: TargetGeometry,
    target: str | Path | None,
    drop: Collection[str],
    dtype: torch.dtype | None,
) -> tuple[Head, list[str]]:
    """The head as the format can hold it, and what was done to make it so.

    Raises:
        CheckpointError: what it cannot hold, all of it.
    """
    form, folder = FORMS[to], Path(target) if target is not None else None
    usual = shapes.default_taps
    lost = losses(head, form, usual)
    refused = [name for name in lost if name not in drop]
    if refused:
        raise CheckpointError(
            f"{to} cannot hold {'; '.join(f'{name}: {FEATURES[name].says}' for name in refused)}",
            "a format whose readers obey it, or a head without it",
            f"choose another format, or lose it on purpose: --drop {' '.join(refused)}",
        )
    said = [f"dropped {name}: {FEATURES[name].says}" for name in lost]
    for name in lost:
        head = without(head, name, usual)
    head, shared = without_copies(head, folder)
    added = [name for name in form.tables if name not in head.weights]
    head = with_tables(head, added, folder, dtype)
    said += [f"left out {name}, which is the target's" for name in shared if name not in added]
    said += [f"copied {name} from the target" for name in added if name not in shared]
    kinds = {tensor.dtype for tensor in head.weights.values()}
    if form.is_16_bit and (len(kinds) > 1 or not kinds <= set(DTYPES.values())):
        stored = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise CheckpointError(
            f"{to} holds 16-bit values of one kind, the head's are {stored}", "bfloat16 or float16 throughout",
            "give --dtype bfloat16",
        )  # fmt: skip
    return head, said


def _write(head: Head, directory: Path, to: str) -> dict[str, str]:
    if to == "turbomind":
        return write_turbomind(head, directory)
    if to == "gguf":
        return write_gguf(head, directory / GGUF_NAME)
    return write_flat(head, directory, to)


def _compare(written: Head, read: Head) -> None:
    """That the directory says what was to be written, bit by bit.

    Raises:
        InvariantViolated: it does not; the directory is removed.
    """
    same_map = (written.draft_to_target is None) == (read.draft_to_target is None) and (
        written.draft_to_target is None or torch.equal(written.draft_to_target, read.draft_to_target)  # type: ignore[arg-type]
    )
    weights = written.weights
    changed = [
        name for name in sorted({*weights, *read.weights}) if not _equal(weights.get(name), read.weights.get(name))
    ]
    if changed or not same_map or written.geometry != read.geometry:
        what = changed or [f"{written.geometry} read as {read.geometry}"]
        raise InvariantViolated(
            f"what was written reads otherwise: {', '.join(what[:4])}", "the same head", "report this head's config"
        )


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Whether the bits are the same; of vectors the values, which a format may store wider."""
    if a is None or b is None or (a.dtype != b.dtype and a.dim() != 1):
        return False
    return torch.equal(a.double(), b.double()) if a.dim() == 1 else torch.equal(a, b)


def described(conversion: Conversion) -> list[str]:
    """A conversion for people: decisions, what was done, and where each tensor went."""
    width = max(map(len, conversion.names))
    return [
        *(decision.line for decision in conversion.decisions),
        *conversion.said,
        *(f"{name:{width}}  {stored}" for name, stored in sorted(conversion.names.items())),
    ]
