"""EWC: Bayes' rule where it is exact, several tasks, state_dict, and what is refused."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hesscale
from hesscale.applications.consolidation import EWC

Batch = tuple[Tensor, Tensor]


def half_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The negative log-likelihood of a Gaussian with unit variance, over the number of examples."""
    return (outputs - targets).square().sum() / (2 * len(targets))


def linear_gaussian(tasks: int) -> list[Batch]:
    """Each example sees one coordinate of θ alone: the Hessian Σ x xᵀ is diagonal."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in (5, 9, 14)[:tasks]:
        places = torch.arange(n) % 4
        x = F.one_hot(places, 4) * torch.randn(n, 1, generator=generator, dtype=torch.float64)
        found.append((x, torch.randn(n, 1, generator=generator, dtype=torch.float64)))
    return found


def minimize(model: nn.Module, objective) -> None:
    """Newton's method, in one step: the objective is quadratic."""
    (p,) = model.parameters()
    value = objective()
    (gradient,) = torch.autograd.grad(value, p, create_graph=True)
    rows = [torch.autograd.grad(one, p, retain_graph=True)[0].flatten() for one in gradient.flatten()]
    with torch.no_grad():
        p -= torch.linalg.solve(torch.stack(rows), gradient.detach().flatten()).view_as(p)


@pytest.mark.parametrize("method", ["hessian", "hesscale", "hesscale_gn"])
def test_on_a_linear_gaussian_model_it_is_bayes_rule(method: str) -> None:
    """Prior N(0, 1), three sets of data one after another: the posterior is that of all data at once."""
    data = linear_gaussian(3)
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    ewc = EWC(model)
    ewc.consolidate(diagonal={"weight": torch.ones(1, 4, dtype=torch.float64)})  # the prior
    for x, y in data:
        minimize(model, lambda x=x, y=y: len(y) * half_squares(model(x), y) + ewc())
        ewc.consolidate(half_squares, [(x, y)], method=method, weight=len(y))
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    precision = torch.eye(4, dtype=torch.float64) + x.T @ x
    mean = torch.linalg.solve(precision, x.T @ y).T
    torch.testing.assert_close(model.weight.detach(), mean, rtol=1e-10, atol=1e-12)
    found = ewc.state_dict()
    torch.testing.assert_close(found["tasks.0.anchor/weight"], mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["tasks.0.precision/weight"], precision.diagonal().unsqueeze(0), rtol=1e-10, atol=0)


