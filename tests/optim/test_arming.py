"""Trainers that call backward themselves: attached losses, armed blocks, and curvature of another method."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.optim import CurvatureScaled

from .small import PRESETS, assert_close, assert_same, loss_of, network, parameters, random

PROPAGATING = [hesscale.AdaHesScale, hesscale.AdaHesScaleGN, hesscale.AdaBL89]
SAMPLING = [hesscale.AdaGGNMC, hesscale.AdaHessian]
TORCHS_OWN = torch.autograd.backward


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was() -> Any:
    yield
    assert torch.autograd.backward is TORCHS_OWN


def trained(
    preset: type[CurvatureScaled], run: Callable[[CurvatureScaled, Tensor], None], **options: Any
) -> list[Tensor]:
    model = network()
    optimizer = preset(model.parameters(), lr=0.01, **options)
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        run(optimizer, loss_of(model, step))
        optimizer.step()
    return parameters(model)


def by_backward(optimizer: CurvatureScaled, loss: Tensor) -> None:
    optimizer.backward(loss)


def by_attach(optimizer: CurvatureScaled, loss: Tensor) -> None:
    optimizer.attach(loss).backward()


def armed(optimizer: CurvatureScaled, loss: Tensor) -> None:
    with optimizer.armed():
        loss.backward()


def armed_functional(optimizer: CurvatureScaled, loss: Tensor) -> None:
    with optimizer.armed():
        torch.autograd.backward([loss])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("run", [by_attach, armed, armed_functional])
@pytest.mark.parametrize("preset", PROPAGATING)
def test_all_ways_are_the_same(preset: Any, run: Any, every: int) -> None:
    assert_same(trained(preset, run, every=every), trained(preset, by_backward, every=every))


@pytest.mark.parametrize("run", [armed, armed_functional])
@pytest.mark.parametrize("preset", SAMPLING)
def test_sources_with_a_pass_of_their_own_can_be_armed(preset: Any, run: Any) -> None:
    assert_same(trained(preset, run, every=2), trained(preset, by_backward, every=2))


@pytest.mark.parametrize("preset", SAMPLING)
def test_sources_with_a_pass_of_their_own_cannot_be_attached(preset: Any) -> None:
    model = network()
    optimizer = preset(model.parameters())
    with pytest.raises(RuntimeError, match=r"call optimizer\.backward\(loss\), or .* `with optimizer\.armed\(\):`"):
        optimizer.attach(loss_of(model))
    for call in (
        lambda loss: loss.backward(torch.tensor(2.0, dtype=torch.float64)),
        lambda loss: loss.backward(inputs=[*model.parameters()]),
        lambda loss: loss.backward(create_graph=True),
    ):
        with optimizer.armed(), pytest.raises(RuntimeError, match="without gradient, inputs and create_graph"):
            call(loss_of(model))


def test_a_loss_is_left_alone_when_curvature_is_not_due() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters(), every=2)
    due = []
    for step in range(5):
        for way in (by_attach, armed):
            optimizer.zero_grad()
            way(optimizer, loss_of(model, step))
            due.append(getattr(model[0].weight, "curvature", None) is not None)
        optimizer.step()
    assert due == [True, True, True, True, True, True, False, False, True, True]


@pytest.mark.parametrize("wrong", ["attach", "backward", "both"])
@pytest.mark.parametrize("name", PRESETS)
def test_curvature_of_another_method_is_refused(name: str, wrong: str) -> None:
    model = network()
    optimizer = PRESETS[name](model.named_parameters())
    expected = optimizer.source.name  # type: ignore[union-attr]
    other = "bl89" if expected == "hesscale" else "hesscale"
    if wrong == "both":
        torch.manual_seed(0)
        optimizer.backward(loss_of(model))
    if wrong == "attach":
        hesscale.attach(loss_of(model), method=other).backward()
    else:
        hesscale.backward(loss_of(model), method=other)
    written = f"{expected} and {other}" if wrong == "both" else other
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        f"the curvature of 0.weight was written by '{written}', but this optimizer expects '{expected}': call "
        "optimizer.backward(loss), or optimizer.attach(loss) in place of hesscale.attach(loss)"
    )
    assert_same(parameters(model), parameters(network()))


def test_curvature_written_by_hand_is_taken() -> None:
    model = network()
    optimizer = hesscale.AdaHesScaleGN(model.parameters())
    hesscale.backward(loss_of(model))
    for p in model.parameters():
        p.curvature = p.curvature * 2
    optimizer.step()
    assert not torch.equal(model[0].weight, network()[0].weight)


def test_the_template_without_a_source_takes_any() -> None:
    model = network()
    hesscale.backward(loss_of(model), method="bl89")
    CurvatureScaled(model.parameters()).step()


def test_passes_of_other_models_are_left_alone() -> None:
    model, other = network(), network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    with optimizer.armed():
        other(random(4, 5)).logcumsumexp(0).unfold(0, 2, 1).sum().backward()  # whatever it is made of
        loss = loss_of(model)
        loss.backward(inputs=[model[2].weight])
        x = random(4, 5).requires_grad_()
        loss_of_input = F.cross_entropy(model(x), torch.arange(4) % 3)
        loss_of_input.backward(inputs=[x])
    assert getattr(other[0].weight, "curvature", None) is None
    assert getattr(model[0].weight, "curvature", None) is None
    assert model[2].weight.curvature is not None
    assert x.grad is not None
    assert getattr(x, "curvature", None) is None


def test_two_optimizers_take_turns_as_of_a_generator_and_its_critic() -> None:
    maker, critic = network(), network()
    first = hesscale.AdaHesScale(maker.parameters(), every=2)
    second = hesscale.AdaHesScaleGN(critic.parameters())
    for step in range(4):
        with first.armed(), second.armed():
            second.zero_grad()
            loss_of(critic, step).backward()
            second.step()
            first.zero_grad()
            loss_of(maker, step).backward()
            first.step()
    plain = network()
    optimizer = hesscale.AdaHesScale(plain.parameters(), every=2)
    for step in range(4):
        optimizer.zero_grad()
        optimizer.backward(loss_of(plain, step))
        optimizer.step()
    assert_same(parameters(maker), parameters(plain))


def test_several_losses_at_once() -> None:
    model, other = network(), network()
    optimizer, plain = hesscale.AdaHesScale(model.parameters()), hesscale.AdaHesScale(other.parameters())
    weight = torch.tensor(3.0, dtype=torch.float64)
    with optimizer.armed():
        torch.autograd.backward([loss_of(model, 0), loss_of(model, 1)], [None, weight])
    plain.backward(loss_of(other, 0) + weight * loss_of(other, 1))
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()], 1e-14)
    assert_close([p.curvature for p in model.parameters()], [p.curvature for p in other.parameters()], 1e-14)


def test_our_own_passes_are_not_armed_again() -> None:
    model, other = network(), network()
    optimizer, plain = hesscale.AdaHesScale(model.parameters()), hesscale.AdaHesScale(other.parameters())
    with optimizer.armed():
        optimizer.backward(loss_of(model, 0))
        hesscale.backward(loss_of(model, 1))
        hesscale.diagonal(loss_of(model, 2), model)
    plain.backward(loss_of(other, 0))
    plain.backward(loss_of(other, 1))
    assert_same([p.curvature for p in model.parameters()], [p.curvature for p in other.parameters()])


def test_a_backward_within_a_backward_is_torchs_own() -> None:
    model, other, inner = network(), network(), network()
    optimizer = hesscale.AdaHesScale([*model.parameters(), *inner.parameters()])
    x = random(4, 5).requires_grad_()

    @x.register_hook
    def within(gradient: Tensor) -> None:
        with torch.enable_grad():
            loss_of(inner).backward()

    with optimizer.armed():
        F.cross_entropy(model(x), torch.arange(4) % 3).backward()
    hesscale.backward(F.cross_entropy(other(x.detach()), torch.arange(4) % 3))
    assert_same([p.curvature for p in model.parameters()], [p.curvature for p in other.parameters()])
    assert inner[0].weight.grad is not None
    assert getattr(inner[0].weight, "curvature", None) is None


def test_an_exception_restores_everything() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    with pytest.raises(KeyError), optimizer.armed(), optimizer.armed():
        raise KeyError
    assert torch.autograd.backward is TORCHS_OWN
    loss_of(model).backward()
    assert getattr(model[0].weight, "curvature", None) is None
    with pytest.raises(hesscale.MissingRuleError), optimizer.armed():
        (model(random(4, 5)).logcumsumexp(0) * Unknown.apply(model[0].weight).sum()).sum().backward()
    with optimizer.armed():
        loss_of(model).backward()
    optimizer.step()


class Unknown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.einsum("ij,ij->i", x, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise NotImplementedError


def test_other_threads_are_not_armed() -> None:
    model, other = network(), network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    inside, done = threading.Event(), threading.Event()

    def elsewhere() -> None:
        inside.wait()
        loss_of(model).backward()
        done.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with optimizer.armed():
        inside.set()
        done.wait()
        assert getattr(model[0].weight, "curvature", None) is None
        model.zero_grad()
        loss_of(model).backward()
    thread.join()
    hesscale.backward(loss_of(other))
    assert_same([p.curvature for p in model.parameters()], [p.curvature for p in other.parameters()])


def test_two_threads_may_be_armed_at_once() -> None:
    expected = trained(hesscale.AdaHesScale, by_backward)
    barrier, found = threading.Barrier(2), []

    def train() -> None:
        def run(optimizer: CurvatureScaled, loss: Tensor) -> None:
            with optimizer.armed():
                barrier.wait()
                loss.backward()

        model = network()
        optimizer = hesscale.AdaHesScale(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            run(optimizer, loss_of(model, step))
            optimizer.step()
        found.append(parameters(model))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for ours in found:
        assert_same(ours, expected)


def test_whoever_replaces_backward_after_us_keeps_it() -> None:
    model = network()
    optimizer = hesscale.AdaHesScale(model.parameters())
    calls = []
    try:
        with optimizer.armed():
            ours = torch.autograd.backward

            def theirs(*arguments: Any, **options: Any) -> None:
                calls.append(1)
                ours(*arguments, **options)

            torch.autograd.backward = theirs
            loss_of(model).backward()
        assert torch.autograd.backward is theirs
        assert model[0].weight.curvature is not None
        model.zero_grad()
        loss_of(model).backward()
        assert len(calls) == 2
    finally:
        torch.autograd.backward = TORCHS_OWN


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.policy, self.value = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.policy(x), self.value(x).squeeze(1)


@pytest.mark.parametrize("preset", [hesscale.AdaHesScale, hesscale.AdaHesScaleGN])
def test_a_trainer_for_reinforcement_learning(preset: Any) -> None:
    """A loss of policy, value and entropy, gradients clipped, several epochs over a batch, as A2C and PPO have it."""

    def train(model: ActorCritic, optimizer: CurvatureScaled, backward: Callable[[Tensor], None]) -> list[Tensor]:
        x, actions, rewards = random(16, 5).float(), torch.arange(16) % 3, random(16, seed=1).float()
        with torch.no_grad():
            before = F.log_softmax(model(x)[0], 1).gather(1, actions[:, None]).squeeze(1)
        for _ in range(4):
            logits, values = model(x)
            log_probabilities = F.log_softmax(logits, 1)
            advantage = rewards - values.detach()
            ratio = (log_probabilities.gather(1, actions[:, None]).squeeze(1) - before).exp()
            policy = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
            entropy = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
            optimizer.zero_grad()
            backward(policy + 0.5 * F.mse_loss(values, rewards) - 0.01 * entropy)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return parameters(model)

    found = []
    for is_armed in (True, False):
        torch.manual_seed(0)
        model = ActorCritic()
        optimizer = preset(model.parameters(), every=2)
        if is_armed:
            with optimizer.armed():
                found.append(train(model, optimizer, lambda loss: loss.backward()))
        else:
            found.append(train(model, optimizer, optimizer.backward))
    assert_same(*found)
