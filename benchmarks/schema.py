"""What suites write as JSON, and its JSON Schema (draft 2020-12), made from its dataclasses.

A file begins with its layout: a name, which is the suite's, and a version. JSON has no infinity and no NaN: where a
distance has no number, there is `null`.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from encore.compare.outcome import finite

DIALECT = "https://json-schema.org/draft/2020-12/schema"
SCALARS: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": ["number", "null"]},
    str: {"type": "string"},
    types.NoneType: {"type": "null"},
}
"""A float may be none that JSON knows."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How the files of a suite begin."""

    name: str
    version: int

    def to_json(self, found: Mapping[str, Any]) -> str:
        """A file of this layout."""
        return json.dumps({self.name: self.version, **finite(found)}, indent=2, allow_nan=False)

    def schema(self, suite: type) -> dict[str, Any]:
        """What such a file looks like, whose content is this dataclass."""
        held = _schema(suite)
        held["properties"] = {self.name: {"const": self.version}, **held["properties"]}
        held["required"] = [self.name, *held["required"]]
        return {"$schema": DIALECT, "title": f"{self.name}, version {self.version}", **held}


class Written:
    """Results of a suite, which are written as JSON: a frozen dataclass with a `layout`."""

    __slots__ = ()
    layout: ClassVar[Layout]

    def to_json(self) -> str:
        """Everything as JSON; the first key names the layout and has its version."""
        return self.layout.to_json(dataclasses.asdict(self))  # type: ignore[call-overload]

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The JSON Schema of such a file."""
        return cls.layout.schema(cls)


def _schema(kind: Any) -> dict[str, Any]:
    if kind in SCALARS:
        return dict(SCALARS[kind])
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        fields = {field.name: _schema(hints[field.name]) for field in dataclasses.fields(kind)}
        return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    origin, held = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(one) for one in held]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(held[1])}
    if origin is tuple and held[1:] == (...,):
        return {"type": "array", "items": _schema(held[0])}
    if origin is tuple:
        items = [_schema(one) for one in held]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    raise TypeError(f"no schema is known for {kind}")
