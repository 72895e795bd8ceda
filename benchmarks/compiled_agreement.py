"""Whether passes through compiled regions give the numbers of eager ones: rules, networks with columns, and models.

Writes one line of JSON for each case and precision as soon as it is known, goes on where it was interrupted, and ends
with the table of docs/compile.md. Models are compiled as they are, the others with their loss. Cases of rules are
compiled several at a time, as one sum of their losses; a group that fails, and a case that does not agree in it, is
compiled again alone. Rules and models take an hour each.

$ python -m benchmarks.compiled_agreement rules --out runs/agreement.jsonl
$ python -m benchmarks.compiled_agreement ranks --out runs/agreement.jsonl
$ python -m benchmarks.compiled_agreement models --out runs/agreement.jsonl    # needs transformers
$ python -m benchmarks.compiled_agreement report --out runs/agreement.jsonl

A deviation is the largest difference of two tensors, relative to the largest magnitude in the eager one, or, where
double precision says that it is zero (a key's bias), in all gradients or all curvatures; the worst of a case counts.
In single precision both are also compared with the eager pass in double precision.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import hesscale
from hesscale.columns.dial import Rank
from hesscale.compiled.torch_compiler import without_mkldnn
from tests.compiled.networks import loss_of_case
from tests.compiled.test_rules import ONE_PER_RULE
from tests.rules.case import Case
from tests.rules.cases import CASES

LIMITS: Mapping[str, float] = {"float32": 1e-5, "float64": 1e-12}
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}

MODELS = ("gpt2", "llama", "llama4", "mamba", "bert", "deberta", "t5", "bart", "vit", "swin", "resnet", "convnext")
MODELS += ("wav2vec2",)
NETWORKS: Mapping[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "MLP": lambda: (nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10)), (8, 6)),
    "CNN": lambda: (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)),
        (4, 1, 8, 8),
    ),
    "encoder": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), nn.Flatten(), nn.Linear(64, 10)),
        (3, 4, 16),
    ),
}
RANKS: Sequence[Rank] = (1, 3, "full")
LAYERS = ("n_layer", "num_hidden_layers", "num_layers")
KINDS = ("grad", "curvature")
ZERO, TINY = 1e-12, 1e-300  # relative to the largest tensor; below every number of float32


@dataclass(frozen=True)
class Row:
    """What came out of one case in one precision."""

    kind: str
    name: str
    precision: str
    deviation: float | None = None  # of the compiled pass from the eager one
    compiled_error: float | None = None  # of each from double precision
    eager_error: float | None = None
    seconds: float | None = None  # to trace and compile, of all that were compiled together
    problem: str = ""
    together: int = 1  # cases in one graph


@dataclass(frozen=True)
class Problem:
    """A loss, a model, and a batch, in double precision."""

    name: str
    loss_fn: Callable[..., Tensor]
    model: nn.Module
    batch: Mapping[str, Any]
    rank: Rank = 0
    whole: bool = True  # the loss is compiled, not the model

    def compiled(self, backend: str) -> Callable[..., Tensor]:
        """The loss as users compile it; Inductor draws the random numbers of the eager pass."""
        torch._dynamo.reset()
        options = {"backend": backend} | ({"fallback_random": True} if backend == "inductor" else {})
        if self.whole:
            run: Callable[..., Tensor] = torch.compile(self.loss_fn, backend="hesscale", options=options)
            return run
        self.model.compile(backend="hesscale", options=options)
        return self.loss_fn

    def in_single(self) -> Problem:
        """The same with half the digits."""
        batch = {name: _single(value) for name, value in self.batch.items()}
        return replace(self, model=copy.deepcopy(self.model).float(), batch=batch)

    def fresh(self) -> Problem:
        """A copy, to which nothing has happened."""
        batch = {name: _copied(value) for name, value in self.batch.items()}
        return replace(self, model=copy.deepcopy(self.model), batch=batch)

    def results(self) -> dict[str, Tensor | None]:
        """Gradients and curvature of all leaves, by their names."""
        leaves = {**dict(self.model.named_parameters()), **self.batch}
        return {f"{name}.{kind}": getattr(leaf, kind, None) for name, leaf in leaves.items() for kind in KINDS}


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)


def _single(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in SINGLE:
        return value
    return value.detach().to(SINGLE[value.dtype]).requires_grad_(value.requires_grad)


class InDouble(TorchFunctionMode):
    """Whoever asks for single precision, as norms and losses of Hugging Face do, gets double precision."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {}))
        return (Tensor.double if function is Tensor.float else function)(*args, **kwargs)


