"""How sure is a trained network? A Gaussian around its parameters with a diagonal precision, and what it predicts.

Laplace's approximation at the trained parameters θ*, with a Gaussian prior of precision τ, N examples, and c the
diagonal of the mean negative log-likelihood's curvature:

    p(θ | data) ≈ N(θ*, 1 / (N c + τ))

A precision must be positive. ``hesscale_gn`` (the default), ``ggn``, ``ggn_mc`` and ``kfac`` have no negative entry for
these likelihoods; those of other methods are set to zero, so that the prior alone holds such a parameter: at a minimum
there would be none, but training seldom ends at one. ``Posterior.clamped`` says how many there were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ..estimators.api import Size, examples_in, fresh_generator, inputs_and_targets, size_of
from ..estimators.problem import LossFunction, outputs, without_traces
from ..graph import tensors_in, wide
from .masks import alive
from .over_batches import Batches, How, Progress, diagonal_over, on_device, reporter

LIKELIHOODS = ("classification", "regression")
GRID = tuple(10.0 ** (k / 2) for k in range(-8, 9))
"""Prior precisions that validation tries."""

_OTHER_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU)
_CHUNK = 16  # examples whose Jacobians are there at a time
_NO_EXAMPLES = "how many examples was this diagonal averaged over? Say so: examples=..."


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½ Σ_d (f_d − y_d)², the mean over examples: the loss of a regression whose noise has variance 1.

    >>> hesscale.applications.laplace.half_squared_error(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2))
    tensor(5.)
    """
    if outputs.shape != targets.shape:
        raise ValueError(
            f"outputs have shape {tuple(outputs.shape)}, but targets {tuple(targets.shape)}: make them alike"
        )
    return 0.5 * outputs[0].numel() * ((outputs - targets) ** 2).mean()  # a sum may exceed half precision


