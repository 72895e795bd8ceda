"""``hesscale.attach``, for trainers that call backward themselves; and that a failing pass leaves nothing behind."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hesscale
from hesscale.plan import METHODS, Method
from hesscale.rules.table import RULES, RuleTable

TOLERANCE = 1e-10
BATCHES = 4


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for seed, parameter in enumerate(model.parameters()):
        with torch.no_grad():
            parameter.copy_(random(*parameter.shape, seed=seed))
    return model


def loss_of(model: nn.Module, batch: int = 0) -> Tensor:
    return F.cross_entropy(model(random(5, 3, seed=10 + batch)), torch.tensor([0, 1, 1, 0, 1]))


def curvatures(model: nn.Module) -> list[Tensor]:
    return [parameter.curvature for parameter in model.parameters()]


def expected(model: nn.Module, factors: dict[int, float]) -> list[Tensor]:
    """Σ factor · curvature of the batch's loss, for each parameter."""
    parameters = list(model.parameters())
    found = [
        [factor * s for s in hesscale.diagonal(loss_of(model, batch), parameters)] for batch, factor in factors.items()
    ]
    return [sum(terms) for terms in zip(*found, strict=True)]


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def micro_batches(model: nn.Module) -> None:
    for batch in range(BATCHES):
        (hesscale.attach(loss_of(model, batch)) / BATCHES).backward()


def retained_twice(model: nn.Module) -> None:
    loss = hesscale.attach(loss_of(model))
    loss.backward(retain_graph=True)
    loss.backward()


def attached_twice(model: nn.Module) -> None:
    hesscale.attach(loss_of(model, 0)).backward()
    hesscale.attach(loss_of(model, 1)).backward()


def after_backward(model: nn.Module) -> None:
    hesscale.backward(loss_of(model, 0))
    hesscale.attach(loss_of(model, 1)).backward()


def scaled(model: nn.Module) -> None:
    torch.amp.GradScaler("cpu", init_scale=1024.0).scale(hesscale.attach(loss_of(model))).backward()


TRAINERS: dict[str, tuple[Callable[[nn.Module], None], dict[int, float]]] = {
    "backward": (lambda model: hesscale.attach(loss_of(model)).backward(), {0: 1}),
    "times a number": (lambda model: (3 * hesscale.attach(loss_of(model))).backward(), {0: 3}),
    "shifted and negated": (lambda model: (hesscale.attach(loss_of(model)) - 7).neg().backward(), {0: -1}),
    "a seed": (lambda model: hesscale.attach(loss_of(model)).backward(torch.tensor(5.0).double()), {0: 5}),
    "micro-batches": (micro_batches, dict.fromkeys(range(BATCHES), 1 / BATCHES)),
    "attached sum": (lambda model: hesscale.attach(loss_of(model, 0) + loss_of(model, 1)).backward(), {0: 1, 1: 1}),
    "gradient scaler": (scaled, {0: 1024}),
    "retained graph": (retained_twice, {0: 2}),
    "two passes": (attached_twice, {0: 1, 1: 1}),
    "after hesscale.backward": (after_backward, {0: 1, 1: 1}),
}


@pytest.mark.parametrize(("train", "factors"), TRAINERS.values(), ids=TRAINERS)
def test_trainers_that_call_backward_themselves(train: Callable[[nn.Module], None], factors: dict[int, float]) -> None:
    model = network()
    train(model)
    assert_close(curvatures(model), expected(model, factors))


@pytest.mark.parametrize("method", ["hesscale", "hesscale_gn", "bl89"])
def test_attach_knows_all_methods_and_changes_no_gradient(method: str) -> None:
    model, other, plain = network(), network(), network()
    loss = loss_of(model)
    assert hesscale.attach(loss, method=method) is loss
    loss.backward()
    hesscale.backward(loss_of(other), method=method)
    loss_of(plain).backward()
    for p, q, r in zip(model.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.curvature, q.curvature)
        assert torch.equal(p.grad, r.grad)


