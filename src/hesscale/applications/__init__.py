"""What a diagonal is for: pruning, continual learning, uncertainty, safe step sizes, a look at one's network.

Each module takes ``(model, loss_fn, batches)`` and the options of ``diagonal_over``: ``method=``, ``rank=``, or a
``diagonal=`` computed elsewhere.
"""

from . import consolidation as consolidation
from . import laplace as laplace
from . import pruning as pruning
from . import step_size as step_size
from .inspection import Inspection as Inspection
from .inspection import inspect as inspect
from .over_batches import diagonal_over as diagonal_over
