"""Sampling through the SDK on the torch engine, against transformers.generate, vLLM, and the service on vLLM.

    python -m benchmarks sampler --size small                          # tiny, small or medium
    python -m benchmarks sampler --size qwen3_5-small                  # or nemotron_h-small
    python -m benchmarks sampler --size small --vllm-python V/bin/python    # an interpreter that has vllm

Every engine has the same threads and the same work, and they take turns, round by round, each one idle while another
works. Beside wall clock the CPU time of an engine's own processes is taken (a client's is not), which other work on the
machine disturbs less. README.md says what each figure means.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tinker
from tinker import types

from benchmarks.command_line import SIZES, add_models, add_only, add_rounds, add_size
from benchmarks.figure import Aim, Figure, Report, usable_cores
from benchmarks.processes import Loop, MeasuredService, cpu_seconds, model_folder, started
from benchmarks.rounds import alternate, ms
from benchmarks.sampler_load import Arrival, mixed_load, num_new_tokens
from benchmarks.trainer.shapes import HYBRID_SHAPES

OURS = "the SDK, torch engine"
BARE = "the torch engine alone"
BARE_SMALL = f"{BARE}, small"
"""For the step of a hybrid model: `--size small` is as large, and has attention only."""
VLLM = "vLLM alone"
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # its helper needs a compiler, and gains nothing here
    "HF_HUB_OFFLINE": "1",
}
GROUPS = {"prompts": 8, "samples": 8, "prompt_tokens": 64, "new_tokens": 64}
ONE = {"prompts": 1, "samples": 1, "prompt_tokens": 64, "new_tokens": 32}
BACKGROUND_TOKENS = 192
PROBES = 8
"""Short requests, one after the other, while a full batch decodes."""


@dataclass(frozen=True, slots=True)
class Work:
    """Time of one piece of work."""

    seconds: float
    cpu_seconds: float
    latencies: Sequence[float] = ()


class Party(Protocol):
    """An engine to measure."""

    @property
    def name(self) -> str: ...

    def generate(self, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int) -> Work:
        """All prompts at once."""
        ...

    def serve(self, load: Sequence[Arrival]) -> Work:
        """Each request when it arrives."""
        ...


@dataclass(frozen=True, slots=True)
class InLoop:
    """A loop in a subprocess."""

    name: str
    loop: Loop
    more: Mapping[str, Any]
    """Fields that are added to every request."""

    def generate(self, **shape: int) -> Work:
        return self._ask(do="generate", **shape)

    def serve(self, load: Sequence[Arrival]) -> Work:
        return self._ask(do="serve", load=[(one.at_s, one.prompt_tokens, one.new_tokens) for one in load])

    def parts(self) -> dict[str, float]:
        """CPU seconds of the parts of a decode step. Only the torch engine has them."""
        return self.loop.ask(do="step")["parts"]

    def _ask(self, **request: Any) -> Work:
        before = cpu_seconds(self.loop.pid)
        answer = self.loop.ask(**request, **self.more)
        return Work(answer["seconds"], cpu_seconds(self.loop.pid) - before, answer["latencies"] or ())


@dataclass(frozen=True, slots=True)
class ThroughSDK:
    """A service that was started here."""

    name: str
    target: MeasuredService
    client: tinker.SamplingClient
    vocab: int
    rng: np.random.Generator

    def generate(self, *, prompts: int, samples: int, prompt_tokens: int, new_tokens: int) -> Work:
        load = [Arrival(0.0, prompt_tokens, new_tokens)] * prompts
        return self.serve(load, samples=samples)

    def serve(self, load: Sequence[Arrival], *, samples: int = 1) -> Work:
        prompts = [self.prompt(one.prompt_tokens) for one in load]
        before, begin = self.cpu_seconds(), time.perf_counter()
        ended: dict[int, float] = {}
        futures = []
        for index, (one, prompt) in enumerate(zip(load, prompts, strict=True)):
            time.sleep(max(0.0, begin + one.at_s - time.perf_counter()))
            future = self.submit(prompt, samples=samples, new_tokens=one.new_tokens)
            future.add_done_callback(lambda _, index=index: ended.setdefault(index, time.perf_counter()))
            futures.append(future)
        made = sum(len(sequence.tokens) for future in futures for sequence in future.result().sequences)
        seconds = time.perf_counter() - begin
        if made != samples * num_new_tokens(load):
            raise RuntimeError(f"{self.name} gave {made} tokens, not {samples * num_new_tokens(load)}")
        latencies = [ended.get(n, begin + seconds) - begin - one.at_s for n, one in enumerate(load)]
        return Work(seconds, self.cpu_seconds() - before, latencies)

    def submit(self, prompt: types.ModelInput, *, samples: int, new_tokens: int) -> Any:
        params = types.SamplingParams(max_tokens=new_tokens, temperature=1.0, stop=[])  # nothing ends early
        return self.client.sample(prompt, samples, params).future()

    def first_token_ms(self) -> float:
        prompt = self.prompt(8)
        return ms(lambda: self.submit(prompt, samples=1, new_tokens=1).result())

    def cpu_seconds(self) -> float:
        assert self.target.up is not None
        return cpu_seconds(self.target.up.pid)

    def prompt(self, length: int) -> types.ModelInput:
        return types.ModelInput.from_ints(self.rng.integers(self.vocab, size=length).tolist())


@dataclass(frozen=True, slots=True)
class SamplerBench:
    ours: ThroughSDK
    others: Sequence[Party]
    small: Party | None
    """The torch engine on `small`, if the model that is measured is a hybrid one."""
    repeats: int
    budget_s: float
    spread_s: float

    def rounds(self, run: Callable[[Any], Work], parties: Sequence[Party]) -> list[list[Work]]:
        runs = [lambda party=party: run(party) for party in parties]
        return alternate(runs, repeats=self.repeats, budget_s=self.budget_s)

    def compare(self, name: str, run: Callable[[Any], Work], *, num_tokens: int) -> Iterator[Figure]:
        """Yields figures of Tinsmith against each of the others: tokens per second of wall-clock and of CPU time."""
        ours, *others = self.rounds(run, [self.ours, *self.others])
        for party, theirs in zip(self.others, others, strict=True):
            aims = [Aim(0.95 if party.name == BARE else 2)]
            yield Figure(
                f"{name}, tokens/s",
                "tokens/s",
                _rates(ours, num_tokens),
                party.name,
                _rates(theirs, num_tokens),
                aims,
            )
            by_cpu = [_cpu_rates(works, num_tokens) for works in (ours, theirs)]
            yield Figure(f"{name}, by CPU time", "tokens/CPU-s", by_cpu[0], party.name, by_cpu[1], aims)
            if ours[0].latencies and theirs[0].latencies and len(theirs[0].latencies) > 1:
                for share in (50, 95):
                    values, base = (
                        [float(np.percentile(work.latencies, share)) for work in works] for works in (ours, theirs)
                    )
                    yield Figure(f"{name}, latency p{share}", "s", values, party.name, base)


def groups(bench: SamplerBench) -> Iterator[Figure]:
    """8 prompts x 8 samples, 64+64 tokens, as in a step of reinforcement learning."""
    num_tokens = GROUPS["prompts"] * GROUPS["samples"] * GROUPS["new_tokens"]
    yield from bench.compare("8 x 8, 64+64", lambda party: party.generate(**GROUPS), num_tokens=num_tokens)


def one_request(bench: SamplerBench) -> Iterator[Figure]:
    """Latency of one request alone."""
    ours, *others = bench.rounds(lambda party: party.generate(**ONE), [bench.ours, *bench.others])
    for party, theirs in zip(bench.others, others, strict=True):
        for unit, kind in (("ms", "seconds"), ("CPU-ms", "cpu_seconds")):
            values, base = ([1e3 * getattr(work, kind) for work in works] for works in (ours, theirs))
            yield Figure("one request, 64+32", unit, values, party.name, base)


def mixed(bench: SamplerBench) -> Iterator[Figure]:
    """64 requests of various lengths that arrive one after the other."""
    load = mixed_load(count=64, spread_s=bench.spread_s, seed=0)
    tokens = num_new_tokens(load)
    yield from bench.compare("64 mixed requests", lambda party: party.serve(load), num_tokens=tokens)


def first_token(bench: SamplerBench) -> Iterator[Figure]:
    """A request for one token while 56 sequences decode, in steps of that batch, whose time is measured without the
    request."""
    background = {"prompts": 7, "samples": 8, "prompt_tokens": 64}
    ours = bench.ours
    values, steps = [], []
    for _ in range(bench.repeats):
        alone = ours.generate(**background, new_tokens=BACKGROUND_TOKENS)
        step_ms = 1e3 * alone.seconds / BACKGROUND_TOKENS
        prompts = [ours.prompt(background["prompt_tokens"]) for _ in range(background["prompts"])]
        futures = [
            ours.submit(prompt, samples=background["samples"], new_tokens=BACKGROUND_TOKENS) for prompt in prompts
        ]
        time.sleep(10 * step_ms / 1e3)  # until they decode
        probes = [ours.first_token_ms() for _ in range(PROBES) if not futures[0].done()]
        for future in futures:
            future.result()
        values.append(float(np.median(probes)))
        steps.append(step_ms)
    yield Figure("one token beside a full batch", "ms", values, "a decode step", steps, [Aim(3, at_most=True)])


def step(bench: SamplerBench) -> Iterator[Figure]:
    """CPU time of a decode step of 64 sequences: 63 of them are what 64 new tokens take more than one; and of its parts
    alone, without an adapter and with."""
    bare = next(party for party in bench.others if isinstance(party, InLoop) and party.name == BARE)
    runs = [lambda party=party: {"step": _step_seconds(party)} for party in (bench.ours, *bench.others)]
    columns = alternate([*runs, bare.parts], repeats=bench.repeats, budget_s=bench.budget_s)
    times = [{name: [1e3 * one[name] for one in column] for name in column[0]} for column in columns]
    ours, *others, parts = times
    for party, theirs in zip(bench.others, others, strict=True):
        yield Figure("a decode step of 64", "CPU-ms", ours["step"], party.name, theirs["step"])
        if party.name in (BARE, VLLM):
            for name, values in parts.items():
                yield Figure(f"of it {name}", "CPU-ms", values, party.name, theirs["step"])


def _step_seconds(party: Party) -> float:
    """CPU seconds of a decode step of 64 sequences."""
    long, short = (party.generate(**{**GROUPS, "new_tokens": count}).cpu_seconds for count in (64, 1))
    return (long - short) / 63


def recurrent(bench: SamplerBench) -> Iterator[Figure]:
    """CPU time of a decode step of 64 sequences of a hybrid model, against that of `small`."""
    if bench.small is None:
        return
    bare = next(party for party in bench.others if party.name == BARE)
    runs = [lambda party=party: 1e3 * _step_seconds(party) for party in (bare, bench.small)]
    values, base = alternate(runs, repeats=bench.repeats, budget_s=bench.budget_s)
    yield Figure("a decode step of 64, hybrid", "CPU-ms", values, BARE_SMALL, base, [Aim(1.5, at_most=True)])


def structured(bench: SamplerBench) -> Iterator[Figure]:
    """64 sequences of which 1, 8 or 64 have to be JSON, against 64 that need not. One may cost the others 5 %."""
    bare = next(party for party in bench.others if isinstance(party, InLoop) and party.name == BARE)
    shape = {"prompts": 64, "samples": 1, "prompt_tokens": 64, "new_tokens": 64}
    counts = (0, 1, 8, 64)
    runs = [lambda count=count: bare.generate(**shape, structured=count) for count in counts]
    free, *others = alternate(runs, repeats=bench.repeats, budget_s=bench.budget_s)
    for count, works in zip(counts[1:], others, strict=True):
        for unit, kind in (("s", "seconds"), ("CPU-s", "cpu_seconds")):
            values, base = ([getattr(work, kind) for work in each] for each in (works, free))
            aims = [Aim(1.05, at_most=True)] if count == 1 else []
            yield Figure(f"64 x (64+64), {count} as JSON", unit, values, "none as JSON", base, aims)


FIGURES: dict[str, Callable[[SamplerBench], Iterator[Figure]]] = {
    measure.__name__: measure for measure in (groups, one_request, mixed, first_token, step, recurrent, structured)
}


@contextmanager
def prepared(arguments: argparse.Namespace) -> Iterator[SamplerBench]:
    """All engines, idle."""
    folder = model_folder(arguments.size, arguments.models)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    threads = {"OMP_NUM_THREADS": str(arguments.threads)}
    rng = np.random.default_rng(0)
    with ExitStack() as stack:

        def loop(name: str, *command: str, more: Mapping[str, Any] | None = None, **how: Any) -> InLoop:
            return InLoop(name, stack.enter_context(closing(Loop(*command, **how))), more or {})

        def service(name: str, engine: str, **how: Any) -> ThroughSDK:
            shares = {"trainer_threads": 1, "sampler_threads": arguments.threads, "models": arguments.models}
            flags = ("--engine", engine)
            target = stack.enter_context(started(arguments.size, more_flags=flags, **shares, **how))
            client = tinker.ServiceClient(base_url=target.url, api_key="tml-bench")
            return ThroughSDK(
                name, target, client.create_sampling_client(base_model=target.base_model).result(), vocab, rng
            )

        others: list[Party] = [
            loop("transformers.generate", "hf_baseline", str(folder), "0", more={"threads": arguments.threads}),
            loop(BARE, "engine_baseline", str(folder), str(arguments.threads), environment=threads),
        ]
        small = None
        if arguments.size in HYBRID_SHAPES:
            plain = str(model_folder("small", arguments.models))
            small = loop(BARE_SMALL, "engine_baseline", plain, str(arguments.threads), environment=threads)
        python = arguments.vllm_python
        if small is not None:
            print("LEFT OUT: vLLM, whose engine here takes no recurrent layers", flush=True)
        elif _imports(python, "vllm"):
            how = {"python": python, "environment": VLLM_ENVIRONMENT | threads}
            others.append(loop(VLLM, "vllm_baseline", str(folder), **how))
            if _imports(python, "sampler_service.vllm.engine", "gateway", "trainer_service"):
                others.append(service("the SDK, vLLM engine", "vllm", **how))
            else:
                print(f"LEFT OUT: the service on vLLM; {python} has no tinsmith with its dependencies", flush=True)
        else:
            print(f"LEFT OUT: vLLM and the service on it; {python} has no vllm (--vllm-python names one)", flush=True)
        ours = service(OURS, "torch")
        yield SamplerBench(ours, others, small, arguments.repeats, arguments.budget_s, arguments.spread_s)


def _imports(python: str, *modules: str) -> bool:
    code = "import importlib.util, sys; sys.exit(not all(importlib.util.find_spec(name) for name in sys.argv[1:]))"
    try:
        return subprocess.run([python, "-c", code, *modules], capture_output=True, check=False).returncode == 0  # noqa: S603
    except OSError:
        return False


def _rates(works: Sequence[Work], num_tokens: int) -> list[float]:
    return [num_tokens / work.seconds for work in works]


def _cpu_rates(works: Sequence[Work], num_tokens: int) -> list[float]:
    return [num_tokens / work.cpu_seconds for work in works]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cores = usable_cores()
    add_size(parser, default="small", sizes=(*SIZES, *HYBRID_SHAPES))
    add_models(parser)
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", help="an interpreter with vllm (%(default)s)")
    parser.add_argument(
        "--threads", type=int, default=max(1, cores - cores // 2), help="threads of each engine (%(default)s)"
    )
    parser.add_argument("--spread-s", type=float, default=4.0, help="time of the mixed load's arrivals (%(default)s)")
    add_rounds(parser, repeats=5, budget_s=120.0)
    add_only(parser, FIGURES)


def run(arguments: argparse.Namespace, report: Report) -> None:
    with prepared(arguments) as bench:
        for name in arguments.only:
            for figure in FIGURES[name](bench):
                report.add(figure)
