"""Policies as JSON: a session on disk says which policy it was made with."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxkv.policies.base import Policy


def to_json(policy: Policy) -> dict[str, Any]:
    """Class and fields of a policy, those it wraps included. What JSON cannot hold is described by
    its `repr`, which is enough to compare and not to rebuild.
    """
    fields = {f.name: _value(getattr(policy, f.name)) for f in dataclasses.fields(policy)}
    return {"policy": type(policy).__qualname__, "fields": fields}


def _value(value: Any) -> Any:
    if isinstance(value, Policy):
        return to_json(value)
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"repr": repr(value)}


def from_json(content: dict[str, Any]) -> Policy:
    """The policy that `to_json` described.

    Raises:
      ValueError: its class is not known here, or a field could not be written.

    """
    name, fields = content["policy"], content["fields"]
    known = {cls.__qualname__: cls for cls in _subclasses(Policy)}
    if name not in known:
        raise ValueError(f"the policy {name} is not defined here: import it first")
    values = {}
    for field, value in fields.items():
        if isinstance(value, dict) and "repr" in value:
            raise ValueError(
                f"{name} was made with {field}={value['repr']}, which is not stored: "
                "give policy=..."
            )
        values[field] = from_json(value) if isinstance(value, dict) else _tuples(value)
    # The fields were checked when the policy was made, and some follow from others.
    instance = object.__new__(known[name])
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _subclasses(cls: type[Policy]) -> Iterator[type[Policy]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
