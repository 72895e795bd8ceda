"""All diagonals of an MLP for a thousand examples at once: every example gets a copy of the parameters.

Examples then do not interact, so one pass over the sum of their losses gives each of them its own diagonal: the same
numbers as one pass per example. The exact diagonals follow from full Hessians at the pre-activations:

    H_a = D Wᵀ H_a' W D + diag(f'' ∘ Wᵀg_a')        diag at W = diag(H_a) (h²)ᵀ,  D = diag f'(a)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.columns.dial import Rank

Diagonals = Sequence[Tensor]
"""One tensor [examples, *shape] per parameter, in the order of ``model.parameters()``."""

_SLOPES: Mapping[type[nn.Module], Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    nn.Tanh: lambda a: (1 - a.tanh() ** 2, -2 * a.tanh() * (1 - a.tanh() ** 2)),
    nn.ReLU: lambda a: ((a > 0).to(a.dtype), torch.zeros_like(a)),
}
"""f' and f'' by activation."""


def is_mlp(model: nn.Module) -> bool:
    """Whether the model is linear layers with one kind of known activation between them."""
    if not isinstance(model, nn.Sequential) or len(model) % 2 == 0:
        return False
    modules = list(model)
    kinds = {type(module) for module in modules[1::2]}
    return all(type(module) is nn.Linear for module in modules[::2]) and len(kinds) == 1 and kinds <= set(_SLOPES)


@dataclass(frozen=True)
class Stack:
    """A forward pass with one copy of the parameters per example."""

    params: tuple[Tensor, ...]  # weight [N, out, in], bias [N, out], weight, ...
    hidden: tuple[Tensor, ...]  # what each layer reads, [N, in, 1]
    pre_activations: tuple[Tensor, ...]  # what each layer writes, [N, out, 1]
    labels: Tensor
    activation: type[nn.Module]

    @property
    def logits(self) -> Tensor:
        """[N, classes]."""
        return self.pre_activations[-1].squeeze(-1)

    @property
    def loss(self) -> Tensor:
        """The sum of all examples' losses."""
        return F.cross_entropy(self.logits, self.labels, reduction="sum")


def stack(model: nn.Sequential, x: Tensor, y: Tensor) -> Stack:
    """The recorded pass of all examples."""
    params = tuple(p.detach().expand(len(x), *p.shape).clone().requires_grad_() for p in model.parameters())
    hidden, written = [x.unsqueeze(-1)], []
    for layer, (weight, bias) in enumerate(zip(params[::2], params[1::2], strict=True)):
        a = torch.bmm(weight, hidden[-1]) + bias.unsqueeze(-1)
        written.append(a)
        if 2 * layer + 1 < len(model):
            hidden.append(model[2 * layer + 1](a))
    return Stack(params, tuple(hidden), tuple(written), y, type(model[1]))


def propagated(stacked: Stack, method: str, *, rank: Rank = 0) -> Diagonals:
    """HesScale with ``rank`` columns, HesScaleGN or BL89, by the library itself, which keeps the copies apart."""
    diagonal = hesscale.diagonal(stacked.loss, stacked.params, method=method, rank=rank, retain_graph=True)
    return [torch.zeros_like(p) if s is None else s for s, p in zip(diagonal, stacked.params, strict=True)]


def squared_gradient(stacked: Stack) -> Diagonals:
    """g²."""
    return [g.square() for g in torch.autograd.grad(stacked.loss, stacked.params, retain_graph=True)]


@torch.no_grad()
def exact(stacked: Stack, *, gauss_newton: bool = False) -> Diagonals:
    """The diagonal of each example's Hessian, or without f'' of its Gauss-Newton matrix."""
    q = stacked.logits.softmax(1)
    g = q - F.one_hot(stacked.labels, q.shape[1])  # [N, units]
    curvature = torch.diag_embed(q) - q.unsqueeze(2) * q.unsqueeze(1)  # [N, units, units]
    diagonals: list[Tensor] = []
    for layer in range(len(stacked.hidden) - 1, -1, -1):
        diagonals = [*_spread(curvature.diagonal(dim1=1, dim2=2), stacked.hidden[layer]), *diagonals]
        if layer:
            weight = stacked.params[2 * layer]
            first, second = _SLOPES[stacked.activation](stacked.pre_activations[layer - 1].squeeze(-1))
            g_h = torch.bmm(weight.mT, g.unsqueeze(2)).squeeze(2)
            down = weight * first.unsqueeze(1)  # W D
            curvature = torch.bmm(down.mT, torch.bmm(curvature, down))
            if not gauss_newton:
                curvature = curvature + torch.diag_embed(second * g_h)
            g = first * g_h
    return diagonals


def _spread(s: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The diagonals at weight and bias of a layer with s, [N, out], at its output: s (h²)ᵀ and s itself."""
    return s.unsqueeze(2) * hidden.square().mT, s


def sampled_gauss_newton(stacked: Stack, samples: int, generator: torch.Generator) -> Iterator[Diagonals]:
    """GGN-MC's estimates from 1, 2, … ``samples`` targets drawn from the network's prediction.

    With one example KFAC's diag(G ⊗ A) is the same: the gradient of a weight is one outer product.
    """
    q = stacked.logits.detach().softmax(1)
    classes = torch.multinomial(q, samples, replacement=True, generator=generator)  # [N, samples]
    draws = q - F.one_hot(classes.T, q.shape[1]).to(q.dtype)  # [samples, N, classes]
    pulled = torch.autograd.grad(
        stacked.logits, stacked.pre_activations, draws, is_grads_batched=True, retain_graph=True
    )
    totals = [torch.zeros_like(rows[0]) for rows in pulled]
    for count in range(1, samples + 1):
        totals = [total + rows[count - 1].square() for total, rows in zip(totals, pulled, strict=True)]
        pairs = zip(totals, stacked.hidden, strict=True)
        yield [piece for total, h in pairs for piece in _spread(total.squeeze(-1) / count, h.detach())]


def probed_hessian(stacked: Stack, samples: int, generator: torch.Generator) -> Iterator[tuple[Diagonals, Diagonals]]:
    """For each of ``samples`` random sign vectors v: v ∘ Hv, and |Hv|."""
    slopes = torch.autograd.grad(stacked.loss, stacked.params, create_graph=True)
    for _ in range(samples):
        signs = [_signs(p, generator) for p in stacked.params]
        products = torch.autograd.grad(slopes, stacked.params, signs, retain_graph=True)
        yield [v * hv for v, hv in zip(signs, products, strict=True)], [hv.abs() for hv in products]


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.empty(like.shape, dtype=like.dtype).random_(2, generator=generator)
    return drawn.mul_(2).sub_(1)