def problem() -> tuple[nn.Module, list[list[Batch]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return model, [[(torch.randn(6, 3, dtype=torch.float64), torch.randint(2, (6,)))] for _ in range(2)]


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn_like(p)


def by_hand(model: nn.Module, anchors, precisions, strength: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for anchor, precision in zip(anchors, precisions, strict=True):
        for name, p in model.named_parameters():
            total = total + (precision[name].clamp(min=0) * (p - anchor[name]) ** 2).sum()
    return strength / 2 * total


@pytest.mark.parametrize("separate", [False, True])
def test_two_tasks_cost_what_the_formula_says(separate: bool) -> None:
    model, (first, second) = problem()
    ewc = EWC(model, strength=3.0, separate=separate, **({} if separate else {"decay": 0.5}))
    assert float(ewc()) == 0
    anchors, precisions = [], []
    for batches in (first, second):
        move(model)
        anchors.append({name: p.detach().clone() for name, p in model.named_parameters()})
        precisions.append(hesscale.applications.diagonal_over(model, F.cross_entropy, batches))
        ewc.consolidate(F.cross_entropy, batches)
    move(model)
    if not separate:
        both = {
            name: 0.5 * precisions[0][name].clamp(min=0) + precisions[1][name].clamp(min=0) for name in precisions[0]
        }
        anchors, precisions = anchors[1:], [both]
    expected = by_hand(model, anchors, precisions, 3.0)
    torch.testing.assert_close(ewc(), expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected, [*model.parameters()])
    for own, g in zip(torch.autograd.grad(ewc(), [*model.parameters()]), wanted, strict=True):
        torch.testing.assert_close(own, g, rtol=1e-10, atol=1e-14)
    assert [*ewc.parameters()] == []


@pytest.mark.parametrize("separate", [False, True])
def test_a_state_goes_into_a_fresh_penalty(separate: bool) -> None:
    model, tasks = problem()
    ewc = EWC(model, separate=separate)
    for batches in tasks:
        ewc.consolidate(F.cross_entropy, batches)
        move(model)
    fresh = EWC(model, separate=separate)
    fresh.load_state_dict(ewc.state_dict())
    assert torch.equal(fresh(), ewc()) and float(ewc().detach()) > 0
    outer = nn.ModuleDict({"model": model, "ewc": EWC(model, separate=separate)})
    outer.load_state_dict({**outer.state_dict(), **{f"ewc.{key}": value for key, value in ewc.state_dict().items()}})
    assert torch.equal(outer["ewc"](), ewc())


def test_a_penalty_never_rewards_distance() -> None:
    model, _ = problem()
    ewc = EWC(model)
    ewc.consolidate(diagonal={name: -torch.ones_like(p) for name, p in model.named_parameters()})
    move(model)
    assert float(ewc().detach()) == 0


def test_bad_input_is_one_sentence_and_changes_nothing() -> None:
    model, (first, second) = problem()
    ewc = EWC(model)
    ewc.consolidate(F.cross_entropy, first)
    move(model)
    before, spoilt = float(ewc().detach()), [(torch.full_like(second[0][0], torch.nan), second[0][1])]
    for batches, sentence in ((iter([]), "gave no examples"), (spoilt, "look for inf or nan")):
        with pytest.raises(ValueError, match=sentence):
            ewc.consolidate(F.cross_entropy, batches)
    with pytest.raises(ValueError, match="belongs to another model"):
        ewc.consolidate(diagonal={"0.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="pass the same params="):
        ewc.consolidate(F.cross_entropy, second, params=["0.weight"])
    with pytest.raises(ValueError, match="weight must be"):
        ewc.consolidate(F.cross_entropy, second, weight=-1.0)
    assert float(ewc().detach()) == before
    for options in ({"strength": -1.0}, {"strength": float("nan")}, {"decay": 1.5}, {"decay": 0.5, "separate": True}):
        with pytest.raises(ValueError, match=r"must be|decay is for"):
            EWC(model, **options)
    with pytest.raises(ValueError, match="no parameter of the model requires grad"):
        EWC(nn.Tanh()).consolidate(F.cross_entropy, first)
    apart = EWC(model, separate=True)
    apart.consolidate(F.cross_entropy, first)
    apart.consolidate(F.cross_entropy, second)
    with pytest.raises(ValueError, match="2 parabolas: it belongs to an EWC with separate=True"):
        ewc.load_state_dict(apart.state_dict())
    assert float(ewc().detach()) == before
    other = EWC(nn.Linear(3, 2))
    with pytest.raises(ValueError, match="belongs to another model"):
        other.load_state_dict(ewc.state_dict())
    assert len(other.tasks) == 0


def test_small_departures_in_half_precision_cost_what_the_formula_says() -> None:
    model = nn.Linear(3, 1, bias=False).half()
    nn.init.zeros_(model.weight)
    ewc = EWC(model, strength=1e4)
    ewc.consolidate(diagonal={"weight": torch.ones(1, 3)})
    nn.init.constant_(model.weight, 1e-4)
    assert float(ewc().detach()) == pytest.approx(1.5e-4, rel=1e-3)
    ewc().backward()
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 3).half(), rtol=1e-3, atol=0)


def test_a_state_without_parabolas_leaves_those_that_are_there() -> None:
    """Of a parent that was saved before it had a penalty."""
    model, (first, _) = problem()
    ewc = EWC(model)
    ewc.consolidate(F.cross_entropy, first)
    move(model)
    parent, before = nn.ModuleDict({"model": model, "ewc": ewc}), float(ewc().detach())
    state = nn.ModuleDict({"model": model}).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*ewc.tasks.0.precision/0/weight"):
        parent.load_state_dict(state)
    missing = parent.load_state_dict(state, strict=False).missing_keys
    assert sorted(missing) == sorted(f"ewc.{key}" for key in ewc.state_dict())
    assert float(ewc().detach()) == before > 0
    nn.ModuleDict({"model": model, "ewc": EWC(model)}).load_state_dict(state)  # nothing is missing in a fresh one


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda state: state.update({"tasks.0.precision/0/weight": torch.ones(1, 1)}), "belongs to another model"),
        (lambda state: state.update({"tasks.0.anchor/0/weight": torch.ones(1, 1)}), "belongs to another model"),
        (lambda state: state.pop("tasks.0.anchor/2/bias"), r"incomplete, without precision or anchor of 2\.bias"),
        (lambda state: state.pop("tasks.0.precision/2/bias"), r"incomplete, without precision or anchor of 2\.bias"),
        (lambda state: state.update({"tasks.2.anchor/2/bias": torch.ones(2)}), "parabolas 0, 2, not all from 0"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_damaged_state_is_refused_and_changes_nothing(spoil, sentence: str, strict: bool) -> None:
    model, (first, second) = problem()
    ewc, other = EWC(model), EWC(model)
    ewc.consolidate(F.cross_entropy, first)
    other.consolidate(F.cross_entropy, second)
    move(model)
    before, state = float(ewc().detach()), other.state_dict()
    spoil(state)
    with pytest.raises(ValueError, match=sentence):
        ewc.load_state_dict(state, strict=strict)
    assert float(ewc().detach()) == before


def test_keys_of_something_else_are_unexpected() -> None:
    model, (first, _) = problem()
    ewc = EWC(model)
    ewc.consolidate(F.cross_entropy, first)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*tasks.0.other"):
        EWC(model).load_state_dict({**ewc.state_dict(), "tasks.0.other": torch.ones(1)})


def test_names_of_parameters_may_have_any_characters() -> None:
    model = nn.Module()
    model.a = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("b/c", "b~1c", "~", "~0", "d e", "ü")})
    ewc = EWC(model, strength=2.0)
    ewc.consolidate(diagonal={name: torch.ones(2) for name, _ in model.named_parameters()})
    with torch.no_grad():
        for p in model.parameters():
            p += 1
    assert float(ewc().detach()) == 12
    fresh = EWC(model, strength=2.0)
    fresh.load_state_dict(ewc.state_dict())
    assert float(fresh().detach()) == 12


def test_a_copy_follows_the_model_it_was_copied_with() -> None:
    model, (first, _) = problem()
    ewc = EWC(model)
    ewc.consolidate(F.cross_entropy, first)
    other, copied = copy.deepcopy((model, ewc))
    move(model)
    assert float(ewc().detach()) > 0 == float(copied().detach())
    move(other)
    assert float(copied().detach()) > 0
