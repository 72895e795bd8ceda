"""The optimizers of the paper as the authors' experiments ran them, as a table, with the settings they selected.

With weight decay λ on weights, none on biases, m = EMA of g + λp and h the curvature of the loss without its L2 term:

    SGD                                  p ← p − lr (g + λp)
    Adam                                 p ← p − lr m̂ / (√V̂ + ε + λ)      V = EMA(g²), without λp
    AdaBL89, AdaHesScale, AdaHesScaleGN  p ← p − lr m̂ / (√V̂ + ε + λ)      V = EMA(h²)
    AdaGGNMC                             p ← p − lr m̂ / (V̂ + ε + λ)       V = EMA(h)
    AdaHessian                           p ← p − lr m̂ / (√V̂ + ε) − lr λp  V = EMA((Hv)²)
    AdamFused                            p ← p − lr m̂ / (√V̂ + ε)          V = EMA((g + λp)²), as torch has it

That λ also damps, and enters AdaHessian twice, is how the authors' code has it. An entry whose V is exactly 0 does not
move here, as everywhere in hesscale; theirs would decay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

import hesscale
from hesscale.optim import CurvatureScaled

from .options import EPS, Options


@final
class GradientScaled(CurvatureScaled):
    """Adam, in the template's terms: the gradient before weight decay stands where curvature does."""

    def backward(self, loss: Tensor, *, retain_graph: bool = False, **options: Any) -> None:
        """Fills ``p.grad``, and ``p.curvature`` with a copy of it."""
        loss.backward(retain_graph=retain_graph)
        for p in self._trainable():
            if p.grad is not None:
                p.curvature = p.grad.detach().clone()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Row:
    """How an optimizer is made, and what weight decay does in it besides its part in the gradient."""

    make: Callable[..., Optimizer]  # called with parameter groups, lr, betas and fused
    damps: bool = True  # λ is added to ε
    decays: bool = False  # it is given λ as its own weight_decay
    adds: bool = True  # λp is added to the gradient before the step
    twice: bool = False  # it differentiates twice
    betas: bool = True  # whether it has β₁ and β₂
    options: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[str, ...] = ()  # of OPTIONS


def _sgd(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> Optimizer:
    return torch.optim.SGD(_without(groups, "eps", "weight_decay"), lr=lr, fused=True)


def _adam(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> Optimizer:
    if any(group["l2"] for group in groups):
        return GradientScaled(groups, lr=lr, betas=betas, fused=fused, bound=None)
    return _fused_adam(groups, lr=lr, betas=betas, fused=True)


def _fused_adam(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], fused: bool) -> Optimizer:
    return torch.optim.Adam(groups, lr=lr, betas=betas, fused=True)


def _without(groups: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name not in names} for group in groups]


_FREE: Mapping[str, Any] = {"bound": None}  # as in the paper: no entry of a step is clipped

_CURVED = ("every", "eps", "bound", "trust_region")
_RANKED = (*_CURVED, "rank")

OPTIMIZERS: dict[str, Row] = {
    "SGD": Row(_sgd, betas=False),
    "Adam": Row(_adam, takes=("eps",)),
    "AdamFused": Row(_fused_adam, damps=False, decays=True, adds=False, takes=("eps",)),
    "AdaBL89": Row(hesscale.AdaBL89, options=_FREE, takes=_CURVED),
    "AdaHessian": Row(hesscale.AdaHessian, damps=False, decays=True, twice=True, options=_FREE, takes=_CURVED),
    "AdaGGNMC": Row(hesscale.AdaGGNMC, options={"scale": "mean", **_FREE}, takes=_CURVED),
    "AdaHesScaleGN": Row(hesscale.AdaHesScaleGN, options=_FREE, takes=_RANKED),
    "AdaHesScale": Row(hesscale.AdaHesScale, options=_FREE, takes=_RANKED),
}
"""What there is, and what a plugin adds."""

EARLIER_NAMES: Mapping[str, str] = {"BL89": "AdaBL89", "GGNMC": "AdaGGNMC"}
"""What the authors' data and older runs call some of them."""


def optimizer_named(name: str) -> Row:
    """The row of this name; ValueError with the names there are."""
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: choose among {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def require_fitting(name: str, options: Options) -> None:
    """ValueError if the optimizer does not take one of the options."""
    takes = optimizer_named(name).takes
    for option, _ in options:
        if option not in takes:
            raise ValueError(f"{name} takes no {option}: its options are {', '.join(takes) or 'none of these'}")


def require_betas(names: Sequence[str], **given: float) -> None:
    """ValueError if one of the given β is not 0 and none of the optimizers has any."""
    if not any(optimizer_named(name).betas for name in names):
        for beta, value in given.items():
            if value:
                raise ValueError(f"{beta} does not go with {' or '.join(names)}: leave --{beta} out")


def make_optimizer(
    name: str,
    model: nn.Module,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    fused: bool = False,
    options: Options = (),
) -> Optimizer:
    """The optimizer of this name for a model whose biases are its vectors. Use it with ``backward`` below."""
    require_fitting(name, options)
    row, given = optimizer_named(name), dict(options)
    eps = given.pop("eps", EPS)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in params if (p.dim() > 1) == weights],
            "l2": decay if row.adds else 0.0,
            "eps": eps + (decay if row.damps else 0.0),
            "weight_decay": decay if row.decays else 0.0,
        }
        for weights, decay in ((True, weight_decay), (False, 0.0))
    ]
    return row.make(groups, lr=lr, betas=betas, fused=fused, **{**row.options, **given})


