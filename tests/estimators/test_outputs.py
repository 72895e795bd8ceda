"""Where the loss begins: models with several outputs, in tuples and mappings, computed from one another or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

import hesscale

from .reference import flat, rows

TIGHT = {"rtol": 1e-10, "atol": 1e-10}


class Network(nn.Module):
    """A body and two heads, whose outputs ``form`` arranges."""

    def __init__(self, form: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.deep = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 5)
        self.second, self.form = nn.Linear(5, 3), form
        self.double()

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        return self.form(self.first(h), self.second(torch.tanh(self.deep(h))), h)


@dataclass
class Both:
    first: Tensor
    second: Tensor


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, dtype=torch.float64, generator=generator), torch.randint(3, (6,), generator=generator)


def dense_ggn(model: nn.Module, loss_fn: Callable[..., Tensor]) -> Tensor:
    """diag JᵀHJ, J of the outputs as they were computed, H of the loss at copies of them that depend on nothing."""
    x, y = batch()
    outputs, structure = tree_flatten(model(x))
    copies = [output.detach().requires_grad_() for output in outputs]
    loss = loss_fn(tree_unflatten(copies, structure), y)
    slopes = torch.autograd.grad(loss, copies, create_graph=True, materialize_grads=True)
    hessian = rows(torch.cat([slope.reshape(-1) for slope in slopes]), copies)
    jacobian = torch.cat([rows(output, list(model.parameters())) for output in outputs])
    return (jacobian.T @ hessian @ jacobian).diagonal()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "features beside logits": (lambda a, b, h: (a, h), lambda out, y: F.cross_entropy(out[0], y)),
    "features before logits": (lambda a, b, h: [h, a], lambda out, y: F.cross_entropy(out[1], y)),
    "one output twice": (lambda a, b, h: (a, a), lambda out, y: F.cross_entropy(out[0] + out[1], y)),
    "both are used": (
        lambda a, b, h: (a, h),
        lambda out, y: F.cross_entropy(out[0], y) + (out[0].exp().sum(1) * out[1].square().sum(1)).mean(),
    ),
    "two heads": (lambda a, b, h: (a, b), lambda out, y: F.cross_entropy(out[0], y) + F.mse_loss(out[1], out[1] * 0)),
    "nested": (
        lambda a, b, h: (a, {"aux": [b]}),
        lambda out, y: F.cross_entropy(out[0], y) + F.cross_entropy(out[1]["aux"][0], y),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_ggn_of_several_outputs_is_that_of_the_dense_matrix(name: str) -> None:
    form, loss_fn = LOSSES[name]
    model = Network(form)
    found = hesscale.estimate("ggn", model, loss_fn, batch())
    torch.testing.assert_close(flat(found), dense_ggn(model, loss_fn), **TIGHT)


def test_from_the_side_of_the_parameters() -> None:
    """One parameter and many outputs."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 1, bias=False).double()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            h = self.layer(x)
            return torch.cat([h, h.sin(), h.cos()], 1), h

    def loss_fn(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + out[1].pow(4).mean()

    model = Scaled()
    torch.testing.assert_close(
        flat(hesscale.estimate("ggn", model, loss_fn, batch())), dense_ggn(model, loss_fn), **TIGHT
    )


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a mapping": (lambda a, b, h: {"first": a, "second": b}, lambda out: (out["first"], out["second"])),
    "in a tuple": (lambda a, b, h: (a, {"aux": b}), lambda out: (out[0], out[1]["aux"])),
    "a dataclass": (lambda a, b, h: Both(a, b), lambda out: (out.first, out.second)),
}


