"""Loading state: averages of half precision keep their digits, and torch's Adam and AdamW hand over theirs."""

from typing import Any

import pytest
import torch
from torch import nn

import hesscale

from .small import assert_close, assert_same, loss_of, network, parameters, random, train
from .test_conventions import saved_and_loaded


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_half_precision_are_loaded_as_they_were(dtype: torch.dtype) -> None:
    p = nn.Parameter(random(5).to(dtype))
    optimizer = hesscale.AdaHesScale([p], lr=0.01)

    def steps(optimizer: Any, p: Any, numbers: range) -> None:
        for step in numbers:
            p.grad, p.curvature = random(5, seed=step).to(dtype), random(5, seed=90 + step).float() * 1e-6
            optimizer.step()

    steps(optimizer, p, range(3))
    q = nn.Parameter(p.detach().clone())
    other = hesscale.AdaHesScale([q])
    seen = []
    other.register_load_state_dict_post_hook(lambda it: seen.append(it.state[q]["exp_avg"].dtype))
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    assert seen == [torch.float32]
    for name in ("exp_avg", "mean_curvature"):
        assert torch.equal(other.state[q][name], optimizer.state[p][name])
        assert other.state[q][name] is not optimizer.state[p][name]
    steps(optimizer, p, range(3, 6))
    steps(other, q, range(3, 6))
    assert_same([p], [q])


def test_hooks_of_the_user_see_and_change_what_is_loaded() -> None:
    p = nn.Parameter(random(3).half())
    optimizer = hesscale.AdaHesScale([p])
    p.grad, p.curvature = torch.ones_like(p), torch.ones(3)
    optimizer.step()

    def doubled(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: {**one, "exp_avg": one["exp_avg"] * 2} for key, one in state_dict["state"].items()}
        return {**state_dict, "state": state}

    expected = optimizer.state[p]["exp_avg"] * 2
    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[p]["exp_avg"], expected)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"foreach": True}], ids=str)
def test_the_state_of_adam_is_taken_over(kind: Any, options: dict[str, Any]) -> None:
    model = network()
    adam = kind(model.parameters(), lr=0.003, **options)
    for step in range(4):
        adam.zero_grad()
        loss_of(model, step).backward()
        adam.step()
    optimizer = hesscale.AdaHesScale(model.parameters(), every=2, bound=None)
    with pytest.warns(UserWarning, match="exp_avg and step are taken over") as caught:
        optimizer.load_state_dict(saved_and_loaded(adam.state_dict()))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert optimizer.param_groups[0]["lr"] == 0.003
    for p in model.parameters():
        state = optimizer.state[p]
        assert torch.equal(state["exp_avg"], adam.state[p]["exp_avg"])
        assert (state["step"].item(), state["refreshes"]) == (4.0, 0)
        assert not state["mean_curvature"].any()
    before, m = parameters(model), [adam.state[p]["exp_avg"].clone() for p in model.parameters()]
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, 9))
    h = [p.curvature.clone() for p in model.parameters()]
    optimizer.step()
    expected = [
        p - 0.003 * (0.9 * a + 0.1 * q.grad) / (1 - 0.9**5) / (c.abs() + 1e-8) * (c != 0)
        for p, a, q, c in zip(before, m, model.parameters(), h, strict=True)
    ]
    decay = 1 - 0.003 * optimizer.param_groups[0]["weight_decay"]
    expected = [e - p + p * decay for e, p in zip(expected, before, strict=True)]
    assert_close(parameters(model), expected, 1e-10)
    train(model, optimizer, range(3))


def test_the_state_of_other_optimizers_is_refused_and_nothing_has_changed() -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model).backward()
    sgd.step()
    optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
    train(model, optimizer, [0])
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="keeps momentum_buffer: only that of Adam and AdamW"):
        optimizer.load_state_dict(sgd.state_dict())
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    train(model, optimizer, [1])