def backward(optimizer: Optimizer, loss: Tensor, *, generator: torch.Generator | None = None) -> None:
    """What comes between ``zero_grad`` and ``step``: curvature of the loss alone, then g + λp as the gradient."""
    if isinstance(optimizer, CurvatureScaled):
        optimizer.backward(loss, generator=generator)
    else:
        loss.backward()
    with torch.no_grad():
        for group in optimizer.param_groups:
            if group["l2"]:
                torch._foreach_add_([p.grad for p in group["params"]], group["params"], alpha=group["l2"])


def kernels_for(name: str) -> AbstractContextManager[None]:
    """Within it a model runs by kernels that the optimizer can use: fused attention is differentiated only once."""
    return sdpa_kernel(SDPBackend.MATH) if optimizer_named(name).twice else nullcontext()


@contextmanager
def leaps_expected() -> Iterator[None]:
    """Within it no optimizer warns of a leap: the paper has no bound, and its networks get over some."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a step took the norm of")
        yield


def warm_up(name: str, options: Options = ()) -> None:
    """Compiles the update of a fused optimizer, so that no measured step has to."""
    model = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = make_optimizer(name, model, lr=1e-3, betas=(0.9, 0.999), fused=True, options=options)
    loss = nn.functional.cross_entropy(model(torch.ones(2, 2)), torch.tensor([0, 1]))
    backward(optimizer, loss, generator=torch.Generator().manual_seed(0))
    optimizer.step()


class Choice(NamedTuple):
    """Hyper-parameters of an optimizer."""

    lr: float
    beta1: float
    beta2: float


_MNIST = {
    "SGD": Choice(1e-1, 0.0, 0.0),
    "Adam": Choice(1e-4, 0.0, 0.9999),
    "AdaBL89": Choice(1e-6, 0.9, 0.9999),
    "AdaHessian": Choice(1e-2, 0.0, 0.9999),
    "AdaGGNMC": Choice(1e-5, 0.9, 0.9999),
    "AdaHesScaleGN": Choice(1e-5, 0.0, 0.9999),
    "AdaHesScale": Choice(1e-4, 0.0, 0.9999),
}
_CIFAR10 = {
    "SGD": Choice(1e-1, 0.0, 0.0),
    "Adam": Choice(1e-3, 0.9, 0.99),
    "AdaBL89": Choice(1e-6, 0.9, 0.9999),
    "AdaHessian": Choice(1e-2, 0.0, 0.9999),
    "AdaGGNMC": Choice(1e-3, 0.9, 0.999),
    "AdaHesScaleGN": Choice(1e-4, 0.9, 0.9999),
    "AdaHesScale": Choice(1e-3, 0.9, 0.99),
}
# the authors fixed β₁ = 0.9 and β₂ = 0.999 here, and did not run AdaBL89: its row is CIFAR-10's
_CIFAR100_3C3D = {
    "SGD": Choice(1e-2, 0.0, 0.0),
    "Adam": Choice(1e-4, 0.9, 0.999),
    "AdaBL89": _CIFAR10["AdaBL89"],
    "AdaHessian": Choice(1e-2, 0.9, 0.999),
    "AdaGGNMC": Choice(1e-3, 0.9, 0.999),
    "AdaHesScaleGN": Choice(1e-4, 0.9, 0.999),
    "AdaHesScale": Choice(1e-4, 0.9, 0.999),
}
_CIFAR100_ALLCNNC = {
    "SGD": Choice(1e-1, 0.0, 0.0),
    "Adam": Choice(1e-4, 0.9, 0.999),
    "AdaBL89": _CIFAR10["AdaBL89"],
    "AdaHessian": Choice(1e-2, 0.9, 0.999),
    "AdaGGNMC": Choice(1e-4, 0.9, 0.999),
    "AdaHesScaleGN": Choice(1e-4, 0.9, 0.999),
    "AdaHesScale": Choice(1e-3, 0.9, 0.999),
}
# one seed, 15 epochs, step sizes half a decade apart
_DIGITS = {
    "SGD": Choice(3e-1, 0.0, 0.0),
    "Adam": Choice(1e-2, 0.9, 0.999),
    "AdaBL89": Choice(1e-4, 0.9, 0.999),
    "AdaHessian": Choice(1e-1, 0.9, 0.999),
    "AdaGGNMC": Choice(3e-3, 0.9, 0.999),
    "AdaHesScaleGN": Choice(3e-3, 0.9, 0.999),
    "AdaHesScale": Choice(1e-2, 0.9, 0.999),
}

_BEST: Mapping[str, Mapping[str, Choice]] = {
    "digits": _DIGITS,
    "mnist-mlp": _MNIST,
    "cifar10-3c3d": _CIFAR10,
    "cifar100-3c3d": _CIFAR100_3C3D,
    "cifar100-allcnnc": _CIFAR100_ALLCNNC,
}


PAPERS = tuple(_MNIST)
"""The optimizers of the paper."""

_TUNED_AS = {"AdamFused": "Adam"}


def best_settings(task: str, optimizer: str) -> Choice | None:
    """What the authors selected, by the area under the validation loss; on digits, what a short search of ours did.

    None where nobody has searched.
    """
    return _BEST.get(task, {}).get(_TUNED_AS.get(optimizer, optimizer))
