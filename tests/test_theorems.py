"""What is known of HesScale on paper: where it is exact, where its variants agree, and what it leaves out elsewhere."""

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hesscale
from hesscale.testing import check_rule, exact_diagonal

METHODS = ["hesscale", "hesscale_gn", "bl89"]
# the same examples in every run: a failure can be seen again, and nothing is written to disk
PROPERTY = settings(max_examples=200, deadline=None, derandomize=True)
Function = Callable[[Tensor], Tensor]
Layers = Sequence[tuple[Tensor, Tensor | None]]

ACTIVATIONS: dict[str, Function] = {
    "identity": lambda a: a,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "elu": F.elu,
    "square": lambda a: a * a,
    "silu by hand": lambda a: a * torch.sigmoid(a),
    "square times tanh": lambda a: a * a * torch.tanh(a),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "a chain": lambda a: ((torch.sigmoid(0.3 * a).exp() + a.square()).log().sqrt() / 3).cos(),
}
CLASSIFICATION: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda a, y: F.cross_entropy(a, y, reduction="sum"),
    "class weights": lambda a, y: F.cross_entropy(a, y, weight=torch.arange(1, a.shape[1] + 1).to(a)),
    "label smoothing": lambda a, y: F.cross_entropy(a, y, label_smoothing=0.2),
    "ignored class": lambda a, y: F.cross_entropy(a, y, ignore_index=int(y[0])),
    "soft targets": lambda a, y: F.cross_entropy(a, torch.softmax(F.one_hot(y, a.shape[1]).to(a), 1)),
    "two steps": lambda a, y: F.nll_loss(F.log_softmax(a, 1), y),
    "more dimensions": lambda a, y: F.cross_entropy(a.reshape(1, *a.shape).mT, y.reshape(1, -1)),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return random(*shape, seed=seed).requires_grad_()


def randomized(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    for seed, parameter in enumerate(model.to(dtype).parameters()):
        nn.init.normal_(parameter, std=0.7, generator=torch.Generator().manual_seed(seed))
    return model


def assert_close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def diagonal(loss: Tensor, inputs: Any, method: str = "hesscale") -> tuple[Tensor | None, ...]:
    return hesscale.diagonal(loss, inputs, method=method, retain_graph=True)


def hessian(function: Callable[..., Tensor], argnums: Any = 0) -> Callable[..., Any]:
    """torch.func.hessian without its forward mode, which warns that torch.jit.script is deprecated."""
    return torch.func.jacrev(torch.func.jacrev(function, argnums), argnums)


def forward(layers: Layers, f: Function, x: Tensor) -> Tensor:
    """A network of linear layers with f between them."""
    for i, (weight, bias) in enumerate(layers):
        x = F.linear(f(x) if i else x, weight, bias)
    return x


@pytest.mark.parametrize("loss", [*CLASSIFICATION.values(), F.mse_loss], ids=[*CLASSIFICATION, "mse"])
def test_last_layer_is_exact(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = randomized(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), random(6, 3, seed=1)
    y = random(6, 3, seed=2) if loss is F.mse_loss else torch.arange(6) % 3
    last = {"2.weight": model[2].weight, "2.bias": model[2].bias}
    found = diagonal(loss(model(x), y), tuple(last.values()))
    blocks = hessian(lambda values: loss(torch.func.functional_call(model, values, x), y))(last)
    for name, curvature in zip(last, found, strict=True):
        block = blocks[name][name].detach()
        assert_close(curvature, block.reshape(curvature.numel(), -1).diagonal().reshape(curvature.shape))


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy_with_logits, lambda a, y: (a - y).pow(4).sum()])
def test_networks_one_unit_wide_are_exact(activation: Function, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = random(5, 3, seed=1), torch.tensor([[0.0], [1.0], [1.0], [0.0], [1.0]], dtype=torch.float64)
    layers = [(leaf(1, n, seed=seed), leaf(1, seed=-seed)) for seed, n in enumerate((3, 1, 1), start=1)]
    value, parameters = loss(forward(layers, activation, x), y), [p for layer in layers for p in layer]
    assert_close(diagonal(value, parameters), exact_diagonal(value, parameters))


EXPRESSIONS: dict[str, Callable[..., Tensor]] = {
    "(a + b) * sigmoid(a + b)": lambda a, b: (a + b) * torch.sigmoid(a + b),
    "c * sigmoid(c), c = a + b": lambda a, b: (lambda c: c * torch.sigmoid(c))(a + b),
    "x * sigmoid(w * x) + w": lambda x, w: x * (w * x).sigmoid() + w,
    "x * w * tanh(x) + w": lambda x, w: x * w * torch.tanh(x) + w,
    "x / (1 + w * w) - w": lambda x, w: x / (1 + w * w) - w,
}


@pytest.mark.parametrize("function", [*ACTIVATIONS.values(), *EXPRESSIONS.values()], ids=[*ACTIVATIONS, *EXPRESSIONS])
def test_elementwise_expressions_are_exact_wherever_they_stand(function: Callable[..., Tensor]) -> None:
    count = 2 if function in EXPRESSIONS.values() else 1
    inputs = [leaf(4, seed=seed) for seed in range(count)]
    check_rule(function, *inputs)
    check_rule(lambda *xs: torch.tanh(0.5 * function(*map(torch.sin, xs))), *inputs)
    # rows of a weight never meet, so that the layer below is exact as well
    x, weights = random(5, 3, seed=8), [leaf(2, 3, seed=seed) for seed in range(count)]
    check_rule(lambda *ws: torch.tanh(function(*(F.linear(x, w) for w in ws))), *weights)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "tanh": lambda a, _: torch.tanh(a),
    "sigmoid": lambda a, _: torch.sigmoid(a),
    "sin": lambda a, _: torch.sin(a),
    "affine": lambda a, _: 0.7 * a + 0.3,
}
INSTRUCTION = st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9))


