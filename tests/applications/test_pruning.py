"""Pruning: saliencies by hand, what torch's own methods make of the scores, masks that last, and what is refused."""

import copy

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune as torch_prune

import hesscale
from hesscale.applications import pruning

Batch = tuple[Tensor, Tensor]


def problem(activation: type[nn.Module] = nn.Tanh) -> tuple[nn.Sequential, list[Batch]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), activation(), nn.Linear(5, 4)).double()
    return model, [(torch.randn(n, 3, dtype=torch.float64), torch.randint(4, (n,))) for n in (4, 7)]


def everything(batches: list[Batch]) -> Batch:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def by_hand(model: nn.Module, batches: list[Batch]) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradient and diagonal of the mean loss of all examples, from torch.func alone."""
    x, y = everything(batches)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(own: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, own, x), y)

    gradient, hessian = torch.func.grad(loss)(params), torch.func.jacrev(torch.func.jacrev(loss))(params)
    return {
        name: (gradient[name], hessian[name][name].reshape(p.numel(), -1).diagonal().view(p.shape))
        for name, p in params.items()
    }


def test_the_exact_diagonal_gives_optimal_brain_damage() -> None:
    model, batches = problem()
    exact = by_hand(model, batches)
    found = pruning.saliencies(model, F.cross_entropy, batches, method="hessian")
    assert set(found) == {"0.weight", "2.weight"}
    for name, s in found.items():
        w = model.get_parameter(name).detach()
        torch.testing.assert_close(s, exact[name][1] * w**2 / 2, rtol=1e-10, atol=1e-14)


def test_the_second_order_model_of_the_loss_is_right_to_third_order() -> None:
    """With a weight scaled by (1 − t) the loss changes by t(−gw) + t²(½hw²) + O(t³)."""
    model, batches = problem()
    exact = by_hand(model, batches)
    found = pruning.saliencies(model, F.cross_entropy, iter(batches), order="second", method="hessian")
    for name, s in found.items():
        w, (g, h) = model.get_parameter(name).detach(), exact[name]
        torch.testing.assert_close(s, -g * w + h * w**2 / 2, rtol=1e-10, atol=1e-14)
    x, y = everything(batches)
    w, t = model[0].weight.detach(), 1e-3
    start = F.cross_entropy(model(x), y)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[1, 2] *= 1 - t
    g, h = (one[1, 2] for one in exact["0.weight"])
    predicted = -t * g * w[1, 2] + t**2 * h * w[1, 2] ** 2 / 2
    assert abs(F.cross_entropy(changed(x), y) - start - predicted) < 1e-9 < abs(predicted)


def test_scores_go_straight_into_torch_and_mean_the_same_there() -> None:
    model, batches = problem()
    twin = copy.deepcopy(model)
    found = pruning.scores(model, F.cross_entropy, batches)
    torch_prune.global_unstructured([*found], torch_prune.L1Unstructured, importance_scores=found, amount=0.6)
    pruning.prune(twin, 0.6, F.cross_entropy, batches)
    for place in (0, 2):
        assert torch.equal(model[place].weight_mask, twin[place].weight_mask)
    zeros = sum(int((model[place].weight == 0).sum()) for place in (0, 2))
    assert zeros == round(0.6 * 35)


def test_negative_saliencies_are_not_the_first_to_go() -> None:
    model, _ = problem()
    mine = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    mine["0.weight"][0] = -1e6
    pruning.prune(model, 0.5, diagonal=mine)
    assert bool(model[0].weight_mask[0].all())


@pytest.mark.parametrize("order", ["obd", "second"])
def test_group_sums_are_those_of_their_members(order: pruning.Order) -> None:
    model, batches = problem()
    groups = pruning.neurons(model, without=["2"])
    assert set(groups) == {"0.weight", "0.bias"}
    each = pruning.saliencies(model, F.cross_entropy, batches, order=order, params=[*groups])
    sums = each["0.weight"].abs().sum(1) + each["0.bias"].abs()
    found = pruning.scores(model, F.cross_entropy, batches, order=order, groups=groups)
    torch.testing.assert_close(found[model[0], "weight"], sums.unsqueeze(1).expand(5, 3))
    torch_prune.ln_structured(model[0], "weight", amount=2, n=1, dim=0, importance_scores=found[model[0], "weight"])
    assert set((model[0].weight == 0).all(1).nonzero().flatten().tolist()) == set(sums.argsort()[:2].tolist())


def test_neurons_and_filters_go_as_a_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(5, 1, 6, 6), torch.randint(3, (5,)))]
    groups = pruning.neurons(model, without=["5"])
    found = pruning.prune(model, 0.5, F.cross_entropy, batches, groups=groups)
    gone = [(model[place].weight.flatten(1) == 0).all(1) for place in (0, 3)]
    assert sum(int(one.sum()) for one in gone) == 7
    for place, one in zip((0, 3), gone, strict=True):
        assert torch.equal(model[place].bias == 0, one)
        assert bool((model[place].weight[~one] != 0).all())
    assert found.rounds == (0.5,)
    assert not hasattr(model[5], "weight_mask")


def attention() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.Flatten(), nn.Linear(8 * 3, 3))
    return model, [(torch.randn(6, 3, 8), torch.randint(3, (6,)))]


def test_a_head_without_its_weights_says_nothing() -> None:
    model, batches = attention()
    groups = pruning.heads(model)
    pruning.prune(model, 0.5, F.cross_entropy, batches, groups=groups)
    layer = model[0].self_attn
    (gone,) = (layer.out_proj.weight == 0).all(0).view(2, 4).all(1).nonzero().flatten().tolist()
    rows = layer.in_proj_weight.view(3, 2, 4, 8)
    assert bool((rows[:, gone] == 0).all()) and bool((rows[:, 1 - gone] != 0).any())


def test_a_masked_output_of_attention_is_trained_and_stays_masked() -> None:
    """torch reads out_proj.weight without calling out_proj: its hook alone would leave a weight of long ago."""
    model, batches = attention()

    def fine_tune(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(batches[0][0]), batches[0][1]).backward()
            optimizer.step()

    out = model[0].self_attn.out_proj
    before = out.weight.detach().clone()
    pruning.prune(model, 0.5, F.cross_entropy, batches, fine_tune=fine_tune)
    model(batches[0][0])
    assert not torch.equal(out.weight_orig, before)
    assert torch.equal(out.weight, out.weight_orig * out.weight_mask)
    again = attention()[0]
    pruning.load_pruned(again, model.state_dict())
    torch.testing.assert_close(again(batches[0][0]), model(batches[0][0]))


def test_rounds_with_fine_tuning_reach_the_amount_and_masks_hold() -> None:
    model, batches = problem()
    seen: list[float] = []

    def fine_tune(net: nn.Module) -> None:
        zeros = sum(int((net[place].weight == 0).sum()) for place in (0, 2))
        seen.append(zeros / 35)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        for x, y in batches * 3:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    found = pruning.prune(model, 0.8, F.cross_entropy, batches, schedule=3, fine_tune=fine_tune)
    assert seen == [round(step * 35) / 35 for step in (1 - 0.2 ** (1 / 3), 1 - 0.2 ** (2 / 3), 0.8)]
    model(batches[0][0])
    assert sum(int((model[place].weight == 0).sum()) for place in (0, 2)) == 28
    assert found.sparsity == pytest.approx(0.8)
    assert "80.0% of the weights removed in 3 rounds" in str(found)


def test_a_mask_survives_state_dict_and_a_second_pruning() -> None:
    model, batches = problem()
    pruning.prune(model, 0.4, F.cross_entropy, batches)
    first = {place: model[place].weight_mask.clone() for place in (0, 2)}
    fresh, _ = problem()
    pruning.load_pruned(fresh, model.state_dict())
    assert all(torch.equal(fresh[place].weight_mask, first[place]) for place in (0, 2))
    torch.testing.assert_close(fresh(batches[0][0]), model(batches[0][0]))
    pruning.prune(fresh, 0.7, F.cross_entropy, batches, params=["0.weight", "2.weight"])
    assert all(bool((fresh[place].weight_mask <= first[place]).all()) for place in (0, 2))
    assert sum(int((fresh[place].weight_mask == 0).sum()) for place in (0, 2)) == round(0.7 * 35)
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(fresh[place].weight_mask, first[place]) for place in (0, 2))


def test_a_diagonal_may_have_the_names_from_before() -> None:
    model, batches = problem()
    mine = hesscale.applications.diagonal_over(model, F.cross_entropy, batches)
    pruning.prune(model, 0.3, diagonal=mine)
    pruning.prune(model, 0.6, diagonal=mine)
    twin, _ = problem()
    pruning.prune(twin, 0.6, diagonal=mine)
    assert torch.equal(twin[0].weight_mask, model[0].weight_mask)


def test_gradients_and_curvature_are_left_alone() -> None:
    model, batches = problem()
    hesscale.backward(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    before = [(p.grad.clone(), p.curvature.clone()) for p in model.parameters()]
    pruning.prune(model, 0.5, F.cross_entropy, batches, order="second")
    named = {**dict(model.named_parameters())}
    after = [named[name] for name in ("0.weight_orig", "0.bias", "2.weight_orig", "2.bias")]
    for p, (gradient, curvature) in zip(after, before, strict=True):
        assert torch.equal(p.grad, gradient) and torch.equal(p.curvature, curvature)


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_pruned_model_can_be_copied_and_looked_at_before_it_is_used() -> None:
    model, batches = problem()
    pruning.prune(model, 0.6, F.cross_entropy, batches)
    fresh = copy.deepcopy(problem()[0])
    pruning.load_pruned(fresh, copy.deepcopy(model).state_dict())
    for place in (0, 2):
        assert torch.equal(fresh[place].weight, model[place].weight_orig * model[place].weight_mask)
    assert copy.deepcopy(fresh)(batches[0][0]).requires_grad


def test_a_recurrent_layer_is_pruned_and_trained() -> None:
    class Last(nn.Module):
        def forward(self, found: tuple[Tensor, object]) -> Tensor:
            return found[0][:, -1]

    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(4, 8, batch_first=True), Last(), nn.Linear(8, 3))
    x, y = torch.randn(5, 6, 4), torch.randint(3, (5,))

    def fine_tune(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    before = model[0].weight_hh_l0.detach().clone()
    pruning.prune(model, 0.5, F.cross_entropy, [(x, y)], schedule=2, fine_tune=fine_tune)
    model(x)
    used, orig, mask = model[0]._flat_weights[1], model[0].weight_hh_l0_orig, model[0].weight_hh_l0_mask
    assert torch.equal(used, orig * mask) and 0 < float(mask.mean()) < 1
    assert not torch.equal(orig, before)


def test_numbers_of_numpy_will_do() -> None:
    model, batches = problem()
    amount, rounds = numpy.float64(0.5), numpy.int64(2)
    found = pruning.prune(model, amount, F.cross_entropy, batches, schedule=rounds)  # type: ignore[arg-type]
    assert len(found.rounds) == 2


def test_a_module_that_is_called_twice_has_one_mask() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    batch = (torch.randn(5, 4), torch.randint(4, (5,)))
    assert pruning.prune(model, 0.5, F.cross_entropy, [batch]).sparsity == 0.5
    assert int((layer.weight == 0).sum()) == 8


def test_half_precision_loses_no_small_saliency() -> None:
    model = nn.Linear(2, 1, bias=False).half()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1e-4, 2e-4]]))
    found = pruning.saliencies(model, diagonal={"weight": torch.tensor([[2e4, 2.0]])})["weight"]
    torch.testing.assert_close(found, torch.tensor([[1e-4, 4e-8]]), rtol=1e-3, atol=0.0)


def test_a_masked_bias_of_attention_is_applied_too() -> None:
    model, batches = attention()
    out = model[0].self_attn.out_proj
    with torch.no_grad():
        out.bias.copy_(torch.randn(8))
    pruning.prune(model, 0.5, F.cross_entropy, batches, params=["0.self_attn.out_proj.bias"], order="second")
    with torch.no_grad():
        out.bias_orig += 1
    model(batches[0][0])
    assert torch.equal(out.bias, out.bias_orig * out.bias_mask)


def test_an_error_of_fine_tuning_leaves_the_masks_of_its_round() -> None:
    model, batches = problem()

    def fine_tune(net: nn.Module) -> None:
        raise RuntimeError("no power")

    with pytest.raises(RuntimeError, match="no power"):
        pruning.prune(model, 0.8, F.cross_entropy, batches, schedule=[0.4, 0.8], fine_tune=fine_tune)
    assert sum(int((model[place].weight_mask == 0).sum()) for place in (0, 2)) == round(0.4 * 35)
    assert pruning.prune(model, 0.8, F.cross_entropy, batches).sparsity == pytest.approx(0.8)
