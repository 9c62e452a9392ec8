"""Functions of a user's own in vime's terms: what they are given, what they return, and how they reach the engine.

    from stretto.hooks import Sample, post

A run names them by import path: in the `args` of the environment `dataset` those about one sample, in
[orchestrator.hooks] those about batches. docs/data.md lists them all.
"""

from stretto.hooks.arguments import Arguments, get_model_url
from stretto.hooks.engine import post
from stretto.hooks.outputs import DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput
from stretto.hooks.sample import Sample

__all__ = [
    "Arguments",
    "DynamicFilterOutput",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "get_model_url",
    "post",
]