def of_rule(case: Case) -> Problem:
    """A rule's case, as it is in the tests."""
    tensors = {str(i): value for i, value in enumerate(case.inputs) if isinstance(value, Tensor)}
    own = loss_of_case(case)

    def loss_fn(model: nn.Module, **given: Tensor) -> Tensor:
        return own(model, *given.values())

    return Problem(case.label, loss_fn, nn.Module(), tensors)


def of_model(name: str) -> Problem:
    """A model of tests/test_transformers.py with one layer and without dropout; casts to float32 are taken out."""
    from tests.test_transformers import MODELS as CONFIGURATIONS
    from tests.test_transformers import batch_of, transformers

    task, config, options = CONFIGURATIONS[name]
    options = {key: 1 if key in LAYERS else value for key, value in options.items()}
    torch.manual_seed(0)
    model = getattr(transformers, f"AutoModelFor{task}").from_config(getattr(transformers, config)(**options))
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch_of(task).items()}

    def loss_fn(model: nn.Module, **batch: Tensor) -> Tensor:
        is_double = next(model.parameters()).dtype is torch.float64
        with InDouble() if is_double else nullcontext():
            loss: Tensor = model(**batch).loss
            return loss

    return Problem(name, loss_fn, model.double().eval(), batch, whole=False)


def of_rank(network: str, rank: Rank) -> Problem:
    """A small network with so many columns beside the diagonal."""
    torch.manual_seed(0)
    model, shape = NETWORKS[network]()
    batch = {"x": torch.randn(shape, dtype=torch.float64), "y": torch.randint(10, shape[:1])}

    def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    return Problem(f"{network}, rank={rank}", loss_fn, model.double(), batch, rank)


def joined(problems: Sequence[Problem]) -> Problem:
    """One problem whose loss is the sum of theirs; the names in its batch begin with the number of theirs."""

    def loss_fn(model: nn.Module, **given: Tensor) -> Tensor:
        losses = [problem.loss_fn(model, **_part(given, number)) for number, problem in enumerate(problems)]
        return torch.stack([loss.double() for loss in losses]).sum()

    batch = {f"{i}/{name}": value for i, problem in enumerate(problems) for name, value in problem.batch.items()}
    return Problem(" + ".join(problem.name for problem in problems), loss_fn, nn.Module(), batch)


