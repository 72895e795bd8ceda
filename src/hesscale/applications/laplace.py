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
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..estimators.api import Size, examples_in, inputs_and_targets, size_of
from ..estimators.problem import LossFunction, called, outputs
from ..graph import tensors_in
from .masks import alive
from .over_batches import Batches, How, Progress, diagonal_over, on_device, reporter
from .posterior import GRID as GRID
from .posterior import Posterior as Posterior
from .posterior import probit as probit
from .posterior import refuse_one_column, refuse_training, untouched, widened

LIKELIHOODS = ("classification", "regression")
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
    refuse_training(model)
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
        mean={name: widened(params[name].detach()) * live[name] for name in found},
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
        return {name: (h if given is None else given[name].detach()).to(widened(h)) for name, h in found.items()}

    def _mean(self, counted: Iterable[tuple[Any, float]], how: How) -> dict[str, Tensor]:
        """Batches weigh as much as their examples; one whose labels are all ignored has no mean loss."""
        totals: dict[str, Tensor] = {}
        for batch, count in counted:
            part = diagonal_over(self._model, self._loss_fn, [batch], **how) if count else {}
            totals.update({name: totals.get(name, 0.0) + count * widened(h) for name, h in part.items()})
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
            with untouched(self._model), torch.no_grad():
                found = outputs(self._model, inputs)
                loss = float(called(self._loss_fn, found, targets))
            if self._likelihood == "regression":
                _refuse_other_scale(loss, found, targets)
            else:
                refuse_one_column(found)
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


def _ignored(loss_fn: Any) -> int:
    """The label that a loss leaves out: of a module, of a partial, or else the one that torch's losses do."""
    if isinstance(loss_fn, functools.partial):
        return int(loss_fn.keywords.get("ignore_index", _ignored(loss_fn.func)))
    return int(getattr(loss_fn, "ignore_index", -100))


def _refuse_other_scale(loss: float, outputs: Any, targets: Any) -> None:
    """A Gaussian's negative log-likelihood is known: another multiple of it would scale all variances."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape == targets.shape):
        return
    known = float(half_squared_error(widened(outputs), widened(targets)))
    if math.isfinite(known) and not math.isclose(loss, known, rel_tol=1e-2, abs_tol=1e-6):  # half precision is coarse
        raise ValueError(
            f"this loss is {loss:.4g} where half the squared error, the mean over examples, is {known:.4g}: for "
            "regression pass half_squared_error"
        )
