"""How sure is a trained network? A Gaussian around its parameters with a diagonal precision, and what it predicts.

Laplace's approximation at the trained parameters θ*, with a Gaussian prior of precision τ, N examples, and c the
diagonal of the mean negative log-likelihood's curvature:

    p(θ | data) ≈ N(θ*, 1 / (N c + τ))

A precision must be positive. ``hesscale_gn`` (the default), ``ggn``, ``ggn_mc`` and ``kfac`` have no negative entry for
these likelihoods; those of other methods are set to zero, so that the prior alone holds such a parameter: at a minimum
there would be none, but training seldom ends at one. ``Posterior.clamped`` says how many there were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..estimators.api import examples_in, fresh_generator
from ..estimators.problem import LossFunction, without_traces
from .over_batches import Batches, How, diagonal_over, on_device, reporter

LIKELIHOODS = ("classification", "regression")
GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions that validation tries."""

_OTHER_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase)
_NO_EXAMPLES = "how many examples was this diagonal averaged over? Say so: examples=..."


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½ Σ_d (f_d − y_d)², the mean over examples: the loss of a regression whose noise has variance 1."""
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}, but targets {tuple(targets.shape)}: make them alike"
        )
    return 0.5 * ((outputs - targets) ** 2).sum() / len(outputs)


def laplace(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    likelihood: str = "classification",
    prior_precision: float = 1.0,
    noise: float = 1.0,
    examples: int | None = None,
    **how: Unpack[How],
) -> Posterior:
    """The posterior over the parameters of a trained model, from its training data, by ``method="hesscale_gn"``.

    ``loss_fn`` is the mean negative log-likelihood of a batch: ``cross_entropy`` for classification,
    ``half_squared_error`` for regression, whose ``noise`` is the variance of the targets. A ``diagonal=`` computed
    elsewhere is that of the mean loss, over so many ``examples``. Put the model in evaluation mode before.

    >>> model, batches = nn.Linear(4, 3), [(torch.randn(8, 4), torch.randint(3, (8,)))]
    >>> posterior = hesscale.applications.laplace.laplace(model, F.cross_entropy, batches)
    >>> posterior.predict(torch.randn(5, 4)).shape  # probabilities of classes
    torch.Size([5, 3])
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"unknown likelihood {likelihood!r}: choose one of {', '.join(map(repr, LIKELIHOODS))}")
    if not (prior_precision > 0 and noise > 0):
        raise ValueError(f"prior_precision and noise must be positive: {prior_precision}, {noise}")
    if model.training and any(isinstance(module, _OTHER_IN_TRAINING) for module in model.modules()):
        raise ValueError("the model is in training mode, with dropout or batch norm in it: call model.eval() first")
    if how.get("diagonal") is not None and batches is None and examples is None:
        raise ValueError(_NO_EXAMPLES)
    if how.get("diagonal") is None:
        how.setdefault("method", "hesscale_gn")
    seen = _Seen(model, loss_fn)
    stream = None if batches is None else seen.passing(batches)
    if batches is not None:
        how["progress"] = reporter(batches, how.get("progress", False))
    found = diagonal_over(model, loss_fn, stream, **how)
    if how.get("diagonal") is not None and stream is not None:
        for _ in stream:
            pass
    count = seen.examples if examples is None else examples
    params = dict(model.named_parameters())
    return Posterior(
        model=model,
        mean={name: params[name].detach().clone() for name in found},
        curvature={name: count * h.clamp(min=0.0) for name, h in found.items()},
        prior={name: torch.full((), prior_precision, dtype=h.dtype, device=h.device) for name, h in found.items()},
        likelihood=likelihood,
        noise=noise,
        examples=count,
        outputs=seen.outputs,
        loss=seen.total / seen.examples if seen.examples else math.nan,
        clamped=sum(int((h < 0).sum()) for h in found.values()) / sum(h.numel() for h in found.values()),
    )


