"""A Gaussian over the parameters of a trained network with a diagonal covariance: evidence, prior, and predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..estimators.api import fresh_generator
from ..estimators.problem import without_traces
from ..graph import wide
from .over_batches import Batches, on_device

GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions that validation tries."""

_OTHER_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
_CHUNK = 16  # examples whose Jacobians are there at a time


@dataclass(frozen=True)
class Posterior:
    """N(θ*, 1 / (N c / noise + τ)) over the parameters of a model, by name.

    >>> model, batches = nn.Linear(4, 3), [(torch.randn(8, 4), torch.randint(3, (8,)))]
    >>> posterior = hesscale.applications.laplace.laplace(model, F.cross_entropy, batches)
    >>> all((variance <= 1).all() for variance in posterior.variance.values())  # the prior's is 1
    True
    """

    model: nn.Module
    mean: Mapping[str, Tensor]  # θ*
    curvature: Mapping[str, Tensor]  # N c ≥ 0, for noise of variance 1
    prior: Mapping[str, Tensor]  # τ, one number per parameter tensor
    likelihood: str
    noise: float
    examples: float
    outputs: int  # of the model for an example; numbers in its target, if the model returns several tensors
    loss: float  # mean over the examples; nan if it is not known
    clamped: float  # the share of entries whose curvature was negative

    @property
    def precision(self) -> dict[str, Tensor]:
        """Of each entry of each parameter."""
        return {name: self._evidence(name) + self.prior[name] for name in self.curvature}

    @property
    def variance(self) -> dict[str, Tensor]:
        """1 / precision."""
        return {name: 1 / precision for name, precision in self.precision.items()}

    def _evidence(self, name: str) -> Tensor:
        return self.curvature[name] / self._noise

    @property
    def _noise(self) -> float:
        return self.noise if self.likelihood == "regression" else 1.0

    def log_marginal_likelihood(self) -> float:
        """log p(data) ≈ log p(data | θ*) − ½ Σ (log(precision / τ) + τ θ*²)."""
        if math.isnan(self.loss):
            raise ValueError("the marginal likelihood needs the loss: make the posterior with loss_fn and batches")
        likelihood = -self.examples * self.loss / self._noise
        if self.likelihood == "regression":
            likelihood -= 0.5 * self.examples * self.outputs * math.log(2 * math.pi * self.noise)
        precision = self.precision
        penalty = sum(
            float((precision[name] / tau).log().sum() + tau * self.mean[name].square().sum())
            for name, tau in self.prior.items()
        )
        return likelihood - 0.5 * penalty

    def with_prior(self, precision: float | Mapping[str, float]) -> Posterior:
        """The same with another prior precision, one for all or one for each parameter tensor by name."""
        given = precision if isinstance(precision, Mapping) else dict.fromkeys(self.prior, precision)
        missing = [name for name in self.prior if name not in given]
        if missing:
            raise ValueError(f"there is no prior precision for {', '.join(missing)}")
        if not all(math.isfinite(given[name]) and given[name] > 0 for name in self.prior):
            raise ValueError(f"prior precisions must be positive and finite: {precision}")
        return replace(self, prior={name: torch.full_like(tau, given[name]) for name, tau in self.prior.items()})

    def with_likeliest_prior(self, *, each: bool = False) -> Posterior:
        """The prior precision of the largest marginal likelihood; ``each``: one per parameter tensor.

        It solves τ ‖θ*‖² = Σ λ / (λ + τ), λ = N c / noise: the left side grows with τ, the right one falls.
        """
        groups = [[name] for name in self.prior] if each else [[*self.prior]]
        found = {}
        for names in groups:
            best = _likeliest([self._evidence(name) for name in names], [self.mean[name] for name in names])
            found.update(dict.fromkeys(names, best))
        return self.with_prior(found)

    def with_validated_prior(self, batches: Batches, *, grid: Sequence[float] = GRID) -> Posterior:
        """The prior precision of the grid with the smallest negative log-likelihood on other data, linearized."""
        if self.likelihood != "classification":
            raise ValueError("validation is for classification: for regression use with_likeliest_prior()")
        totals, count = dict.fromkeys(grid, 0.0), 0
        device = next(iter(self.mean.values())).device
        for batch in batches:
            inputs, targets = on_device(batch, device)
            count += len(targets)
            for (f, js), labels in zip(self.jacobians(inputs), targets.split(_CHUNK), strict=True):
                for tau in grid:
                    probabilities = probit(f, _spread(js, self.with_prior(tau).variance))
                    chosen = probabilities.gather(1, labels[:, None]).clamp(min=1e-30)
                    totals[tau] -= float(chosen.log().sum())
        if not count:
            raise ValueError("the batches for validation gave no examples")
        return self.with_prior(min(totals, key=lambda tau: totals[tau]))

    def predict(self, inputs: Tensor, *, samples: int = 0, generator: torch.Generator | None = None) -> Any:
        """Probabilities of classes [batch, classes]; for regression, means and variances [batch, outputs].

        With the network linearized around θ* (and the probit approximation for classes), or, with ``samples``, as the
        mean over so many networks that are drawn from the posterior. Variances of a regression include its noise.
        """
        if samples < 0 or (samples == 1 and self.likelihood == "regression"):
            raise ValueError(f"samples must be 2 or more for a variance (0: linearized), not {samples}")
        if samples:
            draws = self.draw(inputs, samples=samples, generator=generator)
            if self.likelihood == "classification":
                if draws.ndim != 3:
                    raise ValueError(
                        "which dimension of the outputs is that of classes? Take draw(inputs, samples=...).softmax(dim)"
                    )
                refuse_one_column(draws[0])
                return draws.softmax(-1).mean(0)
            return draws.mean(0), draws.var(0) + self.noise
        variance = self.variance
        parts = [(f, _spread(js, variance)) for f, js in self.jacobians(inputs)]  # a chunk's Jacobians at a time
        mean, spread = (torch.cat(part) for part in zip(*parts, strict=True))
        return probit(mean, spread) if self.likelihood == "classification" else (mean, spread + self.noise)

    @torch.no_grad()
    def draw(self, inputs: Tensor, *, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Outputs [samples, batch, outputs] of networks drawn from the posterior. The model itself stays as it is.

        Without a generator every call draws afresh.
        """
        generator = fresh_generator() if generator is None else generator
        scale = {name: variance.sqrt() for name, variance in self.variance.items()}
        found = []
        refuse_training(self.model)
        with untouched(self.model):
            for _ in range(samples):
                noise = {
                    name: torch.randn(s.shape, dtype=s.dtype, generator=generator).to(s) for name, s in scale.items()
                }
                params = self._as_parameters({name: self.mean[name] + scale[name] * noise[name] for name in scale})
                found.append(widened(functional_call(self.model, params, (inputs,))))
        return torch.stack(found)

    def _as_parameters(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same in the precision of the model's parameters."""
        params = dict(self.model.named_parameters())
        return {name: value.to(params[name].dtype) for name, value in values.items()}

    def functional_variance(self, inputs: Tensor) -> Tensor:
        """The covariance [batch, outputs, outputs] of the linearized network's outputs: J diag(variance) Jᵀ."""
        variance = self.variance
        parts = [
            sum(torch.einsum("ncp,p,nkp->nck", js[name], variance[name].flatten(), js[name]) for name in js)
            for _, js in self.jacobians(inputs)
        ]
        return torch.cat([part for part in parts if isinstance(part, Tensor)])

    def jacobians(self, inputs: Tensor, *, chunk: int = _CHUNK) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Outputs [batch, outputs], and by parameter name their Jacobian [batch, outputs, entries], in chunks."""
        mean = self._as_parameters(self.mean)
        refuse_training(self.model)

        def of_one(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            f = functional_call(self.model, params, (x[None],))
            if not isinstance(f, Tensor) or f.ndim != 2:
                raise ValueError("a linearized network needs outputs of shape [batch, outputs]: use samples= instead")
            return f[0], f[0]

        each = vmap(jacrev(of_one, has_aux=True), in_dims=(None, 0), randomness="error")
        for part in inputs.split(chunk):
            with untouched(self.model):
                js, f = each(mean, part)
            yield widened(f.detach()), {name: widened(value.detach().flatten(2)) for name, value in js.items()}


def _spread(jacobians: Mapping[str, Tensor], variance: Mapping[str, Tensor]) -> Tensor:
    """The diagonal [batch, outputs] of the functional variance."""
    return torch.stack([js.square() @ variance[name].flatten() for name, js in jacobians.items()]).sum(0)


def probit(outputs: Tensor, spread: Tensor) -> Tensor:
    """softmax(f / √(1 + π/8 var)): the expected probabilities of classes, nearly, for outputs of such variances."""
    refuse_one_column(outputs)
    return (outputs / (1 + math.pi / 8 * spread).sqrt()).softmax(-1)


def _likeliest(evidence: Sequence[Tensor], mean: Sequence[Tensor]) -> float:
    """τ with τ ‖θ*‖² = Σ λ / (λ + τ), by bisection of log τ."""
    length = sum(float(value.double().square().sum()) for value in mean)
    entries = torch.cat([value.double().flatten() for value in evidence])
    if not length or not bool((entries > 0).any()):
        raise ValueError("parameters or their curvature are all zero: the marginal likelihood has no largest value")
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        tau = math.exp(middle)
        low, high = (middle, high) if tau * length < float((entries / (entries + tau)).sum()) else (low, middle)
    return math.exp(0.5 * (low + high))


def refuse_one_column(outputs: Any) -> None:
    """The softmax of a single number is 1, whatever it is."""
    if isinstance(outputs, Tensor) and outputs.shape[1:].numel() == 1:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} have one number per example, but classification needs one for "
            "each class: let the model end in two logits, and train it with cross_entropy"
        )


def refuse_training(model: nn.Module) -> None:
    """Random or batch-dependent modules in training mode would make a posterior of another network."""
    for name, module in model.named_modules():
        rate = getattr(module, "dropout", 0)  # of attention and recurrent modules, and of many people's own
        other = isinstance(module, _OTHER_IN_TRAINING) or (isinstance(rate, (int, float)) and rate > 0)
        if module.training and other:
            what = f"{name or 'it'} ({type(module).__name__})"
            raise ValueError(f"the model is in training mode, where {what} behaves otherwise: call model.eval() first")


def widened(value: Tensor) -> Tensor:
    """The same in float32, if its precision is less: products and sums of many leave the range of float16."""
    return value.to(wide(value.dtype))


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """``without_traces``, and attributes of modules are kept as well: masks and norms put a new weight there."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with without_traces(model):
            yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
