"""Which likelihood a loss function stands for, found by watching it call torch, and how to sample from it.

A loss is taken for Σ_n c_n · (−log p(y_n | z_n)), z the predictions it hands to one of torch's loss functions. A draw
r has E[r rᵀ] = the Gauss-Newton block Σ_n c_n E[∇log p ∇log pᵀ]: the gradient at a sampled target, times √c_n.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .problem import Problem

Arguments = Mapping[str, Any]
"""A loss function's arguments by name, defaults included."""


@dataclass(frozen=True)
class Likelihood:
    """Predictions, gradients at sampled targets, and what each of them counts in the loss."""

    predictions: tuple[Tensor, ...]
    scores: Callable[[int, torch.Generator], tuple[Tensor, ...]]  # ∇(−log p) at k samples, [k, *shape] each
    factor: Tensor  # c, broadcast against the predictions
    norm: Tensor | float = 1.0  # what reduction="mean" divides by
    class_dim: int | None = None  # the dimension of the predictions that the loss's values do not have

    def scaled(self, scale: Tensor) -> Likelihood:
        """The same with every value of the loss multiplied by ``scale``."""
        if self.class_dim is not None and scale.dim():
            scale = scale.unsqueeze(self.class_dim)
        return replace(self, factor=self.factor * scale)

    def draw(self, count: int, generator: torch.Generator) -> list[Tensor]:
        """``count`` independent r for each of the predictions, [count, *shape]."""
        weight = (self.factor / self.norm).clamp_min(0).sqrt()
        return [score * weight for score in self.scores(count, generator)]


def recognized(problem: Problem, outputs: Any) -> Likelihood:
    """The likelihood behind the problem's loss, or a ValueError that lists what is supported."""
    with _Watch() as watch:
        loss = problem.loss(outputs)
    if len(watch.calls) != 1:
        raise ValueError(_UNKNOWN.format(count=len(watch.calls) or "none", known=_known()))
    call = watch.calls[0]
    (scale,) = torch.autograd.grad(loss, call.value, retain_graph=True)
    if not torch.allclose((scale * call.value).sum(), loss.reshape(()), rtol=1e-4, atol=1e-7) or bool(
        (scale < 0).any()
    ):
        raise ValueError(_MORE.format(name=call.function.__name__))
    return LIKELIHOODS[call.function](call.arguments).scaled(scale)


_UNKNOWN = (
    "sampling needs a likelihood, and this loss calls {count} of the functions that stand for one ({known}), directly "
    "or through their torch.nn modules. Exactly one must be there; 'ggn' needs none, it works with any smooth loss."
)
_MORE = "sampling needs a likelihood, and this loss is more than a positive multiple of {name}"


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    arguments: Arguments
    value: Tensor


@final
class _Watch(TorchFunctionMode):
    """Notes every call of a loss function with a row in LIKELIHOODS."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        value = function(*args, **(kwargs or {}))
        if function in LIKELIHOODS:
            bound = inspect.signature(function).bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.calls.append(_Call(function, bound.arguments, value))
        return value


def _cross_entropy(arguments: Arguments) -> Likelihood:
    """Categorical with logits z: r = q − e_ŷ, ŷ ~ q."""
    logits = arguments["input"]
    dim = min(1, logits.dim() - 1)
    q = logits.detach().softmax(dim)

    def scores(count: int, generator: torch.Generator) -> tuple[Tensor]:
        return (q - _one_hot(q, dim, count, generator),)

    return Likelihood((logits,), scores, *_class_factor(arguments, logits, dim), class_dim=dim)


def _nll(arguments: Arguments) -> Likelihood:
    """Categorical with log-probabilities z: r = −e_ŷ, ŷ ~ eᶻ."""
    logs = arguments["input"]
    dim = min(1, logs.dim() - 1)
    q = logs.detach().exp()
    if not torch.allclose(q.sum(dim), q.new_ones(()), rtol=1e-3):
        raise ValueError("sampling needs a likelihood, and nll_loss is one only of log-probabilities (log_softmax)")

    def scores(count: int, generator: torch.Generator) -> tuple[Tensor]:
        return (-_one_hot(q, dim, count, generator),)

    return Likelihood((logs,), scores, *_class_factor(arguments, logs, dim), class_dim=dim)


def _one_hot(q: Tensor, dim: int, count: int, generator: torch.Generator) -> Tensor:
    """``count`` draws of a class from each distribution along ``dim``, [count, *q.shape]."""
    last = q.movedim(dim, -1)
    flat = last.reshape(-1, last.shape[-1]).to(generator.device)
    classes = torch.multinomial(flat, count, replacement=True, generator=generator).to(q.device)  # [positions, count]
    hot = F.one_hot(classes.T, last.shape[-1]).to(q.dtype).reshape(count, *last.shape)
    return hot.movedim(-1, dim + 1)


def _class_factor(arguments: Arguments, z: Tensor, dim: int) -> tuple[Tensor, Tensor | float]:
    """Σ_k t_k w_k for each position, t the (smoothed) target and w the class weights; and the mean's divisor."""
    target, weight = arguments["target"], arguments["weight"]
    smoothing = arguments.get("label_smoothing", 0.0)
    classes = z.shape[dim]
    weight = z.new_ones(classes) if weight is None else weight
    if target.is_floating_point():
        factor = ((1 - smoothing) * target + smoothing / classes).movedim(dim, -1) @ weight
        norm = float(factor.numel())
    else:
        kept = target != arguments["ignore_index"]
        own = weight[target.where(kept, 0)] * kept
        factor = ((1 - smoothing) * own + smoothing * weight.mean()) * kept
        norm = own.sum()
    return factor.unsqueeze(dim), norm if _is_mean(arguments) else 1.0


