"""Every way to a diagonal behind one call: propagated, exact, sampled, Kronecker-factored, squared gradients."""

from .api import ESTIMATORS as ESTIMATORS
from .api import estimate as estimate
from .api import estimate_over as estimate_over
