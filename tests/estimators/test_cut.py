"""Where the loss begins: outputs that are the loss already, or a likelihood in parts, or are changed by the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale

from .reference import flat
from .test_outputs import TIGHT, Network, batch, dense_ggn

Form = Callable[[Tensor, Tensor, Tensor], Any]
Loss = Callable[[Any, Tensor], Tensor]
METHODS = pytest.mark.parametrize("method", ["ggn", "hesscale_gn"])


def same(method: str, form: Form, loss_fn: Loss, expected: Form, of_expected: Loss, **more: Any) -> None:
    """Both give the same, and with ``ggn`` that of the dense matrix of the second."""
    model = Network(expected)
    wanted = hesscale.estimate(method, model, of_expected, batch(), **more)
    found = hesscale.estimate(method, Network(form), loss_fn, batch(), **more)
    assert flat(wanted).abs().max() > 0.01
    torch.testing.assert_close(found, wanted, **TIGHT)
    if method == "ggn":
        torch.testing.assert_close(flat(found), dense_ggn(model, of_expected), **TIGHT)


def squares(values: Tensor) -> Tensor:
    return F.mse_loss(values, torch.ones_like(values))


def focal(logits: Tensor, reduction: str = "mean") -> Tensor:
    chosen = logits.log_softmax(1).gather(1, batch()[1][:, None])[:, 0]
    values = -((1 - chosen.exp()) ** 2) * chosen
    return values.mean() if reduction == "mean" else values


PARTS: dict[str, tuple[Form, Loss, Form, Loss]] = {
    "a value": (
        lambda a, b, h: torch.cat([a.log_softmax(1), b], 1),
        lambda o, y: F.nll_loss(o[:, :3], y) + squares(o[:, 3:]),
        lambda a, b, h: (a, b),
        lambda o, y: F.cross_entropy(o[0], y) + squares(o[1]),
    ),
    "a value, with the features it comes from": (
        lambda a, b, h: (torch.cat([a.log_softmax(1), b], 1), h),
        lambda o, y: F.nll_loss(o[0][:, :3], y) + squares(o[0][:, 3:]),
        lambda a, b, h: (a, b),
        lambda o, y: F.cross_entropy(o[0], y) + squares(o[1]),
    ),
    "a bounded value": (
        lambda a, b, h: torch.cat([a.log_softmax(1) * 2, b.tanh()], 1),
        lambda o, y: F.nll_loss(o[:, :3], y) + squares(o[:, 3:]),
        lambda a, b, h: (a, b.tanh()),
        lambda o, y: 2 * F.cross_entropy(o[0], y) + squares(o[1]),
    ),
    "two likelihoods": (
        lambda a, b, h: torch.cat([a.log_softmax(1), b.log_softmax(1)]),
        lambda o, y: F.nll_loss(o, torch.cat([y, y])),
        lambda a, b, h: (a, b),
        lambda o, y: (F.cross_entropy(o[0], y) + F.cross_entropy(o[1], y)) / 2,
    ),
    "nothing that bends": (
        lambda a, b, h: torch.cat([a.log_softmax(1), b], 1),
        lambda o, y: F.nll_loss(o[:, :3], y) + o[:, 3:].mean(),
        lambda a, b, h: (a, b),
        lambda o, y: F.cross_entropy(o[0], y) + o[1].mean(),
    ),
}


@METHODS
@pytest.mark.parametrize("name", PARTS)
def test_an_output_of_which_a_likelihood_is_a_part(name: str, method: str) -> None:
    """Actor and critic in one tensor: the same as in a tuple."""
    same(method, *PARTS[name])


@pytest.mark.parametrize("rank", [1, "full"])
def test_columns_of_a_part(rank: Any) -> None:
    same("hesscale_gn", *PARTS["a value"], rank=rank)


OWN: dict[str, tuple[Form, Loss, Form, Loss]] = {
    "a loss that nobody knows": (
        lambda a, b, h: {"loss": focal(a), "logits": a, "hidden": h},
        lambda o, y: o["loss"],
        lambda a, b, h: a,
        lambda o, y: focal(o),
    ),
    "one for each example": (
        lambda a, b, h: {"losses": focal(a, "none"), "logits": a},
        lambda o, y: o["losses"].sum() / 6,
        lambda a, b, h: a,
        lambda o, y: focal(o),
    ),
    "beside a known one": (
        lambda a, b, h: {"loss": focal(a) + F.cross_entropy(b, batch()[1]), "a": a, "b": b},
        lambda o, y: 0.5 * o["loss"],
        lambda a, b, h: (a, b),
        lambda o, y: 0.5 * focal(o[0]) + 0.5 * F.cross_entropy(o[1], y),
    ),
    "beside a known one of what is not returned": (
        lambda a, b, h: {"loss": focal(a) + F.smooth_l1_loss(b, torch.ones_like(b)), "logits": a},
        lambda o, y: o["loss"],
        lambda a, b, h: (a, b),
        lambda o, y: focal(o[0]) + F.smooth_l1_loss(o[1], torch.ones_like(o[1])),
    ),
    "a known one of something else than the output": (
        lambda a, b, h: {"loss": squares(a.softmax(1)), "logits": a},
        lambda o, y: o["loss"],
        lambda a, b, h: a,
        lambda o, y: squares(o.softmax(1)),
    ),
    "rooted by the loss function": (
        lambda a, b, h: {"loss": focal(a), "logits": a},
        lambda o, y: o["loss"].sqrt(),
        lambda a, b, h: a,
        lambda o, y: focal(o).sqrt(),
    ),
    "of a normal, without its mean and variance": (
        lambda a, b, h: F.gaussian_nll_loss(a, torch.ones_like(a), b.exp(), reduction="none"),
        lambda o, y: o.mean(),
        lambda a, b, h: (a, b.exp()),
        lambda o, y: F.gaussian_nll_loss(o[0], torch.ones_like(o[0]), o[1]),
    ),
}


@METHODS
@pytest.mark.parametrize("name", OWN)
def test_a_model_that_returns_its_own_loss(name: str, method: str) -> None:
    same(method, *OWN[name])


@METHODS
def test_a_linear_loss_has_no_curvature_whatever_else_the_model_returns(method: str) -> None:
    for form in (lambda a, b, h: (b,), lambda a, b, h: (b, h)):
        found = hesscale.estimate(method, Network(form), lambda o, y: -o[0].mean(), batch())
        assert not flat(found).any()


def in_place(o: Tensor, y: Tensor) -> Tensor:
    return squares(o.sigmoid_())


def with_a_note(o: dict[str, Tensor], y: Tensor) -> Tensor:
    o["probabilities"] = o["logits"].sigmoid()
    return squares(o["probabilities"])


def replacing(o: dict[str, Tensor], y: Tensor) -> Tensor:
    o["logits"] = o["logits"].sigmoid()
    return squares(o["logits"])


CHANGING: dict[str, tuple[Form, Loss]] = {
    "in place": (lambda a, b, h: a, in_place),
    "a new entry": (lambda a, b, h: {"logits": a}, with_a_note),
    "another entry": (lambda a, b, h: {"logits": a}, replacing),
}


@METHODS
@pytest.mark.parametrize("name", CHANGING)
def test_a_loss_function_may_change_the_outputs(name: str, method: str) -> None:
    same(method, *CHANGING[name], lambda a, b, h: a, lambda o, y: squares(o.sigmoid()))


@METHODS
def test_a_view_changed_in_place_is_refused(method: str) -> None:
    """Torch then takes the model's own node for it out of the graph."""
    model = Network(lambda a, b, h: (a[:, :2], b))
    with pytest.raises(ValueError, match="changes a view among the model's outputs in place"):
        hesscale.estimate(method, model, lambda o, y: squares(o[0].sigmoid_()) + squares(o[1]), batch())


