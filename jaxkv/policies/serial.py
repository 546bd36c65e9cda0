"""Policies as JSON: a session on disk says which policy it was made with."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

from jaxkv.pod.plan import PodPlan
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
    if isinstance(value, PodPlan):
        return {"plan": _plan(value)}
    if isinstance(value, tuple):
        return [_value(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"repr": repr(value)}


def _plan(plan: PodPlan) -> dict[str, Any]:
    """What compares of a plan; of its maps, which are large, only a digest."""
    names = [field.name for field in dataclasses.fields(plan) if field.compare]
    content = {name: _value(getattr(plan, name)) for name in names}
    if plan.maps is not None:
        content["maps"] = hashlib.sha256(plan.maps.tobytes()).hexdigest()
    return content


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
        lost = _not_stored(value)
        if lost:
            raise ValueError(
                f"{name} was made with {field}={lost}, which is not stored: give policy=..."
            )
        values[field] = _restored(value)
    # The fields were checked when the policy was made, and some follow from others.
    instance = object.__new__(known[name])
    for field, value in values.items():
        object.__setattr__(instance, field, value)
    return instance


def _not_stored(value: Any) -> str | None:
    """What a field was made with and JSON does not hold; None where it holds all."""
    if not isinstance(value, dict):
        return None
    return "a plan with maps" if "maps" in value.get("plan", ()) else value.get("repr")


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return _tuples(value)
    if "plan" in value:
        return PodPlan(**{name: _tuples(field) for name, field in value["plan"].items()})
    return from_json(value)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _subclasses(cls: type[Policy]) -> Iterator[type[Policy]]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
