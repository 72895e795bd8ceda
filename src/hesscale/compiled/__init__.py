"""Forward, gradient and curvature as one graph for torch's compiler: the pass of walk.py, traced once."""

from .step import Step as Step
from .step import compile as compile