def laplace(
    model: nn.Module,
    loss_fn: LossFunction | None = None,
    batches: Batches | None = None,
    *,
    likelihood: str = "classification",
    prior_precision: float = 1.0,
    noise: float = 1.0,
    examples: float | None = None,
    **how: Unpack[How],
) -> Posterior:
    """The posterior over the parameters of a trained model, from its training data, by ``method="hesscale_gn"``.

    ``loss_fn`` is the negative log-likelihood, the mean over a batch's examples: ``cross_entropy`` for classification,
    ``half_squared_error`` for regression, whose ``noise`` is the variance of the targets (``mse_loss`` is taken for
    it). For classification every label is an example, those of positions [N, T] too, but not the ``ignore_index`` of a
    module or a ``functools.partial``; if your mean is over something else, or leaves out labels in a function of your
    own, say over how many in all: ``examples``. So do for a ``diagonal=`` of a mean loss that
    was computed elsewhere. Put the model in evaluation mode before.

    >>> model, batches = nn.Linear(4, 3), [(torch.randn(8, 4), torch.randint(3, (8,)))]
    >>> posterior = hesscale.applications.laplace.laplace(model, F.cross_entropy, batches)
    >>> posterior.predict(torch.randn(5, 4)).shape  # probabilities of classes
    torch.Size([5, 3])
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"unknown likelihood {likelihood!r}: choose one of {', '.join(map(repr, LIKELIHOODS))}")
    if not (prior_precision > 0 and noise > 0):
        raise ValueError(f"prior_precision and noise must be positive: {prior_precision}, {noise}")
    if examples is not None and not (math.isfinite(examples) and examples > 0):
        raise ValueError(f"examples must be a positive number, not {examples}")
    _refuse_training(model)
    if how.get("diagonal") is None:
        how.setdefault("method", "hesscale_gn")
    elif batches is None and examples is None:
        raise ValueError(_NO_EXAMPLES)
    if likelihood == "regression" and (loss_fn is F.mse_loss or isinstance(loss_fn, nn.MSELoss)):
        loss_fn = half_squared_error
    seen = _Seen(model, loss_fn, likelihood)
    found = seen.diagonal(batches, how)
    count = seen.examples if examples is None else examples
    params, live = dict(model.named_parameters()), {name: alive(model, name) for name in found}
    return Posterior(
        model=model,
        mean={name: _wide(params[name].detach()) * live[name] for name in found},
        curvature={name: count * h.clamp(min=0.0) * live[name] for name, h in found.items()},
        prior={name: torch.full((), prior_precision, dtype=h.dtype, device=h.device) for name, h in found.items()},
        likelihood=likelihood,
        noise=noise,
        examples=count,
        outputs=seen.outputs,
        loss=seen.total / seen.examples if seen.examples and loss_fn is not None else math.nan,
        clamped=sum(int((h < 0).sum()) for h in found.values()) / sum(h.numel() for h in found.values()),
    )


class _Seen:
    """What is noted of batches: how many examples they have, their loss, and its diagonal."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None, likelihood: str) -> None:
        self._model, self._loss_fn, self._likelihood = model, loss_fn, likelihood
        self.examples, self.total, self.outputs = 0.0, 0.0, 0
        self._size: Size | None = None

    def diagonal(self, batches: Batches | None, how: How) -> dict[str, Tensor]:
        """The diagonal of the mean loss over all examples, or the given one, in float32 at least."""
        given, progress = how.get("diagonal"), how.pop("progress", False)
        self._size = how.get("size")
        if batches is None or (given is None and self._loss_fn is None):
            found = diagonal_over(self._model, self._loss_fn, None, **how)  # which says what is missing, if so
        elif given is not None:
            found = diagonal_over(self._model, **how)
            for _ in self._counted(batches, progress):
                pass
        else:
            found = self._mean(self._counted(batches, progress), how)
        if batches is not None and not self.examples:
            raise ValueError("the loader gave no examples")
        return {name: (h if given is None else given[name].detach()).to(_wide(h)) for name, h in found.items()}

    def _mean(self, counted: Iterable[tuple[Any, float]], how: How) -> dict[str, Tensor]:
        """Batches weigh as much as their examples; one whose labels are all ignored has no mean loss."""
        totals: dict[str, Tensor] = {}
        for batch, count in counted:
            part = diagonal_over(self._model, self._loss_fn, [batch], **how) if count else {}
            totals.update({name: totals.get(name, 0.0) + count * _wide(h) for name, h in part.items()})
        return {name: total / self.examples for name, total in totals.items()}

    def _counted(self, batches: Batches, progress: Progress) -> Iterator[tuple[Any, float]]:
        """The same batches with the number of their examples, each noted before it is handed on."""
        report = reporter(batches, progress)
        for done, batch in enumerate(batches, start=1):
            yield batch, self._note(batch)
            report(done)

    def _note(self, batch: Any) -> float:
        inputs, targets = on_device(inputs_and_targets(batch), next(self._model.parameters()).device)
        count = self._terms(inputs, targets) if self._size is None else size_of(batch, self._size)
        self.examples += count
        if self._loss_fn is not None and count:
            with _untouched(self._model), torch.no_grad():
                found = outputs(self._model, inputs)
                loss = float(self._loss_fn(found, targets))
            if self._likelihood == "regression":
                _refuse_other_scale(loss, found, targets)
            else:
                _refuse_one_column(found)
            self.total += count * loss
            self.outputs = _per_example(found if isinstance(found, Tensor) else targets)
        return count

    def _terms(self, inputs: Any, targets: Any) -> int:
        """How many terms a batch's mean loss has: labels for classification, else examples."""
        if self._likelihood == "regression" or not isinstance(targets, Tensor) or not targets.ndim:
            return examples_in(inputs, targets)
        if targets.is_floating_point():  # probabilities of classes
            return targets[:, :1].numel() if targets.ndim > 1 else len(targets)
        return int((targets.long() != _ignored(self._loss_fn)).sum())