def _is_mean(arguments: Arguments) -> bool:
    if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
        raise ValueError("size_average and reduce are deprecated in torch and not supported here: use reduction=")
    return bool(arguments["reduction"] == "mean")


def _mse(arguments: Arguments) -> Likelihood:
    """Normal with mean z and variance ½, so that −log p is the squared error: r = √2 ε, ε ~ N(0, 1)."""
    z = arguments["input"]
    if arguments.get("weight") is not None or z.shape != arguments["target"].shape:
        raise ValueError("sampling supports mse_loss without weights, for outputs and targets of one shape")
    return Likelihood((z,), _normal(z), z.new_tensor(2.0), float(z.numel()) if _is_mean(arguments) else 1.0)


def _normal(like: Tensor) -> Callable[[int, torch.Generator], tuple[Tensor]]:
    def scores(count: int, generator: torch.Generator) -> tuple[Tensor]:
        drawn = torch.randn(count, *like.shape, generator=generator, device=generator.device, dtype=like.dtype)
        return (drawn.to(like.device),)

    return scores


def _bernoulli(arguments: Arguments) -> Likelihood:
    """Bernoulli with logit z: r = σ(z) − ŷ, ŷ ~ σ(z); weights and pos_weight count as factors."""
    z, target, weight, positive = (arguments[name] for name in ("input", "target", "weight", "pos_weight"))
    p = z.detach().sigmoid()

    def scores(count: int, generator: torch.Generator) -> tuple[Tensor]:
        many = p.expand(count, *p.shape).to(generator.device)
        return (p - torch.bernoulli(many, generator=generator).to(p.device),)

    factor = torch.ones_like(z, requires_grad=False) if positive is None else 1 + (positive - 1) * target
    factor = factor if weight is None else factor * weight
    return Likelihood((z,), scores, factor, float(z.numel()) if _is_mean(arguments) else 1.0)


def _gaussian_nll(arguments: Arguments) -> Likelihood:
    """Normal with mean z and variance v: r_z = −ε/√v, and if v is predicted too, r_v = (1 − ε²)/2v."""
    z, var = arguments["input"], arguments["var"]
    var = var if isinstance(var, Tensor) else z.new_tensor(float(var))
    v = var.detach().clamp_min(arguments["eps"])
    v = v.unsqueeze(-1) if v.dim() and v.shape == z.shape[:-1] else v  # one variance for all entries of an example
    predicted = var.requires_grad
    if predicted and var.shape != z.shape:
        raise ValueError("sampling supports a predicted variance of gaussian_nll_loss if it has the mean's shape")
    noise = _normal(z)

    def scores(count: int, generator: torch.Generator) -> tuple[Tensor, ...]:
        (drawn,) = noise(count, generator)
        return (-drawn / v.sqrt(), *([(1 - drawn.square()) / (2 * v)] if predicted else []))

    norm = float(z.numel()) if _is_mean(arguments) else 1.0
    return Likelihood((z, var) if predicted else (z,), scores, z.new_ones(()), norm)


LIKELIHOODS: Mapping[Callable[..., Any], Callable[[Arguments], Likelihood]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll,
    F.mse_loss: _mse,
    F.binary_cross_entropy_with_logits: _bernoulli,
    F.gaussian_nll_loss: _gaussian_nll,
}


def _known() -> str:
    return ", ".join(function.__name__ for function in LIKELIHOODS)
