"""What has to be known before torch differentiates twice: operations that it cannot, or gets wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from .graph import WEIGHT_NORM, graph_of, refuse_hidden

_WRONG = "WeightNormInterfaceBackward0"
_REFUSAL = (
    "torch's double backward of weight_norm's fused kernel is wrong, and so is every second derivative of this loss: "
    "run the forward pass inside `with hesscale.testing.twice_differentiable(model):`, which avoids that kernel"
)


def refuse_wrong_derivatives(y: Tensor) -> None:
    """Raises if the graph of ``y`` has an operation whose second derivatives torch gets wrong, or hides a part."""
    if y.requires_grad:
        rows = graph_of(y).rows
        refuse_hidden(rows)
        if any(row[0] == _WRONG for row in rows):
            raise RuntimeError(_REFUSAL)


@contextmanager
def twice_differentiable(model: nn.Module) -> Iterator[None]:
    """Forward passes in here avoid fused kernels whose backward has no derivative, or a wrong one as weight_norm's.

    >>> model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    >>> with hesscale.testing.twice_differentiable(model):
    ...     loss = model(torch.randn(2, 3, 8)).square().sum()
    >>> (bias,) = hesscale.testing.exact_diagonal(loss, model.norm2.bias)
    """
    with unfused(model), _PlainWeightNorm():
        yield


@contextmanager
def unfused(model: nn.Module) -> Iterator[None]:
    """Forward passes in here avoid the kernels of attention and recurrent layers, whose backward has no derivative."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        for backend in (torch.backends.mkldnn, torch.backends.cudnn) if recurrent else ():
            stack.enter_context(_quiet(backend.flags(enabled=False)))
        yield


@final
class _PlainWeightNorm(TorchFunctionMode):
    """weight_norm in single steps: g v / |v|."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is WEIGHT_NORM:
            return _weight_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


@contextmanager
def _quiet(context: AbstractContextManager[Any]) -> Iterator[None]:
    """The same context; mkldnn's warns on the way in and out of settings that are not touched here."""
    with warnings.catch_warnings(action="ignore"):
        context.__enter__()
    try:
        yield
    finally:
        with warnings.catch_warnings(action="ignore"):
            context.__exit__(None, None, None)
