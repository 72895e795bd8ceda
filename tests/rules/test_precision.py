"""Single precision at extreme inputs: a rule keeps the digits that double precision has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hesscale
from hesscale.rules import RULES
from hesscale.rules.families import Elementwise

from .case import Case
from .cases import CASES

SIZES = (0.0, 1e-8, 1e-4, 0.01, 0.3, 0.7, 0.999, 1.0001, 1.5, 3, 5, 8, 12, 17, 20, 40, 60, 80, 88, 100, 300, 1e4)
TOLERANCE = 1e-5
SMALLEST = 1e-37  # of a float32 with all its digits

# torch keeps y alone, and y = 1 says nothing of how far from saturation it is: gradients are as poor there
KEEPS_ITS_RESULT = {"CeluBackward1", "EluBackward1", "Expm1Backward0", "SigmoidBackward0", "TanhBackward0"}
# the transport is torch's own derivative squared, or close to a zero of f'
TORCH_IS_IMPRECISE = {"AcoshBackward0", "AtanhBackward0", "GeluBackward0"}
HAS_POLES = {"DigammaBackward0", "LgammaBackward0", "MvlgammaBackward0", "PolygammaBackward0"}


def of_one_variable(case: Case) -> bool:
    rule = RULES[case.node]
    tensors = [value for value in case.inputs if isinstance(value, Tensor)]
    excluded = KEEPS_ITS_RESULT | HAS_POLES | {"WhereBackward0"}  # whose condition has a shape
    return isinstance(rule, Elementwise) and len(tensors) == 1 == len(case.inputs) and case.node not in excluded


def curvature(
    function: Callable[[Tensor], Tensor], x: Tensor, *, transport: bool, weights: Tensor | None = None, **options: Any
) -> Tensor:
    """f'² or f'', times weights, in the precision of x."""
    x = x.clone().requires_grad_()
    y = function(x)
    seed = torch.ones_like(y) if weights is None else weights.to(y)
    g, s = (torch.zeros_like(y), seed) if transport else (seed, None)
    (found,) = hesscale.diagonal(y, x, g, s, **options)
    return torch.zeros_like(x) if found is None else found


def assert_digits(
    function: Callable[[Tensor], Tensor], x: Tensor, *, tolerance: float = TOLERANCE, **options: Any
) -> None:
    """The float32 curvature is the float64 one, wherever that is a number float32 can hold."""
    single, double = curvature(function, x, **options).double(), curvature(function, x.double(), **options)
    there = double.abs() < torch.finfo(torch.float32).max
    wrong = there & ~((single - double).abs() <= tolerance * double.abs() + SMALLEST)
    listed = [f"{tuple(place)}: {single[*place]:.8g}, not {double[*place]:.8g}" for place in wrong.nonzero().tolist()]
    assert not listed


@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
@pytest.mark.parametrize("case", [*filter(of_one_variable, CASES)], ids=lambda case: case.label)
def test_functions_of_one_variable(case: Case, transport: bool) -> None:
    if transport and case.node in TORCH_IS_IMPRECISE:
        pytest.skip("torch's own first derivative has no more digits")
    assert_digits(case.function, torch.tensor([*SIZES, *(-size for size in SIZES)]), transport=transport)


LOGITS = torch.tensor([-100.0, -80, -40, -20, -8, -1, 0, 1, 8, 20, 40, 80, 100])


@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("positive", [None, 2.5])
def test_binary_cross_entropy(target: float, positive: float | None, transport: bool) -> None:
    def loss(x: Tensor) -> Tensor:
        weight = None if positive is None else torch.full_like(x, positive)
        options: Any = {"reduction": "none", "pos_weight": weight}
        return F.binary_cross_entropy_with_logits(x, torch.full_like(x, target), **options)

    assert_digits(loss, LOGITS, transport=transport)


def test_binary_cross_entropy_is_symmetric() -> None:
    found = curvature(lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), LOGITS, transport=False)
    torch.testing.assert_close(found, found.flip(0), rtol=1e-6, atol=0)
    assert bool((found[1:-1] > 0).all())


@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        lambda x: F.soft_margin_loss(x, -torch.ones_like(x), reduction="none"),
        lambda x: F.glu(torch.stack([torch.ones_like(x), x], -1), -1).squeeze(-1),
        lambda x: torch.logaddexp(x, torch.zeros_like(x)),
        lambda x: torch.logaddexp2(torch.zeros_like(x), x),
    ],
    ids=["margin", "negative margin", "glu", "logaddexp", "logaddexp2"],
)
def test_sigmoids_in_disguise(function: Callable[[Tensor], Tensor], transport: bool) -> None:
    assert_digits(function, LOGITS, transport=transport)


