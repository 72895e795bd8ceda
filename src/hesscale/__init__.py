"""Diagonals of the Hessian of any network's loss, in one backward pass, beside the gradient."""

from . import applications as applications
from . import distributed as distributed
from . import estimators as estimators
from . import optim as optim
from . import testing as testing
from .backward import attach as attach
from .backward import backward as backward
from .backward import diagonal as diagonal
from .errors import MissingRuleError as MissingRuleError
from .estimators import estimate as estimate
from .estimators import estimate_over as estimate_over
from .inspection import Report as Report
from .inspection import check as check
from .optim import AdaBL89 as AdaBL89
from .optim import AdaGGNMC as AdaGGNMC
from .optim import AdaHesScale as AdaHesScale
from .optim import AdaHesScaleGN as AdaHesScaleGN
from .optim import AdaHessian as AdaHessian
from .rules import register as register
from .rules.families import Bilinear as Bilinear
from .rules.families import Coupled as Coupled
from .rules.families import Elementwise as Elementwise
from .rules.families import Selection as Selection
from .rules.table import RuleTable as RuleTable

__version__ = "0.1.0"
