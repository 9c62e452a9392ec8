"""User functions ("hooks") in vime's terms: what they get, what they return, how they reach the engine.

    from stretto.vime import Sample, post

A run names hooks by import path: hooks about one sample in the `args` of the environment `dataset`, hooks about
batches in [orchestrator.hooks]. docs/data.md lists them all.
"""

from stretto.vime.arguments import Arguments, get_model_url
from stretto.vime.engine import post
from stretto.vime.outputs import DynamicFilterOutput, RecordedBatch, RolloutFnEvalOutput, RolloutFnTrainOutput
from stretto.vime.sample import Sample

__all__ = [
    "Arguments",
    "DynamicFilterOutput",
    "RecordedBatch",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "get_model_url",
    "post",
]