def _per_example(values: Any) -> int:
    """How many numbers there are for one example."""
    return sum(tensor[0].numel() for tensor in tensors_in(values) if tensor.ndim and len(tensor))


def _refuse_one_column(outputs: Any) -> None:
    """The softmax of a single number is 1, whatever it is."""
    if isinstance(outputs, Tensor) and outputs.shape[1:].numel() == 1:
        raise ValueError(
            f"outputs of shape {tuple(outputs.shape)} have one number per example, but classification needs one for "
            "each class: let the model end in two logits, and train it with cross_entropy"
        )


def _ignored(loss_fn: Any) -> int:
    """The label that a loss leaves out: of a module, of a partial, or else the one that torch's losses do."""
    if isinstance(loss_fn, functools.partial):
        return int(loss_fn.keywords.get("ignore_index", _ignored(loss_fn.func)))
    return int(getattr(loss_fn, "ignore_index", -100))


def _refuse_training(model: nn.Module) -> None:
    """Random or batch-dependent modules in training mode would make a posterior of another network."""
    for name, module in model.named_modules():
        rate = getattr(module, "dropout", 0)  # of attention and recurrent modules, and of many people's own
        other = isinstance(module, _OTHER_IN_TRAINING) or (isinstance(rate, (int, float)) and rate > 0)
        if module.training and other:
            what = f"{name or 'it'} ({type(module).__name__})"
            raise ValueError(f"the model is in training mode, where {what} behaves otherwise: call model.eval() first")


def _refuse_other_scale(loss: float, outputs: Any, targets: Any) -> None:
    """A Gaussian's negative log-likelihood is known: another multiple of it would scale all variances."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape == targets.shape):
        return
    known = float(half_squared_error(_wide(outputs), _wide(targets)))
    if math.isfinite(known) and not math.isclose(loss, known, rel_tol=1e-2, abs_tol=1e-6):  # half precision is coarse
        raise ValueError(
            f"this loss is {loss:.4g} where half the squared error, the mean over examples, is {known:.4g}: for "
            "regression pass half_squared_error"
        )


def _wide(value: Tensor) -> Tensor:
    """The same in float32, if its precision is less: products and sums of many leave the range of float16."""
    return value.to(wide(value.dtype))


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """``without_traces``, and attributes of modules are kept as well: masks and norms put a new weight there."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        with without_traces(model):
            yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


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
                _refuse_one_column(draws[0])
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
        _refuse_training(self.model)
        with _untouched(self.model):
            for _ in range(samples):
                noise = {
                    name: torch.randn(s.shape, dtype=s.dtype, generator=generator).to(s) for name, s in scale.items()
                }
                params = self._as_parameters({name: self.mean[name] + scale[name] * noise[name] for name in scale})
                found.append(_wide(functional_call(self.model, params, (inputs,))))
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
        _refuse_training(self.model)

        def of_one(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
            f = functional_call(self.model, params, (x[None],))
            if not isinstance(f, Tensor) or f.ndim != 2:
                raise ValueError("a linearized network needs outputs of shape [batch, outputs]: use samples= instead")
            return f[0], f[0]

        each = vmap(jacrev(of_one, has_aux=True), in_dims=(None, 0), randomness="error")
        for part in inputs.split(chunk):
            with _untouched(self.model):
                js, f = each(mean, part)
            yield _wide(f.detach()), {name: _wide(value.detach().flatten(2)) for name, value in js.items()}


def _spread(jacobians: Mapping[str, Tensor], variance: Mapping[str, Tensor]) -> Tensor:
    """The diagonal [batch, outputs] of the functional variance."""
    return torch.stack([js.square() @ variance[name].flatten() for name, js in jacobians.items()]).sum(0)


def probit(outputs: Tensor, spread: Tensor) -> Tensor:
    """softmax(f / √(1 + π/8 var)): the expected probabilities of classes, nearly, for outputs of such variances."""
    _refuse_one_column(outputs)
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
