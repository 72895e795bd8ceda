"""Whether passes that Inductor compiled give the numbers of eager ones: every rule's cases, and models of Hugging Face.

Writes one line of JSON for each case and precision as soon as it is known, goes on where it was interrupted, and ends
with the table of docs/compile.md. Rules take an hour and more, models half an hour.

$ python -m benchmarks.compiled_agreement rules --out runs/agreement.jsonl
$ python -m benchmarks.compiled_agreement models --out runs/agreement.jsonl    # needs transformers
$ python -m benchmarks.compiled_agreement report --out runs/agreement.jsonl

A deviation is the largest difference of two tensors, relative to the largest magnitude in the eager one; of all
gradients and curvatures of a case the worst counts. In single precision both are also compared with the eager pass in
double precision.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import hesscale
from hesscale.compiled.backend import without_mkldnn
from tests.compiled.networks import loss_of_case
from tests.compiled.test_tracing import ONE_PER_RULE
from tests.rules.case import Case
from tests.rules.cases import CASES

LIMITS: Mapping[str, float] = {"float32": 1e-5, "float64": 1e-12}
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
OPTIONS: Mapping[str, Any] = {"fallback_random": True}  # random numbers of the eager pass, so that they can be compared

MODELS = ("gpt2", "llama", "llama4", "mamba", "bert", "deberta", "t5", "bart", "vit", "swin", "resnet", "convnext")
MODELS += ("wav2vec2",)
LAYERS = ("n_layer", "num_hidden_layers", "num_layers")


@dataclass(frozen=True)
class Row:
    """What came out of one case in one precision."""

    kind: str
    name: str
    precision: str
    deviation: float | None = None  # of the compiled pass from the eager one
    compiled_error: float | None = None  # of each from double precision
    eager_error: float | None = None
    seconds: float | None = None  # to trace and compile
    problem: str = ""


@dataclass(frozen=True)
class Problem:
    """A loss, a model, and a batch, in double precision."""

    name: str
    loss_fn: Callable[..., Tensor]
    model: nn.Module
    batch: Mapping[str, Any]

    def in_single(self) -> Problem:
        """The same with half the digits."""
        batch = {name: _single(value) for name, value in self.batch.items()}
        return Problem(self.name, self.loss_fn, copy.deepcopy(self.model).float(), batch)

    def fresh(self) -> Problem:
        """A copy, to which nothing has happened."""
        batch = {name: _copied(value) for name, value in self.batch.items()}
        return Problem(self.name, self.loss_fn, copy.deepcopy(self.model), batch)

    def results(self) -> list[Tensor | None]:
        """Gradients and curvature of all leaves."""
        leaves = [*self.model.parameters(), *(v for v in self.batch.values() if isinstance(v, Tensor))]
        return [getattr(leaf, name, None) for leaf in leaves for name in ("grad", "curvature")]


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
    """A model of tests/test_transformers.py with one layer and without dropout."""
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

    return Problem(name, loss_fn, model.double().eval(), batch)


def compared(kind: str, problem: Problem) -> Iterator[Row]:
    """The rows of a problem, one for each precision."""
    exact = _eager(problem.fresh())
    for precision, given in (("float64", problem), ("float32", problem.in_single())):
        try:
            yield _row(kind, precision, given, exact)
        except Exception as error:  # the table says so, and the others are still to come
            message = str(error.__cause__ or error).split("\n")[0][:300]
            yield Row(kind, problem.name, precision, problem=f"{type(error).__name__}: {message}")


def _row(kind: str, precision: str, problem: Problem, exact: Sequence[Tensor | None]) -> Row:
    eager, ours = _eager(problem.fresh()), problem.fresh()
    step = hesscale.compile(ours.loss_fn, ours.model, options=OPTIONS)
    torch.manual_seed(1)
    begin = time.monotonic()
    step(**ours.batch)
    seconds = time.monotonic() - begin
    found = ours.results()
    return Row(
        kind,
        problem.name,
        precision,
        deviation(found, eager),
        deviation(found, exact),
        deviation(eager, exact),
        round(seconds, 1),
    )


def _eager(problem: Problem) -> list[Tensor | None]:
    torch.manual_seed(1)
    with without_mkldnn():
        hesscale.backward(problem.loss_fn(problem.model, **problem.batch))
    return problem.results()


def deviation(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """The worst of all tensors."""
    return max(_difference(a, b) for a, b in zip(ours, theirs, strict=True))


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    if not b.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    gap = (a - b).abs().where(~same, 0.0).max()
    return float(gap / b[b.isfinite()].abs().max().clamp_min(torch.finfo(b.dtype).tiny)) if gap else 0.0


def run(kind: str, problems: Mapping[str, Callable[[], Problem]], out: Path) -> None:
    """Compares what the file does not have yet."""
    done = {row.name for row in rows_of(out) if row.kind == kind}
    for number, (name, make) in enumerate(problems.items(), 1):
        if name in done:
            continue
        found = [*compared(kind, make())]
        with out.open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in found)
        said = ", ".join(f"{row.precision} {row.problem or f'{row.deviation:.1e}'}" for row in found)
        print(f"{number}/{len(problems)} {name}: {said}", flush=True)


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
        seconds = sorted(row.seconds for row in own if row.seconds is not None)
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
    parser.add_argument("what", choices=("rules", "models", "report"))
    parser.add_argument("--out", type=Path, default=Path("agreement.jsonl"))
    parser.add_argument("--only", nargs="*", help="names of cases or models")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    problems: dict[str, Callable[[], Problem]] = {}
    if chosen.what == "rules":
        problems = {case.label: lambda case=case: of_rule(case) for case in (*ONE_PER_RULE, *CASES)}
    elif chosen.what == "models":
        problems = {name: lambda name=name: of_model(name) for name in MODELS}
    if chosen.only:
        problems = {name: problems[name] for name in chosen.only}
    run(chosen.what, problems, chosen.out)
    report(rows_of(chosen.out))


if __name__ == "__main__":
    main()