def test_one_loss_attached_twice_is_refused() -> None:
    model = network()
    loss = hesscale.attach(hesscale.attach(loss_of(model)))
    with pytest.raises(RuntimeError, match="two attached losses"):
        loss.backward()
    assert not any(hasattr(p, "curvature") or p.grad is not None for p in model.parameters())


def test_never_run() -> None:
    model = network()
    hesscale.attach(loss_of(model))
    loss_of(model).backward()
    assert not any(hasattr(p, "curvature") for p in model.parameters())


def test_functional_gradients_touch_nothing() -> None:
    model = network()
    loss = hesscale.attach(loss_of(model))
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert not any(hasattr(p, "curvature") or p.grad is not None for p in model.parameters())
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))
    assert_close(curvatures(model), expected(model, {0: 1}))


def test_backward_to_some_inputs_writes_only_theirs() -> None:
    model = network()
    wanted = model[0].weight
    hesscale.attach(loss_of(model)).backward(inputs=[wanted])
    assert_close(wanted.curvature, expected(model, {0: 1})[0])
    assert not any(hasattr(p, "curvature") or p.grad is not None for p in model.parameters() if p is not wanted)


@pytest.mark.parametrize("shared", [True, False], ids=["shared model", "two models"])
def test_two_attached_losses_in_one_pass_are_refused(shared: bool) -> None:
    first = network()
    second = first if shared else network()
    parameters = [*first.parameters(), *second.parameters()]
    total = hesscale.attach(loss_of(first, 0)) + hesscale.attach(loss_of(second, 1))
    with pytest.raises(RuntimeError, match="add the losses first, then attach their sum"):
        total.backward(retain_graph=True)
    assert not any(hasattr(p, "curvature") or p.grad is not None for p in parameters)
    total.backward()  # neither of the two is armed any more: half a curvature would be worse than none
    assert not any(hasattr(p, "curvature") or p.grad is None for p in parameters)


class FailingRule(torch.autograd.Function):
    """The identity, with a curvature rule that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class FailingGradient(FailingRule):
    """The identity, with a backward that raises as often as there are messages."""

    messages: ClassVar[list[str]] = []

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if FailingGradient.messages:
            raise ArithmeticError(FailingGradient.messages.pop())
        return grad


def failing_rule(node: Any, s: Tensor | None, g: Tensor | None) -> Tensor:
    raise ArithmeticError("this rule fails")


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> str:
    """HesScale over a table of one's own: the library's rules and two more."""
    table = RuleTable(base=RULES)
    table.register(hesscale.Coupled(failing_rule), "FailingRuleBackward")
    table.register(hesscale.Coupled(lambda node, s, g: s), "FailingGradientBackward")
    monkeypatch.setitem(METHODS, "with failures", Method(table))
    monkeypatch.setattr(FailingGradient, "messages", ["this gradient fails"])
    return "with failures"


def failing_loss(model: nn.Sequential, function: type[FailingRule]) -> Tensor:
    """The last layer's gradients are there already when the pass comes to the failing operation."""
    hidden = function.apply(torch.tanh(model[0](random(5, 3, seed=10))))
    return F.cross_entropy(model[2](hidden), torch.tensor([0, 1, 1, 0, 1]))


def by_backward(loss: Tensor, method: str) -> None:
    hesscale.backward(loss, method=method, retain_graph=True)


def by_attach(loss: Tensor, method: str) -> None:
    hesscale.attach(loss, method=method).backward(retain_graph=True)


@pytest.mark.parametrize("fresh", [True, False], ids=["grad is None", "grad holds values"])
@pytest.mark.parametrize(
    ("run", "function"), [(by_backward, FailingRule), (by_backward, FailingGradient), (by_attach, FailingRule)]
)
def test_a_pass_that_fails_half_way_changes_nothing(
    run: Callable[[Tensor, str], None], function: type[FailingRule], fresh: bool, method: str
) -> None:
    model = network()
    if not fresh:
        hesscale.backward(loss_of(model, 1))
    before = [None if fresh else (p.grad, p.grad.clone(), p.curvature, p.curvature.clone()) for p in model.parameters()]
    loss = failing_loss(model, function)
    with pytest.raises(ArithmeticError, match="fails"):
        run(loss, method)
    for p, held in zip(model.parameters(), before, strict=True):
        if held is None:
            assert p.grad is None and not hasattr(p, "curvature")
        else:
            grad, grad_value, curvature, curvature_value = held
            assert p.grad is grad and torch.equal(grad, grad_value)
            assert p.curvature is curvature and torch.equal(curvature, curvature_value)
    # no hook is left: a plain backward over the same graph is plain again
    loss.backward()
    for p, held in zip(model.parameters(), before, strict=True):
        assert p.grad is not None
        assert not hasattr(p, "curvature") if held is None else torch.equal(p.curvature, held[3])


