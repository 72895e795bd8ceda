"""Diagonals over batches, as every application gets them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hesscale
from hesscale.applications import diagonal_over
from hesscale.applications.consolidation import EWC
from hesscale.applications.over_batches import derivatives_over


def problem() -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batches = [(torch.randn(n, 3, dtype=torch.float64), torch.randint(2, (n,))) for n in (4, 7)]
    return model, batches


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "hessian", "squared_gradient"])
def test_a_diagonal_is_that_of_the_mean_loss_of_all_examples(method: str) -> None:
    model, batches = problem()
    found = diagonal_over(model, F.cross_entropy, batches, method=method)
    expected = hesscale.estimate_over(method, model, F.cross_entropy, batches)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_keeps_its_gradients_and_curvature() -> None:
    model, batches = problem()
    hesscale.backward(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    before = [(p.grad.clone(), p.curvature.clone()) for p in model.parameters()]
    diagonal_over(model, F.cross_entropy, batches, rank=1)
    for p, (gradient, curvature) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, gradient) and torch.equal(p.curvature, curvature)


def test_a_diagonal_brought_along_is_used_as_it_is() -> None:
    model, _ = problem()
    mine = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    assert all(torch.equal(value, mine[name]) for name, value in diagonal_over(model, diagonal=mine).items())


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda mine: mine.pop("0.weight"), "no entry for 0.weight: it belongs to another model"),
        (lambda mine: mine.update({"2.bias": torch.ones(3)}), r"shape \(3,\) for 2.bias, whose shape is \(2,\)"),
        (lambda mine: mine["2.bias"].fill_(torch.nan), "not finite for 2.bias"),
    ],
)
def test_a_diagonal_of_another_model_is_refused(spoil, sentence: str) -> None:
    model, _ = problem()
    mine = {name: torch.rand_like(p) for name, p in model.named_parameters()}
    spoil(mine)
    with pytest.raises(ValueError, match=sentence):
        diagonal_over(model, diagonal=mine)


def test_bad_batches_are_refused_in_one_sentence() -> None:
    model, batches = problem()
    with pytest.raises(ValueError, match="gave no examples"):
        diagonal_over(model, F.cross_entropy, iter([]))
    batches[1][0][0, 0] = torch.nan
    with pytest.raises(ValueError, match="look for inf or nan in the batches"):
        diagonal_over(model, F.cross_entropy, batches)
    with pytest.raises(TypeError, match="pass both, or diagonal="):
        diagonal_over(model)
    with pytest.raises(ValueError, match="no parameter of the model requires grad"):
        diagonal_over(nn.Tanh(), F.cross_entropy, batches)


def test_progress_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    model, batches = problem()
    seen: list[int] = []
    diagonal_over(model, F.cross_entropy, batches, progress=seen.append)
    assert seen == [1, 2]
    diagonal_over(model, F.cross_entropy, batches, progress=True)
    assert capsys.readouterr().err.endswith("curvature: 2/2 batches\n")


def test_gradients_over_many_batches_are_kept_in_single_precision() -> None:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    batches = [(torch.ones(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16())] * 1000
    gradient, diagonal = derivatives_over(model, F.mse_loss, batches, method="hessian")
    assert gradient["weight"].dtype == diagonal["weight"].dtype == torch.float32
    assert float(gradient["weight"]) == float(diagonal["weight"]) == 2
    found = hesscale.applications.pruning.saliencies(model, F.mse_loss, batches, order="second", method="hessian")
    assert float(found["weight"]) == -1


def test_a_diagonal_brought_along_for_half_precision_does_not_vanish() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    mine = {"weight": torch.tensor([[2e-8, 1e6]])}
    found = diagonal_over(model, diagonal=mine)["weight"]
    assert found.dtype == torch.float32 and torch.equal(found, mine["weight"])


def test_a_pruned_model_can_be_copied_afterwards() -> None:
    model, batches = problem()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    with torch.no_grad():
        model(batches[0][0])
    masked = model[0].weight
    derivatives_over(model, F.cross_entropy, batches)
    EWC(model).consolidate(F.cross_entropy, batches)
    hesscale.applications.pruning.saliencies(model, F.cross_entropy, batches, order="second")
    hesscale.applications.inspection.inspect(model, F.cross_entropy, batches)
    assert model[0].weight is masked
    copy.deepcopy(model)


def test_batches_count_by_the_size_that_is_given() -> None:
    """Where some targets are ignored, the mean of all that count is that of all of them in one batch."""
    model, _ = problem()
    batches = [(torch.randn(n, 3, dtype=torch.float64), torch.randint(2, (n,))) for n in (4, 7, 3)]
    batches[0][1][:3] = -100
    batches[2][1][:] = -100  # the mean of none is nan
    whole = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
    expected = derivatives_over(model, F.cross_entropy, whole, method="hessian")
    found = derivatives_over(
        model, F.cross_entropy, batches, method="hessian", size=lambda batch: (batch[1] != -100).sum()
    )
    for own, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            torch.testing.assert_close(own[name], value, rtol=1e-12, atol=1e-14)
