"""Tests of the core that also use an add-on: without it they are skipped."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from stretto import addons

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def is_here(name: str) -> bool:
    """Whether an add-on, such as `view`, is installed."""
    return find_spec(f"stretto_{name}") is not None


def needs(*names: str) -> pytest.MarkDecorator:
    """A mark for tests that use these add-ons."""
    missing = [f"stretto_{name}" for name in names if not is_here(name)]
    return pytest.mark.skipif(bool(missing), reason=f"without {', '.join(missing)}")


def families(*names: str) -> list[ParameterSet]:
    """Families of models as a test's parameters, each skipped where its add-on is not installed."""
    all_, offered = addons.registered("stretto.families"), addons.offers("stretto.families")
    missing = {name: addons.package_of(all_[name]) for name in names if name in all_ and name not in offered}
    return [
        pytest.param(name, marks=pytest.mark.skip(f"without {missing[name]}") if name in missing else ())
        for name in names
    ]


def missing_verbs() -> dict[str, str]:
    """The verbs of add-ons that are not installed, with their packages."""
    known = [(addons.registered(group), addons.offers(group)) for group in ("stretto.verbs", "stretto.config_verbs")]
    return {
        verb: addons.package_of(path) for all_, offered in known for verb, path in all_.items() if verb not in offered
    }


def skip_without_verb(verb: str) -> None:
    """Skip a test of a verb whose add-on is not installed."""
    if package := missing_verbs().get(verb):
        pytest.skip(f"without {package}")


def skip_if_told(said: str) -> None:
    """Skip a test whose command says that it needs an add-on, if that is really not installed."""
    for name in re.findall(r"needs the add-on stretto_(\w+), which is not installed", said):
        if not is_here(name):
            pytest.skip(f"without stretto_{name}")
