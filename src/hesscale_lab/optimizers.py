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
class OptimizerSpec:
    """How to make an optimizer, and where weight decay λ enters."""

    make: Callable[..., Optimizer]  # called with parameter groups, lr, betas and fused
    damps: bool = True  # λ is added to ε
    decays: bool = False  # the optimizer's own weight_decay is λ
    adds: bool = True  # λp is added to the gradient before the step
    twice: bool = False  # the optimizer differentiates the loss twice
    betas: bool = True  # the optimizer has β₁ and β₂
    options: Mapping[str, Any] = field(default_factory=dict)  # that are always passed
    takes: tuple[str, ...] = ()  # names in OPTIONS that the user may set


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

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "SGD": OptimizerSpec(_sgd, betas=False),
    "Adam": OptimizerSpec(_adam, takes=("eps",)),
    "AdamFused": OptimizerSpec(_fused_adam, damps=False, decays=True, adds=False, takes=("eps",)),
    "AdaBL89": OptimizerSpec(hesscale.AdaBL89, options=_FREE, takes=_CURVED),
    "AdaHessian": OptimizerSpec(
        hesscale.AdaHessian, damps=False, decays=True, twice=True, options=_FREE, takes=_CURVED
    ),
    "AdaGGNMC": OptimizerSpec(hesscale.AdaGGNMC, options={"scale": "mean", **_FREE}, takes=_CURVED),
    "AdaHesScaleGN": OptimizerSpec(hesscale.AdaHesScaleGN, options=_FREE, takes=_RANKED),
    "AdaHesScale": OptimizerSpec(hesscale.AdaHesScale, options=_FREE, takes=_RANKED),
}
"""The optimizers of the paper, torch's fused Adam, and those that a plugin adds."""


def optimizer_named(name: str) -> OptimizerSpec:
    """The optimizer of this name; ValueError that lists all names if there is none."""
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
    """The optimizer of this name, for ``backward`` below; vectors (biases) get no weight decay."""
    require_fitting(name, options)
    spec, given = optimizer_named(name), dict(options)
    eps = given.pop("eps", EPS)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in params if (p.dim() > 1) == weights],
            "l2": decay if spec.adds else 0.0,
            "eps": eps + (decay if spec.damps else 0.0),
            "weight_decay": decay if spec.decays else 0.0,
        }
        for weights, decay in ((True, weight_decay), (False, 0.0))
    ]
    return spec.make(groups, lr=lr, betas=betas, fused=fused, **{**spec.options, **given})


def backward(optimizer: Optimizer, loss: Tensor, *, generator: torch.Generator | None = None) -> None:
    """Computes the curvature of the loss alone, then makes g + λp the gradient; called after ``zero_grad``."""
    if isinstance(optimizer, CurvatureScaled):
        optimizer.backward(loss, generator=generator)
    else:
        loss.backward()
    with torch.no_grad():
        for group in optimizer.param_groups:
            if group["l2"]:
                torch._foreach_add_([p.grad for p in group["params"]], group["params"], alpha=group["l2"])


def kernels_for(name: str) -> AbstractContextManager[None]:
    """Turns fused attention off for an optimizer that differentiates twice: it has no second derivative."""
    return sdpa_kernel(SDPBackend.MATH) if optimizer_named(name).twice else nullcontext()


@contextmanager
def leaps_expected() -> Iterator[None]:
    """Silences the warning of a large step: the paper has no bound, and its networks recover."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="a step took the norm of")
        yield


def warm_up(name: str, options: Options = ()) -> None:
    """Compiles the update of a fused optimizer before a step is measured."""
    model = nn.Linear(2, 2, device="meta").to_empty(device="cpu")
    for p in model.parameters():
        nn.init.ones_(p)
    optimizer = make_optimizer(name, model, lr=1e-3, betas=(0.9, 0.999), fused=True, options=options)
    loss = nn.functional.cross_entropy(model(torch.ones(2, 2)), torch.tensor([0, 1]))
    backward(optimizer, loss, generator=torch.Generator().manual_seed(0))
    optimizer.step()


class Hyperparameters(NamedTuple):
    """Hyper-parameters of an optimizer."""

    lr: float
    beta1: float
    beta2: float


# The authors' choices, but for digits, where one seed of 15 epochs was searched with step sizes half a decade apart. On
# CIFAR-100 the authors fixed β₁ = 0.9 and β₂ = 0.999 and did not run AdaBL89, whose row is CIFAR-10's.
_BEST = """
               digits          mnist-mlp        cifar10-3c3d     cifar100-3c3d    cifar100-allcnnc
SGD            3e-1 0.0 0.0    1e-1 0.0 0.0     1e-1 0.0 0.0     1e-2 0.0 0.0     1e-1 0.0 0.0
Adam           1e-2 0.9 0.999  1e-4 0.0 0.9999  1e-3 0.9 0.99    1e-4 0.9 0.999   1e-4 0.9 0.999
AdaBL89        1e-4 0.9 0.999  1e-6 0.9 0.9999  1e-6 0.9 0.9999  1e-6 0.9 0.9999  1e-6 0.9 0.9999
AdaHessian     1e-1 0.9 0.999  1e-2 0.0 0.9999  1e-2 0.0 0.9999  1e-2 0.9 0.999   1e-2 0.9 0.999
AdaGGNMC       3e-3 0.9 0.999  1e-5 0.9 0.9999  1e-3 0.9 0.999   1e-3 0.9 0.999   1e-4 0.9 0.999
AdaHesScaleGN  3e-3 0.9 0.999  1e-5 0.0 0.9999  1e-4 0.9 0.9999  1e-4 0.9 0.999   1e-4 0.9 0.999
AdaHesScale    1e-2 0.9 0.999  1e-4 0.0 0.9999  1e-3 0.9 0.99    1e-4 0.9 0.999   1e-3 0.9 0.999
"""
"""lr, β₁ and β₂ by optimizer and task."""

_TASKS, *_ROWS = (line.split() for line in _BEST.strip("\n").splitlines())
PAPERS = tuple(row[0] for row in _ROWS)
"""The optimizers of the paper."""

_TUNED_AS = {"AdamFused": "Adam"}


def best_settings(task: str, optimizer: str) -> Hyperparameters | None:
    """What the authors selected for this task, or for digits a short search; None where nobody has searched."""
    name = _TUNED_AS.get(optimizer, optimizer)
    if task not in _TASKS or name not in PAPERS:
        return None
    numbers = _ROWS[PAPERS.index(name)][1 + 3 * _TASKS.index(task) :][:3]
    return Hyperparameters(*map(float, numbers))
