"""stretto: asynchronous reinforcement learning for language models.

run = stretto.rl("rl.toml")             train; also sft, evaluate
stretto.Run("outputs/demo").metrics()   look at a run; also rollouts, evals, plot
stretto.compare(["outputs/a", "outputs/b"])   also plot
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported: a command should start fast
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"
__all__ = ["Run", "compare", "evaluate", "plot", "rl", "sft"]


def __getattr__(name: str) -> Any:
    """The Python interface is found and imported when it is asked for: a command needs none of it.

    Raises: AttributeError, so that `hasattr` is False, also if the add-on that has it is not installed.
    """
    if name not in __all__:
        import sys  # with the module Python adds the name that is meant

        text = f"module 'stretto' has no attribute {name!r}; it has {', '.join(__all__)}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    from stretto.addons import load, offers, package_of, registered

    if name not in offers("stretto.names"):
        package = package_of(registered("stretto.names").get(name, "")) or f"that offers `{name}` (stretto.names)"
        raise AttributeError(f"stretto.{name} needs the add-on {package}, which is not installed; pip install stretto")
    return load("stretto.names", name, f"stretto.{name}")


def __dir__() -> list[str]:
    """What a notebook offers after `stretto.`"""
    from stretto.addons import offers

    return [*(name for name in __all__ if name in offers("stretto.names")), "__version__"]
