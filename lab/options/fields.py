"""A field of options: its default, its help, how it is typed, and the values it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

# one: a value; several: values after one flag; repeated: the flag may come again; maybe: a flag with or without value.
Shape = Literal["one", "several", "repeated", "maybe"]


@dataclass(frozen=True)
class Typed:
    """How a field stands on the command line.

    Attributes:
        flag: as typed; None is the field's name with dashes, "" a position of its own.
        metavar: what stands for the value in the help.
        allowed: values in words, where type and limits do not say them.
        variable: of the environment, that gives the value where the flag does not.
        is_hidden: for our own child processes.
    """

    flag: str | None = None
    metavar: str | None = None
    shape: Shape = "one"
    allowed: str | None = None
    variable: str | None = None
    is_hidden: bool = False


class Options(BaseModel):
    """Options of a command. Fields made by `option` can be typed; others are for callers in Python."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def option(
    default: Any,
    description: str,
    *,
    flag: str | None = None,
    metavar: str | None = None,
    shape: Shape = "one",
    allowed: str | None = None,
    variable: str | None = None,
    is_hidden: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A field that can be typed; `...` as default makes it needed, `ge`, `gt`, `le`, `lt` are limits."""
    field: FieldInfo = Field(default, description=description, ge=ge, gt=gt, le=le, lt=lt)
    field.metadata.append(Typed(flag, metavar, shape, allowed, variable, is_hidden))
    return field


def typed_of(field: FieldInfo) -> Typed | None:
    """How a field stands on the command line; None for one that cannot be typed."""
    return next((one for one in field.metadata if isinstance(one, Typed)), None)
