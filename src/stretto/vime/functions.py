"""`get`, `run` and `load_function`, which rollout functions import; an add-on has them."""

from stretto.vime import __getattr__ as __getattr__