class Gated(nn.Module):
    """x·σ(x) inside, whose gate may be returned as well."""

    def __init__(self, *, returns_gate: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.returns_gate = nn.Linear(4, 6), nn.Linear(6, 3), returns_gate
        self.double()

    def forward(self, x: Tensor) -> Any:
        u = self.inner(x)
        gate = u.sigmoid()
        y = self.outer(u * gate)
        return (y, gate) if self.returns_gate else (y,)


@METHODS
def test_a_tensor_that_the_loss_does_not_read_changes_nothing(method: str) -> None:
    plain, both = (
        hesscale.estimate(method, Gated(returns_gate=yes), lambda o, y: F.cross_entropy(o[0], y), batch())
        for yes in (False, True)
    )
    torch.testing.assert_close(both, plain, **TIGHT)


class Scaled(nn.Module):
    """A parameter without dimensions, returned beside many outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.weight = nn.Parameter(torch.tensor([0.3, -1.1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return x * self.weight.sum().tanh(), self.scale


def test_an_output_without_dimensions_from_the_side_of_the_parameters() -> None:
    model = Scaled()

    def loss_fn(o: Any, y: Tensor) -> Tensor:
        return (o[0] * o[1]).pow(2).mean()

    torch.testing.assert_close(
        flat(hesscale.estimate("ggn", model, loss_fn, batch())), dense_ggn(model, loss_fn), **TIGHT
    )
