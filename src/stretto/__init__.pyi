from stretto_python.run import Run as Run
from stretto_python.run import compare as compare
from stretto_python.run import plot as plot
from stretto_python.verbs import evaluate as evaluate
from stretto_python.verbs import rl as rl
from stretto_python.verbs import sft as sft

__all__: list[str]
__version__: str