def _part(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    start = f"{number}/"
    return {name.removeprefix(start): value for name, value in given.items() if name.startswith(start)}


def compared(kind: str, problem: Problem, backend: str) -> Iterator[Row]:
    """The rows of a problem, one for each precision."""
    for precision, given in (("float64", problem), ("float32", problem.in_single())):
        try:
            exact = _eager(problem.fresh())
            eager, found, seconds = _both(given, backend)
            yield _row(kind, problem.name, precision, found, eager, exact, seconds)
        except Exception as error:  # the table says so, and the others are still to come
            message = str(error.__cause__ or error).split("\n")[0][:300]
            yield Row(kind, problem.name, precision, problem=f"{type(error).__name__}: {message}")


def compared_together(kind: str, problems: Sequence[Problem], backend: str) -> list[Row]:
    """The rows of all: from one graph those that agree in it, the others each from its own."""
    whole, count = joined(problems), len(problems)
    rows: list[list[Row]] = [[] for _ in problems]
    with suppress(Exception):  # each alone will tell whose it is
        exact = _eager(whole.fresh())
        for precision, given in (("float64", whole), ("float32", whole.in_single())):
            eager, found, seconds = _both(given, backend)
            for i, problem in enumerate(problems):
                parts = (_part(tensors, i) for tensors in (found, eager, exact))
                rows[i].append(_row(kind, problem.name, precision, *parts, seconds, together=count))
    alone = [len(own) < len(LIMITS) or not all(map(agrees, own)) for own in rows]
    return [
        row
        for problem, own, again in zip(problems, rows, alone, strict=True)
        for row in (compared(kind, problem, backend) if again else own)
    ]


Results = Mapping[str, Tensor | None]


def _both(problem: Problem, backend: str) -> tuple[Results, Results, float]:
    """What the eager pass gives, what the compiled one does, and the seconds it took to compile."""
    eager, ours = _eager(problem.fresh()), problem.fresh()
    begin = time.monotonic()
    with nullcontext() if backend == "inductor" else without_mkldnn():
        return eager, _results(ours, ours.compiled(backend)), time.monotonic() - begin


def _row(
    kind: str,
    name: str,
    precision: str,
    found: Results,
    eager: Results,
    exact: Results,
    seconds: float,
    together: int = 1,
) -> Row:
    gaps = (deviation(a, b, exact) for a, b in ((found, eager), (found, exact), (eager, exact)))
    return Row(kind, name, precision, *gaps, seconds=round(seconds, 1), together=together)


def _eager(problem: Problem) -> Results:
    with without_mkldnn():  # whose kernels round otherwise
        return _results(problem, problem.loss_fn)


def _results(problem: Problem, loss_fn: Callable[..., Tensor]) -> Results:
    torch.manual_seed(1)
    hesscale.backward(loss_fn(problem.model, **problem.batch), rank=problem.rank)
    return problem.results()


def deviation(ours: Results, theirs: Results, exact: Results) -> float:
    """The worst of all tensors. One that is zero but for rounding is measured by the largest of its kind."""
    largest = {kind: max(_size(t) for name, t in exact.items() if name.endswith(kind)) for kind in KINDS}
    worst = 0.0
    for name, t in exact.items():
        whole = largest[name.rpartition(".")[2]]
        scale = whole if _size(t) <= ZERO * whole else _size(theirs[name])
        worst = max(worst, _gap(ours[name], theirs[name]) / max(scale, TINY))
    return worst


def _size(t: Tensor | None) -> float:
    finite = torch.zeros(1) if t is None else t[t.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _gap(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    return float((a - b).abs().where(~same, 0.0).max()) if b.numel() else 0.0


def run(kind: str, problems: Mapping[str, Callable[[], Problem]], out: Path, *, together: int, backend: str) -> None:
    """Compares what the file does not have yet."""
    done = {row.name for row in rows_of(out) if row.kind == kind}
    left = [make for name, make in problems.items() if name not in done]
    print(f"{len(problems) - len(left)} of {len(problems)} are there", flush=True)
    for start in range(0, len(left), together):
        made = [make() for make in left[start : start + together]]
        found = compared_together(kind, made, backend) if len(made) > 1 else [*compared(kind, made[0], backend)]
        with out.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
        for row in found:
            print(f"{row.name}, {row.precision}: {row.problem or f'{row.deviation:.1e}'}", flush=True)


def rows_of(out: Path) -> list[Row]:
    """What a file has."""
    return [Row(**json.loads(line)) for line in out.read_text().splitlines()] if out.exists() else []


def report(rows: Sequence[Row]) -> None:
    """For each kind and precision how many agree, and all that do not."""
    print("| | precision | cases | agree | median | worst of these | seconds to compile, median and most |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for kind, precision in sorted({(row.kind, row.precision) for row in rows}):
        own = [row for row in rows if (row.kind, row.precision) == (kind, precision)]
        agreeing = sorted(row.deviation or 0.0 for row in own if agrees(row))
        seconds = sorted(row.seconds for row in own if row.seconds is not None and row.together == 1)
        middle, worst = (agreeing[len(agreeing) // 2], agreeing[-1]) if agreeing else (0.0, 0.0)
        times = f"{seconds[len(seconds) // 2]:.0f}, {seconds[-1]:.0f}" if seconds else ""
        print(f"| {kind} | {precision} | {len(own)} | {len(agreeing)} | {middle:.1e} | {worst:.1e} | {times} |")
    for row in rows:
        if not agrees(row):
            print(row)


def agrees(row: Row) -> bool:
    """Whether it is within the limit of its precision."""
    return row.deviation is not None and row.deviation <= LIMITS[row.precision]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("rules", "ranks", "models", "report"))
    parser.add_argument("--out", type=Path, default=Path("agreement.jsonl"))
    parser.add_argument("--backend", default="inductor", help="eager: the traced graph, bit for bit")
    parser.add_argument("--together", type=int, default=8, help="cases of rules in one graph")
    parser.add_argument("--only", nargs="*", help="names of cases or models")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    problems: dict[str, Callable[[], Problem]] = {}
    if chosen.what == "rules":
        problems = {case.label: partial(of_rule, case) for case in (*ONE_PER_RULE, *CASES)}
    elif chosen.what == "ranks":
        pairs = [(name, rank) for name in NETWORKS for rank in RANKS]
        problems = {f"{name}, rank={rank}": partial(of_rank, name, rank) for name, rank in pairs}
    elif chosen.what == "models":
        problems = {name: partial(of_model, name) for name in MODELS}
    if chosen.only:
        problems = {name: problems[name] for name in chosen.only}
    kind = chosen.what if chosen.backend == "inductor" else f"{chosen.what}, {chosen.backend}"
    together = chosen.together if chosen.what == "rules" else 1
    run(kind, problems, chosen.out, together=together, backend=chosen.backend)
    report(rows_of(chosen.out))


if __name__ == "__main__":
    main()