@PROPERTY
@given(program=st.lists(INSTRUCTION, min_size=1, max_size=9), inputs=st.integers(1, 2), seed=st.integers(0, 99))
def test_any_elementwise_expression_is_exact(program: list[tuple[str, int, int]], inputs: int, seed: int) -> None:
    """Each step applies an operation to any two values computed so far; the last one is the result."""

    def run(*variables: Tensor) -> Tensor:
        values = list(variables)
        for name, first, second in program:
            values.append(OPERATIONS[name](values[first % len(values)], values[second % len(values)]))
        return values[-1]

    leaves = [leaf(3, seed=seed + i).detach().clamp(-1, 1).requires_grad_() for i in range(inputs)]
    # repeated products of sums grow without bound, and rounding with them
    assume(float(run(*leaves).detach().abs().max()) < 100)
    check_rule(run, *leaves, seed=seed)


def test_softmax_distribution_of_appendix_a() -> None:
    logits, y = leaf(5, 4), torch.tensor([0, 3, 1, 1, 2])
    loss = F.cross_entropy(logits, y, reduction="sum")
    q = torch.softmax(logits.detach(), 1)
    assert_close(diagonal(loss, logits), (q - q * q,))
    exact = hessian(lambda a: F.cross_entropy(a, y, reduction="sum"))(logits.detach())
    assert_close(q - q * q, exact.reshape(20, 20).diagonal().reshape(5, 4))


LIKELIHOODS: dict[str, Callable[..., Tensor]] = {
    "distribution": lambda mean, variance, x: torch.distributions.Normal(mean, variance.sqrt()).log_prob(x).sum(),
    "loss": lambda mean, variance, x: -F.gaussian_nll_loss(mean, x, variance, reduction="sum"),
}


@pytest.mark.parametrize("likelihood", LIKELIHOODS.values(), ids=LIKELIHOODS)
def test_normal_distribution_of_appendix_a(likelihood: Callable[..., Tensor]) -> None:
    x, mean, variance = random(6), leaf(6, seed=1), leaf(6, seed=2).detach().exp().requires_grad_()
    found = diagonal(likelihood(mean, variance, x), [mean, variance])
    v, squared = variance.detach(), (x - mean.detach()).square()
    assert_close(found, (-1 / v, (0.5 - squared / v) / v.square()))
    blocks = hessian(likelihood, argnums=(0, 1))(mean.detach(), v, x)
    assert_close(found, (blocks[0][0].diagonal(), blocks[1][1].diagonal()))


def recursion(layers: Layers, f: Function, x: Tensor, y: Tensor, method: str) -> list[Tensor]:
    """Equations 5 and 6 of Elsayed & Mahmood, layer by layer; integer targets mean cross-entropy, others MSE."""
    first = torch.func.grad(lambda a: f(a).sum())
    second = torch.func.grad(lambda a: first(a).sum())
    inputs, sums = [x], []
    for weight, bias in layers:
        sums.append(inputs[-1] @ weight.T + (0 if bias is None else bias))
        inputs.append(f(sums[-1]))
    if y.is_floating_point():
        g, s = 2 * (sums[-1] - y) / y.numel(), torch.full_like(y, 2 / y.numel())
    else:
        q, p = torch.softmax(sums[-1], 1), F.one_hot(y, sums[-1].shape[1])
        g, s = (q - p) / len(y), (q - q * q) / len(y) * (p if method == "bl89" else 1)
    curvatures: list[Tensor] = []
    for i, (weight, bias) in reversed(list(enumerate(layers))):
        curvatures = [s.T @ inputs[i].square(), *([] if bias is None else [s.sum(0)]), *curvatures]
        if i:
            g, s, a = g @ weight, s @ weight.square(), sums[i - 1]
            residual = 0 if method == "hesscale_gn" else second(a) * g
            g, s = first(a) * g, first(a).square() * s + residual
    return curvatures