@pytest.mark.parametrize("method", ["ggn", "hesscale_gn"])
@pytest.mark.parametrize("name", FORMS)
def test_outputs_may_be_nested(name: str, method: str) -> None:
    form, read = FORMS[name]

    def loss_fn(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + F.cross_entropy(out[1], y)

    expected = hesscale.estimate(method, Network(lambda a, b, h: (a, b)), loss_fn, batch())
    found = hesscale.estimate(method, Network(form), lambda out, y: loss_fn(read(out), y), batch())
    torch.testing.assert_close(found, expected, **TIGHT)


def penalty(model: nn.Module) -> Tensor:
    weight: Any = model.get_submodule("body").weight
    return 1e-9 * weight.square().sum()


@pytest.mark.parametrize("rank", [0, "full"])
@pytest.mark.parametrize("method", ["ggn", "hesscale_gn"])
def test_a_log_softmax_in_the_model_is_found_whatever_else_is_in_the_loss(method: str, rank: Any) -> None:
    """Beside a penalty on weights, and beside another head."""
    more = {} if method == "ggn" else {"rank": rank}
    plain, inside = Network(lambda a, b, h: (a, b)), Network(lambda a, b, h: (a.log_softmax(1), b))

    def loss_fn(log_probabilities: Tensor, other: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(log_probabilities, y) + F.mse_loss(other, torch.zeros_like(other))

    expected = hesscale.estimate(
        method, plain, lambda out, y: loss_fn(out[0].log_softmax(1), out[1], y), batch(), **more
    )
    found = hesscale.estimate(
        method, inside, lambda out, y: loss_fn(out[0], out[1], y) + penalty(inside), batch(), **more
    )
    assert expected["first.weight"].sum() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("method", ["ggn", "hesscale_gn"])
def test_a_model_that_returns_its_loss(method: str) -> None:
    model = Network(lambda a, b, h: {"loss": F.cross_entropy(a, batch()[1]), "logits": a, "hidden": h})
    found = hesscale.estimate(method, model, lambda out, _: out["loss"], batch())
    expected = hesscale.estimate(method, Network(lambda a, b, h: a), F.cross_entropy, batch())
    torch.testing.assert_close(found, expected, **TIGHT)


@pytest.mark.parametrize("method", ["ggn", "hesscale_gn"])
def test_outputs_that_the_loss_does_not_read(method: str) -> None:
    model = Network(lambda a, b, h: (a, a.softmax(1)))
    found = hesscale.estimate(method, model, lambda out, y: F.cross_entropy(out[0], y), batch())
    expected = hesscale.estimate(method, Network(lambda a, b, h: a), F.cross_entropy, batch())
    torch.testing.assert_close(found, expected, **TIGHT)
    with pytest.raises(ValueError, match="does not depend on any tensor among the model's outputs"):
        hesscale.estimate(method, model, lambda out, y: model.body.weight.square().sum(), batch())  # type: ignore[union-attr]


def test_outputs_that_hold_no_tensor_are_refused() -> None:
    model = Network(lambda a, b, h: {a.detach()})
    with pytest.raises(TypeError, match="a tuple or mapping of them, not set"):
        hesscale.estimate("ggn", model, lambda out, y: model.body.weight.sum(), batch())  # type: ignore[union-attr, operator]


def test_the_output_may_be_an_edge_of_the_graph() -> None:
    model = Network(lambda a, b, h: a)
    x, y = batch()
    logits = model(x)
    edge = torch.autograd.graph.get_gradient_edge(logits)
    found = hesscale.diagonal(F.cross_entropy(logits, y), model, method="hesscale_gn", output=edge, retain_graph=True)
    expected = hesscale.diagonal(F.cross_entropy(logits, y), model, method="hesscale_gn", output=logits)
    torch.testing.assert_close(found, expected, **TIGHT)


def test_an_embedding_that_is_shortened_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3))
    before = model[0].weight.detach().clone()  # type: ignore[union-attr, operator]
    words = torch.randint(5, (6, 2))
    hesscale.estimate("hesscale", model, F.cross_entropy, (words, torch.randint(3, (6,))))
    assert torch.equal(before, model[0].weight)  # type: ignore[arg-type]


def test_a_batch_may_count_for_a_fraction() -> None:
    """Class weights: torch's mean is over their sum."""
    torch.manual_seed(0)
    model, weights = nn.Linear(4, 3).double(), torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    loss_fn = nn.CrossEntropyLoss(weight=weights)
    batches = [(x[:3], y[:3]), (x[3:6], y[3:6]), (x[6:], y[6:])]
    found = hesscale.estimate_over("hesscale", model, loss_fn, batches, size=lambda b: weights[b[1]].sum())
    torch.testing.assert_close(found, hesscale.estimate("hesscale", model, loss_fn, (x, y)), **TIGHT)
    for size in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="size= must say how many examples"):
            hesscale.estimate_over("hesscale", model, loss_fn, batches, size=lambda b, size=size: size)


def test_kfac_refuses_a_pruned_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.5)  # type: ignore[no-untyped-call]
    with pytest.raises(NotImplementedError, match=r"0\.weight_orig"):
        hesscale.estimate("kfac", model, F.cross_entropy, (torch.randn(6, 4), torch.randint(3, (6,))))
