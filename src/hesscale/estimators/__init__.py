"""Every way to a diagonal behind one call: propagated, exact, sampled, Kronecker-factored, squared gradients."""

from .call import ESTIMATORS as ESTIMATORS
from .call import estimate as estimate
from .call import estimate_over as estimate_over
from .likelihood import LIKELIHOODS as LIKELIHOODS