def test_log_ndtr_far_in_the_tail() -> None:
    """log Φ(x) → −x²/2 − log(−x) − …:  f'' → −1 + 1/x²."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([-100.0, -1e3, -1e4, -1e8], dtype=dtype)
        expected = -1 + 1 / x.square() - 6 / x**4
        torch.testing.assert_close(
            curvature(torch.special.log_ndtr, x, transport=False),
            expected.to(dtype),
            rtol=10 * torch.finfo(dtype).eps if dtype is torch.float32 else 1e-10,  # the next term of the series
            atol=0,
        )


LEADS = (0.0, 0.5, 1, 2, 5, 10, 15, 20, 30, 50, 80)


def leading(classes: int) -> Tensor:
    """Logits of which one leads, by more from row to row."""
    rows = torch.randn(len(LEADS), classes, generator=torch.Generator().manual_seed(0))
    rows[:, classes // 2] = rows.amax(1) + torch.tensor(LEADS)
    return rows


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log-softmax": lambda x: x.log_softmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "cross-entropy": lambda x: F.cross_entropy(x, torch.full((len(x),), x.shape[1] // 2), reduction="none"),
    "other dimension": lambda x: x.t().log_softmax(0).t(),
}


@pytest.mark.parametrize("method", ["hesscale", "bl89"])
@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
@pytest.mark.parametrize("classes", [1, 2, 10, 50_000])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_confident_predictions(name: str, classes: int, transport: bool, method: str) -> None:
    x, function = leading(classes), FUNCTIONS[name]
    y = function(x)
    weights = torch.full_like(y, 2.0 if transport else -2.0)  # of one sign, or such that no sum of g cancels
    if y.shape == x.shape:
        weights[:, classes // 2] = 1.0
    exact = x.double().softmax(-1)
    error = max(float(((q - exact) / exact).abs().max()) for q in (x.softmax(-1), x.t().softmax(0).t()))
    assert_digits(
        function, x, tolerance=TOLERANCE + 3 * error, transport=transport, weights=weights, method=method
    )  # torch's own sum of 50,000 probabilities is not one to rounding


def test_a_norm_with_one_large_entry() -> None:
    x = torch.tensor([[1.0, 1e-3, 2e-3], [1e4, 1.0, 2.0], [1e8, 1.0, -1.0]])
    for p in (2.0, 1.5, 3.0):
        assert_digits(lambda t, p=p: torch.linalg.vector_norm(t, p, dim=-1), x, transport=False)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["log-softmax", "softmax", "logsumexp"])
@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
def test_excluded_classes(name: str, transport: bool) -> None:
    """−∞ is a class that cannot be: it has no curvature, and the others' are as they are without it."""
    x = leading(6)

    def function(logits: Tensor) -> Tensor:
        y = FUNCTIONS[name](logits)
        return y if y.dim() == 1 else y[:, :6]

    ours = curvature(function, torch.cat([x, torch.full((len(x), 2), -torch.inf)], 1), transport=transport)
    torch.testing.assert_close(ours[:, :6], curvature(function, x, transport=transport), rtol=1e-6, atol=0)
    assert not ours[:, 6:].any()


def test_certainty() -> None:
    """One-hot to rounding, of one class only, or of none at all."""
    certain = torch.tensor([[0.0, -1e4, -1e4]])
    for name in ("log-softmax", "softmax", "logsumexp"):
        for x in (certain, torch.zeros(2, 1), torch.zeros(0, 3)):
            assert not curvature(FUNCTIONS[name], x, transport=False).any()
    assert not curvature(lambda x: x.log_softmax(0), torch.tensor(3.0), transport=False).any()


def attended(q: Tensor, fused: bool) -> Tensor:
    """Attention in which each query is sure of one key, more so from row to row."""
    k, v = (torch.randn(1, 1, 5, 4, generator=torch.Generator().manual_seed(i)).to(q) for i in (1, 2))
    if fused:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)
    weights = (q @ k.mT).softmax(-1)
    return weights @ v


@pytest.mark.parametrize("transport", [False, True], ids=["residual", "transport"])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_to_one_key(fused: bool, transport: bool) -> None:
    lead = torch.tensor([0.0, 1, 3, 6, 10, 15]).reshape(1, 1, -1, 1)
    q = torch.randn(1, 1, 1, 4, generator=torch.Generator().manual_seed(0)) * lead
    weights = torch.rand(q.shape, generator=torch.Generator().manual_seed(3)) + 0.5
    assert_digits(lambda x: attended(x, fused), q, transport=transport, weights=weights)
