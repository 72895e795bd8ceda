"""Which gradient curvature belongs to: when a pass adds to it, and when it starts afresh."""

import copy
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

import hesscale

from .tensors import assert_close, bowl, leaf, random


@pytest.mark.parametrize("set_to_none", [True, False])
def test_curvature_starts_afresh_when_gradients_do(set_to_none: bool) -> None:
    w = nn.Parameter(random(2, 3))
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(3)]
    hesscale.backward(bowl(w, 0))
    assert_close(w.curvature, once[0])
    torch.optim.SGD([w]).zero_grad(set_to_none=set_to_none)
    hesscale.backward(bowl(w, 1))
    assert_close(w.curvature, once[1])
    hesscale.backward(bowl(w, 2))
    assert_close(w.curvature, once[1] + once[2])


def test_curvature_belongs_to_one_gradient() -> None:
    """A plain backward after zero_grad makes a gradient that the curvature of the step before has no part in."""
    w = nn.Parameter(random(2, 3))
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(3)]
    for _ in range(3):
        w.grad = None
        bowl(w, 1).backward()
        hesscale.backward(bowl(w, 2))
        assert_close(w.curvature, once[2])


def test_a_plain_backward_in_between_leaves_curvature_to_be_added_to() -> None:
    w = nn.Parameter(random(2, 3))
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(3)]
    hesscale.backward(bowl(w, 0))
    bowl(w, 1).backward()
    hesscale.backward(bowl(w, 2))
    assert_close(w.curvature, once[0] + once[2])


def test_a_gradient_that_is_exactly_zero_is_still_added_to() -> None:
    w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    for passes in (1, 2, 3):
        hesscale.backward(w.square().sum())
        assert not w.grad.any()
        assert_close(w.curvature, torch.full_like(w, 2.0 * passes))


def test_a_parameter_that_is_not_reached_after_zero_grad_starts_afresh_when_it_is() -> None:
    """Till then curvature of an earlier pass stays beside no gradient; an optimizer's pass clears it at once."""
    u, v = leaf(2, 3), leaf(2, 3, seed=1)
    hesscale.backward(bowl(u) + bowl(v))
    once = v.curvature.clone()
    u.grad = v.grad = None
    hesscale.backward(bowl(u))
    hesscale.backward(bowl(u) + bowl(v))
    assert_close(v.curvature, once)
    u.grad = v.grad = None
    hesscale.AdaHesScale([u, v]).backward(bowl(u))
    assert u.curvature is not None and v.curvature is None


def test_a_gradient_may_be_replaced_before_the_step() -> None:
    w = leaf(2, 3)
    hesscale.backward(bowl(w))
    w.grad = w.grad / 2
    assert w.curvature is not None


def test_create_graph_accumulates() -> None:
    w = leaf(2, 3)
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(2)]
    for seed in range(2):
        with warnings.catch_warnings(action="ignore"):  # torch's, of a reference cycle
            hesscale.attach(bowl(w, seed)).backward(create_graph=True)
    assert_close(w.curvature, once[0] + once[1])
    w.grad = None


def test_two_threads_on_the_same_parameters() -> None:
    w = nn.Parameter(random(2, 3))
    once = sum(hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(2))
    for _ in range(50):
        w.grad = None
        threads = [threading.Thread(target=lambda seed=seed: hesscale.backward(bowl(w, seed))) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_close(w.curvature, once)


def test_a_parameter_that_was_out_of_use_starts_afresh_alone() -> None:
    u, v = leaf(2, 3), leaf(2, 3, seed=1)
    hesscale.backward(bowl(u) + bowl(v))
    once = u.curvature.clone()
    v.grad = None
    hesscale.backward(bowl(u) + bowl(v))
    assert_close(u.curvature, 2 * once)
    assert_close(v.curvature, once)


def test_plain_backward_leaves_curvature_alone() -> None:
    w = leaf(2, 3)
    bowl(w).backward()
    assert not hasattr(w, "curvature")
    hesscale.backward(bowl(w))
    once = w.curvature.clone()
    bowl(w).backward()
    assert torch.equal(w.curvature, once)


def test_a_copied_model_starts_afresh() -> None:
    """Torch's copies of parameters leave the gradient behind."""
    model = nn.Linear(3, 2).double()
    x = random(5, 3)
    hesscale.backward(model(x).square().mean())
    once = model.weight.curvature.clone()
    other = copy.deepcopy(model)
    hesscale.backward(other(x).square().mean())
    assert_close(other.weight.curvature, once)
    assert_close(model.weight.curvature, once)


def test_no_curvature_is_kept_for_a_gradient_that_is_gone() -> None:
    w = leaf(2, 3)
    hesscale.backward(bowl(w))
    watched = weakref.ref(w.curvature)
    w.grad = None
    del w.curvature
    assert watched() is None


def test_a_gradient_that_somebody_keeps_says_nothing_of_the_next_one() -> None:
    w = leaf(2, 3)
    once = [hesscale.diagonal(bowl(w, seed), w)[0] for seed in range(2)]
    kept = None
    for _ in range(3):
        w.grad = None
        hesscale.backward(bowl(w, 0))
        kept = w.grad  # that of the step before goes in the middle of this one
        hesscale.backward(bowl(w, 1))
        assert_close(w.curvature, once[0] + once[1])
    assert kept is w.grad


def test_a_pass_that_writes_nothing_clears_nothing() -> None:
    w = leaf(2, 3)
    hesscale.backward(bowl(w))
    before, w.grad = w.curvature, None
    hesscale.diagonal(bowl(w), w)
    handle = w.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hesscale.backward(bowl(w))
    handle.remove()
    assert w.curvature is before and w.grad is None


@pytest.mark.parametrize("attached", [False, True])
def test_inference_mode_is_refused_before_anything_changes(attached: bool) -> None:
    w = leaf(2, 3)
    loss = hesscale.attach(bowl(w)) if attached else bowl(w)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside of it"):
        loss.backward() if attached else hesscale.backward(loss)
    assert w.grad is None and not hasattr(w, "curvature")