class _Seen:
    """What is noted of batches that pass by."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None) -> None:
        self._model, self._loss_fn = model, loss_fn
        self.examples, self.total, self.outputs = 0, 0.0, 0

    def passing(self, batches: Batches) -> Iterator[tuple[Any, Any]]:
        """The same batches, each noted before it is handed on."""
        for batch in batches:
            self._note(batch)
            yield batch

    def _note(self, batch: Any) -> None:
        if self._loss_fn is None or not isinstance(batch, (tuple, list)) or len(batch) != 2:
            return  # diagonal_over says what is wrong
        inputs, targets = on_device((batch[0], batch[1]), next(self._model.parameters()).device)
        count = examples_in(inputs, targets)
        with without_traces(self._model), torch.no_grad():
            outputs = _outputs(self._model, inputs)
            self.total += count * float(self._loss_fn(outputs, targets))
        self.outputs = outputs[0].numel() if isinstance(outputs, Tensor) else 0
        self.examples += count


def _outputs(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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
    examples: int
    outputs: int  # of the model for an example
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
        totals = dict.fromkeys(grid, 0.0)
        device = next(iter(self.mean.values())).device
        for inputs, targets in on_device([*batches], device):
            jacobians = [*self.jacobians(inputs)]
            for tau in grid:
                probabilities = torch.cat([probit(f, self.with_prior(tau)._spread(js)) for f, js in jacobians])
                chosen = probabilities.gather(1, targets[:, None]).clamp(min=1e-30)
                totals[tau] -= float(chosen.log().sum())
        if not any(totals.values()):
            raise ValueError("the batches for validation gave no examples")
        return self.with_prior(min(totals, key=lambda tau: totals[tau]))

    def predict(self, inputs: Tensor, *, samples: int = 0, generator: torch.Generator | None = None) -> Any:
        """Probabilities of classes [batch, classes]; for regression, means and variances [batch, outputs].

        With the network linearized around θ* (and the probit approximation for classes), or, with ``samples``, as the
        mean over so many networks that are drawn from the posterior. Variances of a regression include its noise.
        """
        if samples:
            draws = self.draw(inputs, samples=samples, generator=generator)
            if self.likelihood == "classification":
                return draws.softmax(-1).mean(0)
            return draws.mean(0), draws.var(0, correction=0) + self.noise
        parts = [*self.jacobians(inputs)]
        if self.likelihood == "classification":
            return torch.cat([probit(f, self._spread(js)) for f, js in parts])
        return torch.cat([f for f, _ in parts]), torch.cat([self._spread(js) for _, js in parts]) + self.noise

    @torch.no_grad()
    def draw(self, inputs: Tensor, *, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Outputs [samples, batch, outputs] of networks drawn from the posterior. The model itself stays as it is.

        Without a generator every call draws afresh.
        """
        generator = fresh_generator() if generator is None else generator
        scale = {name: variance.sqrt() for name, variance in self.variance.items()}
        found = []
        with without_traces(self.model):
            for _ in range(samples):
                noise = {
                    name: torch.randn(s.shape, dtype=s.dtype, generator=generator).to(s) for name, s in scale.items()
                }
                params = {name: self.mean[name] + scale[name] * noise[name] for name in scale}
                found.append(functional_call(self.model, params, (inputs,)))
        return torch.stack(found)

    def functional_variance(self, inputs: Tensor) -> Tensor:
        """The covariance [batch, outputs, outputs] of the linearized network's outputs: J diag(variance) Jᵀ."""
        variance = self.variance
        parts = [
            sum(torch.einsum("ncp,p,nkp->nck", js[name], variance[name].flatten(), js[name]) for name in js)
            for _, js in self.jacobians(inputs)
        ]
        return torch.cat([part for part in parts if isinstance(part, Tensor)])

    def _spread(self, jacobians: Mapping[str, Tensor]) -> Tensor:
        """The diagonal [batch, outputs] of the functional variance."""
        parts = [js.square() @ self.variance[name].flatten() for name, js in jacobians.items()]
        return torch.stack(parts).sum(0)

    def jacobians(self, inputs: Tensor, *, chunk: int = 16) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Outputs [batch, outputs], and by parameter name their Jacobian [batch, outputs, entries], in chunks."""
        mean = {name: value.detach() for name, value in self.mean.items()}

        def outputs(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            f = functional_call(self.model, params, (x[None],))
            if not isinstance(f, Tensor) or f.ndim != 2:
                raise ValueError("a linearized network needs outputs of shape [batch, outputs]: use samples= instead")
            return f[0], f[0]

        each = vmap(jacrev(outputs, has_aux=True), in_dims=(None, 0), randomness="error")
        for part in inputs.split(chunk):
            with without_traces(self.model):
                js, f = each(mean, part)
            yield f.detach(), {name: value.detach().flatten(2) for name, value in js.items()}


def probit(outputs: Tensor, spread: Tensor) -> Tensor:
    """softmax(f / √(1 + π/8 var)): the expected probabilities of classes, nearly, for outputs of such variances."""
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
