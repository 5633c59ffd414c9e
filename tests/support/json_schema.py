"""The part of JSON Schema that `benchmarks.schema` uses, and no more: an unknown keyword is an error here."""

from __future__ import annotations

from typing import Any

NOTES = {"$schema", "title"}
KNOWN = {"const", "anyOf", "type", "properties", "required", "additionalProperties"} | {
    "items", "prefixItems", "minItems", "maxItems"
}  # fmt: skip
TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "integer": (int,), "number": (int, float), "string": (str,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def violations(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """Where the value is not what the schema says."""
    if unknown := schema.keys() - KNOWN - NOTES:
        raise ValueError(f"{where}: {unknown} is not checked here")
    if "const" in schema and value != schema["const"]:
        return [f"{where} is {value!r}, not {schema['const']!r}"]
    if "anyOf" in schema and all(violations(value, one, where) for one in schema["anyOf"]):
        return [f"{where} is none of {schema['anyOf']}"]
    kinds = schema.get("type", list(TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return [f"{where} is a {type(value).__name__}, not {kinds}"]
    if isinstance(value, list):
        return _array(value, schema, where)
    return _object(value, schema, where) if isinstance(value, dict) else []


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _array(value: list[Any], schema: dict[str, Any], where: str) -> list[str]:
    found = []
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        found.append(f"{where} has {len(value)} items")
    few = schema.get("prefixItems", [])
    for place, item in enumerate(value):
        found += violations(item, few[place] if place < len(few) else schema.get("items", {}), f"{where}[{place}]")
    return found


def _object(value: dict[str, Any], schema: dict[str, Any], where: str) -> list[str]:
    found = [f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value]
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", {})
    for name, held in value.items():
        if name not in properties and more is False:
            found.append(f"{where}.{name} is not known")
        else:
            found += violations(held, properties.get(name, more), f"{where}.{name}")
    return found
