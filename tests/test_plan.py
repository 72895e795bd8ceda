"""What is known of a pass before it runs: where it stops, where the loss ends, and that planning is cheap."""

import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.graph import edge_of
from hesscale.plan import METHODS, make_plan

from .tensors import assert_close, leaf, random


def test_a_plan_is_made_once_for_a_graph_that_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 5))
    made: list[int] = []
    original = hesscale.plan.wire

    def wire(rows: Any, targets: Any = None) -> Any:
        made.append(len(rows))
        return original(rows, targets)

    monkeypatch.setattr(hesscale.plan, "wire", wire)
    hesscale.plan._kept_plan.cache_clear()
    for batch in (3, 3, 3, 5, 3, 5):
        hesscale.backward(F.cross_entropy(model(torch.randn(batch, 64)), torch.zeros(batch, dtype=torch.long)))
    assert len(made) == 2


def test_a_plan_grows_no_faster_than_its_graph() -> None:
    """Counted in what a plan holds: a chain of nodes that need no gradient once took the square of their number."""
    sizes = []
    for length in (200, 400):
        y = torch.ones(1, requires_grad=True)
        for _ in range(length):
            y = y + 1.0
        sizes.append(
            len(pickle.dumps([(stop.place, stop.inputs) for stop in make_plan(y, METHODS["hesscale"])[0].stops]))
        )
    assert sizes[1] < 2.5 * sizes[0]


def test_sums_of_many_terms_are_planned_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    original = hesscale.regions._is_pointwise

    def counted(*arguments: Any) -> bool:
        nonlocal looked
        looked += 1
        return original(*arguments)

    monkeypatch.setattr(hesscale.regions, "_is_pointwise", counted)
    counts = []
    for terms in (200, 400):
        looked = 0
        hesscale.check(sum((leaf(2) ** 2).sum() for _ in range(terms)))  # type: ignore[arg-type]
        counts.append(looked)
    assert counts[1] < 2.5 * counts[0]


def test_weights_of_the_whole_loss_do_not_end_it() -> None:
    """Gauss-Newton of a loss that is multiplied or rooted as a scalar is still that of the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
    parameters = list(model.parameters())
    weighted = torch.exp(-scale) * F.cross_entropy(model(x), y) + scale
    found = hesscale.diagonal(weighted, parameters, method="hesscale_gn")
    expected = hesscale.diagonal(F.cross_entropy(model(x), y), parameters, method="hesscale_gn")
    torch.testing.assert_close(found, expected)


def test_output_names_the_border_of_a_loss_in_two_stages() -> None:
    x, w, v, y = random(5, 3), leaf(4, 3), leaf(3, 4, seed=1), torch.tensor([0, 1, 2, 2, 1])
    logits = F.linear(torch.tanh(F.linear(x, w)), v)
    expected = hesscale.diagonal(F.cross_entropy(logits, y), [w, v], method="hesscale_gn", retain_graph=True)
    staged = F.nll_loss(torch.softmax(logits, 1).log(), y)
    for output in (logits, [logits]):
        found = hesscale.diagonal(staged, [w, v], method="hesscale_gn", output=output, retain_graph=True)
        assert_close(found, expected)
    # without a border the logarithm alone is taken for the loss
    unnamed = hesscale.diagonal(staged, [w, v], method="hesscale_gn")
    assert not torch.allclose(unnamed[1], expected[1], rtol=0.01)


def test_a_piecewise_linear_loss_has_no_gauss_newton_curvature() -> None:
    w = leaf(2, 3)
    prediction = torch.tanh(F.linear(random(5, 3), w))
    hesscale.backward(F.l1_loss(prediction, random(5, 2, seed=1)), method="hesscale_gn", retain_graph=True)
    assert torch.equal(w.curvature, torch.zeros(2, 3, dtype=torch.float64))
    assert hesscale.diagonal(F.l1_loss(prediction, random(5, 2, seed=1)), w)[0].abs().max() > 1e-3


def names_of_the_loss(loss: Tensor, **options: Any) -> set[str]:
    plan, graph = make_plan(loss, METHODS["hesscale_gn"], **options)
    return {graph.rows[stop.place][0] for stop in plan.stops if stop.is_loss}


def test_the_loss_reaches_back_to_the_first_nonlinear_operation() -> None:
    logits = torch.tanh(leaf(4, 3)) * 2
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])) * 3
    assert names_of_the_loss(loss) == {"MulBackward0", "NllLossBackward0", "LogSoftmaxBackward0"}


def test_where_curvature_is_seeded_there_is_no_loss() -> None:
    assert names_of_the_loss(torch.tanh(leaf(4, 3)), seeded=True) == set()


def test_stops_leaves_and_targets() -> None:
    w, x = leaf(3, 2), leaf(4, 3, seed=1)
    y = torch.tanh(x @ w)
    plan, graph = make_plan(y.square().sum(), METHODS["hesscale"])
    assert [graph.nodes[place].variable is tensor for place, tensor in zip(plan.leaves, (w, x), strict=True)]
    assert [graph.rows[stop.place][0] for stop in plan.stops] == [
        "SumBackward0",
        "PowBackward0",
        "TanhBackward0",
        "MmBackward0",
    ]
    plan, graph = make_plan(y.square().sum(), METHODS["hesscale"], targets=[edge_of(y)])
    assert plan.leaves == ()
    assert [graph.rows[stop.place][0] for stop in plan.stops] == ["SumBackward0", "PowBackward0"]


def test_half_precision_is_planned_in_single() -> None:
    w = leaf(3, dtype=torch.bfloat16)
    plan, _ = make_plan((w * 2).double().sum(), METHODS["hesscale"])
    assert set(plan.dtypes.values()) == {torch.float32, torch.float64}
