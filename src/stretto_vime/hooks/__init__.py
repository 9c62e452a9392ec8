"""Functions written for vime: of whole batches, of training, and those that generate a sample.

A name here is one of `stretto.vime`, and of `stretto.vime.functions`.
"""

from stretto_vime.hooks.engine import post
from stretto_vime.hooks.functions import get, load_function, run
from stretto_vime.hooks.outputs import DynamicFilterOutput, RecordedBatch, RolloutFnEvalOutput, RolloutFnTrainOutput

__all__ = [
    "DynamicFilterOutput",
    "RecordedBatch",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "get",
    "load_function",
    "post",
    "run",
]