@PROPERTY
@given(
    widths=st.lists(st.integers(1, 6), min_size=2, max_size=5),
    batch=st.integers(1, 5),
    bias=st.booleans(),
    name=st.sampled_from(sorted(ACTIVATIONS)),
    classes=st.booleans(),
    seed=st.integers(0, 999),
)
def test_networks_follow_the_recursion(
    widths: list[int], batch: int, bias: bool, name: str, classes: bool, seed: int
) -> None:
    x = random(batch, widths[0], seed=seed)
    y = torch.arange(batch) % widths[-1] if classes else random(batch, widths[-1], seed=seed + 1)
    layers = [
        (leaf(n, m, seed=seed + i), leaf(n, seed=seed - i) if bias else None)
        for i, (m, n) in enumerate(pairwise(widths), start=1)
    ]
    output, parameters = forward(layers, ACTIVATIONS[name], x), [p for pair in layers for p in pair if p is not None]
    loss = F.cross_entropy(output, y) if classes else F.mse_loss(output, y)
    with torch.no_grad():
        expected = {method: recursion(layers, ACTIVATIONS[name], x, y, method) for method in METHODS}
    for method in METHODS:
        assert_close(list(diagonal(loss, parameters, method)), expected[method])


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh(), nn.Identity()], ids=str)
def test_piecewise_linear_networks_have_no_residual(activation: nn.Module) -> None:
    features = [nn.Conv2d(1, 2, 3), activation, nn.MaxPool2d(2), nn.Flatten()]
    layers = [*features, nn.Linear(8, 5), activation, nn.Linear(5, 3)]
    model, x, y = randomized(nn.Sequential(*layers)), random(4, 1, 6, 6, seed=1), torch.tensor([0, 2, 1, 1])
    loss, parameters = F.cross_entropy(model(x), y), list(model.parameters())
    assert_close(diagonal(loss, parameters), diagonal(loss, parameters, "hesscale_gn"))


def test_squared_error_knows_no_difference_to_bl89() -> None:
    model = randomized(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 2)))
    loss, parameters = F.mse_loss(model(random(5, 3)), random(5, 2, seed=1)), list(model.parameters())
    for ours, theirs in zip(diagonal(loss, parameters), diagonal(loss, parameters, "bl89"), strict=True):
        assert torch.equal(ours, theirs)


class Attention(nn.Module):
    """Shared weights, a residual connection, a hand-written activation and an inner softmax in one small model."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (3, 4))  # [N, 3, 4]
        keys = self.project(x)
        mixed = torch.softmax(keys @ x.mT / math.sqrt(4), -1) @ self.project(keys) + x
        return self.head((mixed * torch.sigmoid(mixed)).mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 4), nn.ELU(), nn.Linear(4, 3)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 2, 2), nn.Sigmoid(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 3)
    ),
    "attention": Attention,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_gradients_are_those_of_torch_to_the_last_bit(
    build: Callable[[], nn.Module], method: str, dtype: torch.dtype
) -> None:
    ours, x = randomized(build(), dtype=dtype), random(6, 12, dtype=dtype)
    theirs, y = copy.deepcopy(ours), torch.arange(6) % 3
    for _ in range(2):  # the second pass accumulates
        hesscale.backward(F.cross_entropy(ours(x), y), method=method)
        F.cross_entropy(theirs(x), y).backward()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_curvature_is_linear_in_the_loss(build: Callable[[], nn.Module], method: str) -> None:
    model, x, y = randomized(build()), random(6, 12), torch.arange(6) % 3
    parameters = list(model.parameters())
    batch = diagonal(F.cross_entropy(model(x), y, reduction="sum"), parameters, method)
    doubled = diagonal(2 * F.cross_entropy(model(x), y, reduction="sum"), parameters, method)
    samples = [diagonal(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), parameters, method) for n in range(6)]
    for p, once, twice in zip(range(len(parameters)), batch, doubled, strict=True):
        assert_close(twice, 2 * once)
        assert_close(sum(sample[p] for sample in samples), once)


def test_consumers_are_added_and_their_cross_terms_left_out() -> None:
    x = leaf(1)
    parts = torch.tanh(x).sum(), torch.sin(x).sum()
    assert_close(diagonal(sum(parts), x)[0], sum(exact_diagonal(part, x)[0] for part in parts))
    loss = x.expand(3).sum().square() / 2
    assert diagonal(loss, x)[0] == 3 and exact_diagonal(loss, x)[0] == 9
