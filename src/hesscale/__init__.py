"""Diagonals of the Hessian of any network's loss, in one extra backward pass."""

from . import testing as testing
from .backward import attach as attach
from .backward import backward as backward
from .backward import diagonal as diagonal
from .errors import MissingRuleError as MissingRuleError
from .rules import register as register
from .rules.families import Bilinear as Bilinear
from .rules.families import Coupled as Coupled
from .rules.families import Elementwise as Elementwise
from .rules.families import Selection as Selection
from .rules.table import RuleTable as RuleTable

__version__ = "0.1.0"
