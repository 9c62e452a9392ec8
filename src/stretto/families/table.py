"""The families by `model_type`, found in the files of own/ and among what add-ons and packages of users offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from stretto import addons
from stretto.families import own
from stretto.families.family import Family
from stretto.families.others import OTHERS
from stretto.families.traits import Traits

GROUP = "stretto.families"


def _find_families() -> dict[str, Family]:
    """Every `Family` that a file of own/ has under a public name, in order of files and of lines; then others' by name.

    Raises: ConfigError if what is offered as a family is none, or has the `model_type` or an alias of another.
    """
    found: dict[str, Family] = {}
    for name in sorted(module.name for module in iter_modules(own.__path__)):
        for key, value in vars(import_module(f"{own.__name__}.{name}")).items():
            if not isinstance(value, Family) or key.startswith("_") or found.get(value.name) is value:
                continue
            assert value.name not in found, f"{name}.py: another file of own/ has a family {value.name}"
            found[value.name] = value
    for name, value in sorted(addons.load_all(GROUP).items()):
        if not isinstance(value, Family):
            raise addons.wrong(GROUP, name, f"it is {value!r}, which is no Family of stretto")
        if found.get(value.name) is value and name in (value.name, *value.traits.aliases):
            continue
        taken = {*found, *(alias for family in found.values() for alias in family.traits.aliases)}
        if same := sorted(taken & {value.name, *value.traits.aliases}):
            raise addons.wrong(GROUP, name, f"it is {same[0]!r}, which another family is")
        found[value.name] = value
    return found


FAMILIES = _find_families()
"""The families that our decoder supports (impl = "custom")."""
TRAITS: dict[str, Traits] = {
    **OTHERS,
    **{name: family.traits for name, family in FAMILIES.items()},
    **{
        alias: replace(family.traits, renderer=renderer)
        for family in FAMILIES.values()
        for alias, renderer in family.traits.aliases.items()
    },
}
"""What is known of every `model_type`, those of other families included."""
_SAME_NETWORK = {alias: family.name for family in FAMILIES.values() for alias in family.traits.aliases}

OFFERED = (*FAMILIES, *sorted(addons.registered(GROUP).keys() - FAMILIES.keys() - _SAME_NETWORK.keys()))
"""The families of FAMILIES, and those of add-ons that are not installed."""

_NONE = Traits()


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model that gives labels of a text, as reward models do, and no tokens."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def family_of(found: Mapping[str, Any]) -> str:
    """The family that a config.json's `model_type` names; "" if there is none."""
    name = found.get("model_type") or ""
    return _SAME_NETWORK.get(name, name)


def check_installed(family: str, needed_by: str) -> None:
    """Raises: ConfigError if it is the family of an add-on that is not installed; needed_by: what needs it."""
    if family not in FAMILIES and family in addons.registered(GROUP):
        addons.check(GROUP, family, needed_by)


def traits_of(name: str) -> Traits:
    """The traits of a `model_type`; the defaults for one that is not known here."""
    return TRAITS.get(name, _NONE)


def families_with(is_meant: Callable[[Traits], Any]) -> tuple[str, ...]:
    """The families of ours whose traits a function picks."""
    return tuple(name for name, family in FAMILIES.items() if is_meant(family.traits))


VISION_FAMILIES = families_with(lambda traits: traits.has_vision)
SPARSE_FAMILIES = families_with(lambda traits: traits.chooses_keys)
