"""Dense matrices by the plainest means there are: one ``torch.autograd.grad`` per row, no batching, no sharing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case


def rows(y: Tensor, xs: list[Tensor]) -> Tensor:
    """The Jacobian of ``y`` with respect to all ``xs`` in one vector, [outputs, inputs]."""
    found = []
    for entry in y.reshape(-1):
        grads = torch.autograd.grad(entry, xs, retain_graph=True, allow_unused=True, materialize_grads=True)
        found.append(torch.cat([grad.reshape(-1) for grad in grads]))
    return torch.stack(found)


def forward(case: Case) -> tuple[Tensor, Tensor]:
    inputs, targets = case.batch
    buffers = {name: buffer.clone() for name, buffer in case.model.named_buffers()}
    with sdpa_kernel(SDPBackend.MATH):
        outputs = torch.func.functional_call(case.model, buffers, (inputs,))
    return outputs, case.loss_fn(outputs, targets)


def hessian(case: Case) -> Tensor:
    """The Hessian of the loss with respect to all parameters."""
    params = list(case.model.parameters())
    _, loss = forward(case)
    slopes = torch.autograd.grad(loss, params, create_graph=True)
    return rows(torch.cat([slope.reshape(-1) for slope in slopes]), params)


def ggn(case: Case) -> Tensor:
    """Jᵀ H J."""
    outputs, loss = forward(case)
    (slope,) = torch.autograd.grad(loss, outputs, create_graph=True)
    jacobian = rows(outputs, list(case.model.parameters()))
    return jacobian.T @ rows(slope, [outputs]) @ jacobian


def flat(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([s.reshape(-1) for s in found.values()])
