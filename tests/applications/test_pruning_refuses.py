"""What pruning refuses, in one sentence and with nothing changed."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hesscale.applications import pruning
from hesscale.estimators import ESTIMATORS

from .test_pruning import problem, state


@pytest.mark.parametrize("amount", [0, 1, -0.1, 1.5, True, "half", float("nan")])
def test_an_amount_out_of_range_is_refused(amount) -> None:
    model, batches = problem()
    before = state(model)
    with pytest.raises(ValueError, match="amount must be a share between 0 and 1"):
        pruning.prune(model, amount, F.cross_entropy, batches)
    assert state(model).keys() == before.keys()


def bad_batches() -> dict[str, tuple[object, str]]:
    _, batches = problem()
    spoilt = [(x.clone(), y) for x, y in batches]
    spoilt[1][0][0, 0] = torch.nan
    return {
        "empty": ([], "gave no examples"),
        "exhausted": (itertools.islice(batches, 0), "gave no examples"),
        "nan": (spoilt, "look for inf or nan"),
        "no pair": ([batches[0][0]], "must be a pair"),
    }


@pytest.mark.parametrize("kind", bad_batches())
@pytest.mark.parametrize("order", ["obd", "second"])
def test_bad_batches_are_refused_and_nothing_changes(kind: str, order: pruning.Order) -> None:
    model, _ = problem()
    before = state(model)
    batches, sentence = bad_batches()[kind]
    with pytest.raises((ValueError, TypeError), match=sentence):
        pruning.prune(model, 0.5, F.cross_entropy, batches, order=order)  # type: ignore[arg-type]
    after = state(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_what_else_is_refused() -> None:
    model, batches = problem()
    with pytest.raises(ValueError, match="no weight of two or more dimensions"):
        pruning.prune(nn.Sequential(nn.Tanh()), 0.5, F.cross_entropy, batches)
    with pytest.raises(ValueError, match="it belongs to another model"):
        pruning.prune(model, 0.5, diagonal={"0.weight": torch.ones(3, 5)})
    with pytest.raises(ValueError, match="exhaust batches"):
        pruning.prune(model, 0.5, F.cross_entropy, iter(batches), schedule=2)
    with pytest.raises(ValueError, match="several rounds find it anew"):
        pruning.prune(model, 0.5, diagonal={}, schedule=2)
    for schedule in (0, True, None, 2.5, [], [0.3, 0.2, 0.5], [0.2, 0.4]):
        with pytest.raises(ValueError, match="schedule must"):
            pruning.prune(model, 0.5, F.cross_entropy, batches, schedule=schedule)
    with pytest.raises(ValueError, match='order must be "obd" or "second"'):
        pruning.scores(model, F.cross_entropy, batches, order="first")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter 'head"):
        pruning.scores(model, F.cross_entropy, batches, params=["head.weight"])
    with pytest.raises(ValueError, match=r"no parameter '0.training'"):
        pruning.scores(model, F.cross_entropy, batches, params=["0.training"])
    assert not hasattr(model[0], "weight_mask")
    pruning.prune(model, 0.5, F.cross_entropy, batches)
    with pytest.raises(ValueError, match=r"is removed already: an amount counts that, and must be above it, not 0.5"):
        pruning.prune(model, 0.5, F.cross_entropy, batches)


def test_groups_that_do_not_fit_are_refused() -> None:
    model, batches = problem()
    for numbers, sentence in (
        (torch.ones(5), "whole numbers"),
        (torch.tensor([-1]), "whole"),
        (torch.arange(4), "fit"),
    ):
        with pytest.raises(ValueError, match=sentence):
            pruning.scores(model, F.cross_entropy, batches, groups={"0.weight": numbers})
    with pytest.raises(ValueError, match="no entry for 2"):
        pruning.scores(model, F.cross_entropy, batches, groups={"0.weight": torch.zeros(1).long()}, params=["2.weight"])
    with pytest.raises(ValueError, match=r"no nn.MultiheadAttention"):
        pruning.heads(model)


def test_a_weight_of_two_modules_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    batch = (torch.randn(5, 4), torch.randint(4, (5,)))
    with pytest.raises(ValueError, match=r"0.weight and 2.weight are one parameter"):
        pruning.prune(model, 0.5, F.cross_entropy, [batch])
    assert not hasattr(model[0], "weight_mask")


NORMS = {
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
    "older weight_norm": torch.nn.utils.weight_norm,
    "older spectral_norm": torch.nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", NORMS)
def test_parametrized_weights_are_left_out_or_refused_by_name(norm: str) -> None:
    model, batches = problem()
    NORMS[norm](model[0])
    before = state(model)
    originals = [name for name, p in model.named_parameters() if name.startswith("0.") and p.dim() > 1]
    for name in ("0.weight", *originals):
        with pytest.raises(ValueError, match="a parametrized weight cannot be pruned; leave it out"):
            pruning.prune(model, 0.5, F.cross_entropy, batches, params=[name])
    assert state(model).keys() == before.keys()
    assert set(pruning.neurons(model)) == {"2.weight", "2.bias"}
    found = pruning.prune(model, 0.9, F.cross_entropy, batches)
    assert set(found.by_parameter) == {"2.weight"}
    assert bool(torch.isfinite(model(batches[0][0])).all())


class Reading(nn.Module):
    """Reads weights of modules that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called, self.read = nn.Linear(3, 5), nn.Linear(5, 5)
        self.listed = nn.ParameterList([torch.randn(4, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.called(x).tanh(), self.read.weight, self.read.bias)
        return F.linear(x.tanh(), self.listed[0])


@pytest.mark.parametrize("order", ["obd", "second"])
@pytest.mark.parametrize("method", ["hesscale", "hessian", "squared_gradient"])
def test_weights_of_modules_that_are_never_called_are_refused(order: pruning.Order, method: str) -> None:
    _, batches = problem()
    model = Reading().double()
    before = state(model)
    with pytest.raises(ValueError, match=r"read.weight, listed.0: no pass called the module"):
        pruning.prune(model, 0.5, F.cross_entropy, iter(batches), order=order, method=method)
    after = state(model)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert not any(module._forward_pre_hooks for module in model.modules())
    found = pruning.prune(model, 0.5, F.cross_entropy, batches, order=order, params=["called.weight"], schedule=2)
    assert set(found.by_parameter) == {"called.weight"}


@pytest.mark.parametrize("method", ESTIMATORS)
def test_calls_are_seen_with_every_method(method: str) -> None:
    model, batches = problem()
    assert pruning.prune(model, 0.6, F.cross_entropy, batches, method=method).sparsity == pytest.approx(0.6)


@pytest.mark.parametrize("pruned_before", [False, True])
@pytest.mark.parametrize("kind", ["shapes differ", "a name is missing"])
def test_a_state_that_does_not_fit_changes_nothing(kind: str, pruned_before: bool) -> None:
    source, batches = problem()
    pruning.prune(source, 0.4, F.cross_entropy, batches)
    bad = state(source)
    if kind == "shapes differ":
        bad["2.bias"] = torch.zeros(7)
    else:
        del bad["0.bias"]
    model, _ = problem()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    if pruned_before:
        pruning.prune(model, 0.2, F.cross_entropy, batches, params=["0.weight"])
    before, outputs, parameters = state(model), model(batches[0][0]), [*model.named_parameters()]
    with pytest.raises(RuntimeError, match=r"2.bias|0.bias"):
        pruning.load_pruned(model, bad)
    after = state(model)
    assert [*after] == [*before] and all(torch.equal(after[name], before[name]) for name in before)
    kept = zip(model.named_parameters(), parameters, strict=True)
    assert all(name == other and p is q for (name, p), (other, q) in kept)
    assert torch.equal(model(batches[0][0]), outputs)
    assert bool(model[0]._forward_pre_hooks) == pruned_before and not model[2]._forward_pre_hooks
    pruning.load_pruned(model, source.state_dict())
    torch.testing.assert_close(model(batches[0][0]), source(batches[0][0]))