def test_torch_failing_under_an_attached_loss_leaves_it_armed(method: str) -> None:
    model = network()
    loss = hesscale.attach(failing_loss(model, FailingGradient), method=method)
    with pytest.raises(ArithmeticError, match="fails"):
        loss.backward(retain_graph=True)
    # nobody tells us that torch gave up, so that .grad is as torch left it; curvature is written at the end only
    assert not any(hasattr(p, "curvature") for p in model.parameters())
    model.zero_grad()
    loss_of(model, 1).backward()  # meets leaves of the abandoned pass
    assert not any(hasattr(p, "curvature") for p in model.parameters())
    model.zero_grad()
    loss.backward()
    assert_close(curvatures(model), expected(model, {0: 1}))


def chain() -> tuple[list[Tensor], Tensor]:
    weights = [torch.randn(20, 20, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x = torch.randn(5, 20, dtype=torch.float64)
    return weights, (x @ weights[0] @ weights[1] @ weights[2]).square().mean()


def assert_as_usual(weights: list[Tensor]) -> None:
    """The curvature of a chain from seed 0 is what an ordinary pass over the same chain gives."""
    torch.manual_seed(0)
    plain, loss = chain()
    hesscale.backward(loss)
    for ours, theirs in zip(weights, plain, strict=True):
        assert torch.equal(ours.curvature, theirs.curvature)


def test_nodes_that_torch_leaves_alone_are_not_read() -> None:
    weights, loss = chain()
    hesscale.attach(loss)
    with torch.no_grad():
        weights[1].add_(1)  # what the other two gradients would need is gone
    loss.backward(inputs=[weights[2]])
    assert weights[2].curvature.shape == (20, 20) and not hasattr(weights[0], "curvature")


def test_gradients_of_an_attached_loss_alone_write_nothing() -> None:
    weights, loss = chain()
    hesscale.attach(loss)
    torch.autograd.grad(loss, weights, retain_graph=True)
    torch.autograd.grad(loss, weights, torch.ones(4, dtype=torch.float64), is_grads_batched=True)
    assert not any(hasattr(weight, "curvature") for weight in weights)


def test_memory_may_be_freed_between_attaching_and_backward() -> None:
    """As sharded training does with weights between forward and backward; a hook brings them back."""
    torch.manual_seed(0)
    weights, loss = chain()
    hesscale.attach(loss)
    storage, content = weights[1].untyped_storage(), weights[1].detach().clone()
    storage.resize_(0)

    def bring_back(grad: Tensor) -> None:
        if not storage.nbytes():
            storage.resize_(content.untyped_storage().nbytes())
            weights[1].data.copy_(content)

    loss.grad_fn.next_functions[0][0].register_prehook(lambda grads: bring_back(grads[0]))  # type: ignore[union-attr]
    loss.backward()
    assert_as_usual(weights)


def test_a_pack_hook_may_return_a_tensor() -> None:
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[len(kept)] = tensor
        return torch.tensor(len(kept) - 1)

    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: kept[int(number)]):
        weights, loss = chain()
    hesscale.backward(loss)
    assert_as_usual(weights)


def test_curvature_starts_afresh_where_a_hook_clears_gradients() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(3))).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    hesscale.backward(model(x).square().mean())
    once = model[0].weight.curvature.clone()
    model[2].weight.register_post_accumulate_grad_hook(lambda p: model.zero_grad())
    hesscale.backward(model(x).square().mean())
    torch.testing.assert_close(model[0].weight.curvature, once, rtol=1e-12, atol=0)
