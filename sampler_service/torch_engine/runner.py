"""Computes a batch: the newest token of each running sequence and pieces of prompts, laid end to end, then a draw.

Shapes: B running sequences, T packed tokens, R rows that sample, M rows with a grammar, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sampler_service.core import sampling
from sampler_service.core.penalties import Penalized
from sampler_service.core.sampling import Rules, UInt64s, scaled_logprobs, uniforms
from sampler_service.core.sequence import Sequence
from sampler_service.grammars import Bools
from sampler_service.metrics import SamplerMetrics
from sampler_service.torch_engine.graphs import CudaCapture, DecodeGraphs, DecodeStep, why_no_graphs
from sampler_service.torch_engine.planner import Piece
from tinsmith.cores import Cores
from tinsmith.errors import ServiceError
from tinsmith.modeling.adapter import Adapter
from tinsmith.modeling.adapter_runs import Run
from tinsmith.modeling.attention import Packed
from tinsmith.modeling.base_model import BaseModel
from tinsmith.modeling.full_weights import FullWeights, ParameterSwitch
from tinsmith.modeling.kernels.transfer import on_device
from tinsmith.modeling.kv_cache import Cached, CachedTogether, KVCache, Prefill, SharedPrompts
from tinsmith.modeling.logprobs import logits
from tinsmith.modeling.tower import PictureFeatures, PlacedPicture

MIN_SHARED_TOKENS = 32
"""Least number of tokens of a prompt that is read once for all its sequences. For a shorter prompt, two products cost
more than reading it several times."""


def runs_of(segments: Iterable[tuple[Adapter | None, int]]) -> list[Run]:
    """Runs from (adapter, number of rows) of consecutive segments. One stretch of rows is a slice, which is cheaper."""
    stretches: dict[int, list[slice]] = {}
    adapters: dict[int, Adapter] = {}
    start = 0
    for adapter, count in segments:
        stop = start + count
        if adapter is not None:
            mine = stretches.setdefault(id(adapter), [])
            adapters[id(adapter)] = adapter
            if mine and mine[-1].stop == start:
                mine[-1] = slice(mine[-1].start, stop)
            else:
                mine.append(slice(start, stop))
        start = stop
    return [
        Run(
            adapters[key],
            mine[0]
            if len(mine) == 1
            else torch.cat([torch.arange(rows.start, rows.stop) for rows in mine]).to(adapters[key].flat.device),
        )
        for key, mine in stretches.items()
    ]


@dataclass(slots=True)
class Rows:
    """How the rows that sample draw: the running sequences in their order, then the new sequences."""

    sequences: list[Sequence]
    rules: Rules
    keys: UInt64s
    counters: UInt64s
    """int64 [R]: index of the token that each row draws next."""
    topk: list[tuple[int, int]]
    """Pairs (row, k) of the rows that want a top-k table."""
    penalized: Penalized | None
    """The rows with penalties or biases; None when there are none."""
    with_grammar: list[int]
    """Indices of the rows that draw only tokens which their grammar allows."""

    @classmethod
    def of(cls, sequences: list[Sequence], *, vocab_size: int, device: torch.device) -> Rows:
        changed = [
            (n, penalties, sequence.history(vocab_size=vocab_size, device=device))
            for n, sequence in enumerate(sequences)
            if (penalties := sequence.group.request.params.penalties)
        ]
        return cls(
            sequences=sequences,
            rules=Rules.of([sequence.group.rule for sequence in sequences], vocab_size=vocab_size, device=device),
            keys=np.array([sequence.group.keys[sequence.index] for sequence in sequences], np.uint64),
            counters=np.array([len(sequence.tokens) for sequence in sequences], np.uint64),
            topk=[(n, k) for n, sequence in enumerate(sequences) if (k := sequence.group.request.topk_sample_logprobs)],
            penalized=Penalized.of(changed, device=device) if changed else None,
            with_grammar=[n for n, sequence in enumerate(sequences) if sequence.group.grammar is not None],
        )


@dataclass(slots=True)
class Pass:
    """One forward pass: the sequences and pieces for which the base model has the same parameters."""

    parameters: FullWeights | None
    """The full version with the parameters; None for the base model's own."""
    rows: list[int] = field(default_factory=list)
    """Indices of running sequences, in order."""
    pieces: list[Piece] = field(default_factory=list)


def passes_of(running: list[Sequence], pieces: list[Piece]) -> list[Pass]:
    """The passes of a step, one for each set of parameters. As a rule there is one."""
    passes: dict[int, Pass] = {}
    for row, sequence in enumerate(running):
        parameters = sequence.parameters
        passes.setdefault(id(parameters), Pass(parameters)).rows.append(row)
    for piece in pieces:
        parameters = piece.job.sequences[0].parameters
        passes.setdefault(id(parameters), Pass(parameters)).pieces.append(piece)
    return list(passes.values())


def shared_prompts_of(running: list[Sequence], device: torch.device) -> SharedPrompts | None:
    """The prompts that several running sequences share; None where reading a prompt once for all of them would gain
    nothing."""
    groups: dict[int, list[int]] = {}
    for row, sequence in enumerate(running):
        groups.setdefault(id(sequence.origin), []).append(row)
    length = min(sequence.shared_length for sequence in running)
    most = max(len(rows) for rows in groups.values())
    if length < MIN_SHARED_TOKENS or 2 * len(groups) > len(running) or len(groups) * most > 2 * len(running):
        return None
    return SharedPrompts.of(list(groups.values()), length, device)


def _size(sequence: Sequence) -> int:
    return sequence.size


@dataclass(slots=True)
class Decoding:
    """The running sequences as tensors, which are kept from step to step while the same sequences run."""

    rows: Rows
    tokens_B: Tensor
    """Newest token of each sequence, whose keys and values are not computed yet."""
    positions_B: Tensor
    """Number of that token in its sequence."""
    rotated_B: Tensor
    """Position of that token for the rotation of queries and keys, which differs after pictures."""
    runs: list[Run]
    passes: list[Pass]
    shared: dict[int, SharedPrompts | None]
    """By the size of sequences."""

    @classmethod
    def of(cls, running: list[Sequence], *, vocab_size: int, device: torch.device) -> Decoding:
        return cls(
            rows=Rows.of(list(running), vocab_size=vocab_size, device=device),
            tokens_B=torch.tensor([sequence.tokens[-1] for sequence in running], dtype=torch.int64, device=device),
            positions_B=torch.tensor([sequence.length - 1 for sequence in running], dtype=torch.int64, device=device),
            rotated_B=torch.tensor(
                [sequence.length - 1 + sequence.rotation_offset for sequence in running],
                dtype=torch.int64,
                device=device,
            ),
            runs=runs_of((sequence.adapter, 1) for sequence in running),
            passes=passes_of(running, []),
            shared={size: shared_prompts_of(list(rows), device) for size, rows in groupby(running, key=_size)},
        )

    def advance(self, tokens_B: Tensor) -> None:
        self.tokens_B = tokens_B
        self.positions_B = self.positions_B + 1
        self.rotated_B = self.rotated_B + 1
        self.rows.counters += np.uint64(1)
        if self.rows.penalized is not None:
            self.rows.penalized.take(tokens_B)


@dataclass(slots=True)
class Batch:
    """The work of one step, made by Scheduler.schedule()."""

    running: list[Sequence]
    """Sequences that get their next token."""
    pieces: list[Piece]
    """Pieces of prompts."""
    changed: bool = True
    """Whether the running sequences, their lanes or their versions differ from those of the last batch."""
    rests: bool = False
    """Whether prompts rest in this step."""
    started: float = 0.0
    """When the step began, by the performance counter."""
    ending: list[Piece] = field(init=False)
    """The pieces with which their prompts end."""

    def __post_init__(self) -> None:
        self.ending = [piece for piece in self.pieces if piece.ends]

    @property
    def sampling(self) -> list[Sequence]:
        """Sequences that get a token: the running ones, then those of the prompts that end here."""
        return [*self.running, *(sequence for piece in self.ending for sequence in piece.job.sequences)]

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token of each sampling sequence of a batch, on the host."""

    tokens_R: list[int]
    logprobs_R: list[float]


class Runner:
    """Computes batches on the model. Belongs to the compute thread."""

    def __init__(
        self, base: BaseModel, caches: Mapping[int, KVCache], *, metrics: SamplerMetrics, cores: Cores | None = None
    ) -> None:
        """`caches`: keys and values, by the size of sequences (planner.py). `cores`: None leaves the number of threads
        as it is."""
        self.base = base
        self.parameters = ParameterSwitch(base)
        self.caches = caches
        self.metrics = metrics
        self.cores = cores or Cores("", most=0, set_threads=lambda _: None)
        self.graphs: DecodeGraphs | None = None
        """The CUDA graphs; None where steps are not captured."""
        if not why_no_graphs(base):
            self.graphs = DecodeGraphs(base, CudaCapture(base.device))
        self._decoding: Decoding | None = None
        """The running sequences as tensors; None when none run."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> Drawn:
        """Computes a batch and draws a token for each of its sampling sequences."""
        if not batch.running:
            self._decoding = None
        elif batch.changed or self._decoding is None:
            self._decoding = Decoding.of(batch.running, vocab_size=self.base.vocab_size, device=self.base.device)
        self.cores.begin(num_tokens=len(batch.running) + batch.prompt_tokens)
        self.metrics.steps.threads.set(self.cores.threads)
        phases = self.metrics.steps.phases
        with phases["forward"].time():
            logits_R_V = self.logits(batch)
        if not batch.running and not batch.ending:
            return Drawn([], [])
        with phases["draw"].time():
            return draw(batch, self._decoding, logits_R_V)

    @torch.inference_mode()
    def check_alive(self) -> None:
        """Raises when the model cannot compute even one token."""
        zero = torch.zeros(1, dtype=torch.int64, device=self.base.device)
        self.base.hidden_states(zero, zero, Packed([1]), []).sum().item()

    def logits(self, batch: Batch) -> Tensor:
        """float32 logits [R, V]: of each running sequence, then of the last token of each prompt that ends here.

        Prompts are scored on the way.
        """
        running, decoding = batch.running, self._decoding
        passes = passes_of(running, batch.pieces) if batch.pieces or decoding is None else decoding.passes
        if len(passes) == 1:
            by_graph = self._by_graph(running, decoding) if decoding is not None and not batch.pieces else None
            return self._run_pass(batch, passes[0]) if by_graph is None else by_graph
        logits_R_V = torch.empty(len(running) + len(batch.ending), self.base.vocab_size, device=self.base.device)
        for one in passes:
            rows = one.rows + [len(running) + n for n, piece in enumerate(batch.ending) if piece in one.pieces]
            logits_R_V[torch.tensor(rows, dtype=torch.int64, device=self.base.device)] = self._run_pass(batch, one)
        return logits_R_V

    def _by_graph(self, running: list[Sequence], decoding: Decoding) -> Tensor | None:
        """Logits of a step that only decodes, in one pass; None if no graph computes the step."""
        if self.graphs is None or len(decoding.shared) > 1:
            return None
        (size,) = decoding.shared
        (only,) = decoding.passes
        self.parameters.use(only.parameters)
        return self.graphs.logits(
            DecodeStep(
                cache=self.caches[size],
                tokens_B=decoding.tokens_B,
                positions_B=decoding.positions_B,
                rotated_B=decoding.rotated_B,
                num_keys=max(sequence.length for sequence in running),
                runs=decoding.runs,
                parameters=only.parameters,
            )
        )

    def forget(self, weights: object) -> None:
        """Drops the references to a version that was unloaded."""
        self.parameters.forget(weights)
        if self.graphs is not None:
            self.graphs.forget(weights)

    def clear(self) -> None:
        """Frees memory, after a step that found none."""
        if self.graphs is not None:
            self.graphs.clear()

    def _run_pass(self, batch: Batch, one: Pass) -> Tensor:
        """Logits of a pass, float32 [r, V]: of its sequences, then of its prompts that end here."""
        self.parameters.use(one.parameters)
        hidden_T_H = self._hidden_states(batch, one)
        self._score(one, hidden_T_H)
        return self._logits(batch, one, hidden_T_H)

    def _hidden_states(self, batch: Batch, one: Pass) -> Tensor:
        """Hidden states [T, H]: the running sequences' newest tokens, then the pieces."""
        device = self.base.device
        decoding = self._decoding
        tokens, positions = [], []
        if decoding is not None and one.rows:
            every_row = len(one.rows) == len(batch.running)
            rows = slice(None) if every_row else torch.tensor(one.rows, device=device)
            tokens.append(decoding.tokens_B[rows])
            positions.append(decoding.rotated_B[rows])
        seen = any(piece.job.group.request.pictures for piece in one.pieces)
        for piece in one.pieces:
            stop, sequence = piece.start + piece.length, piece.job.sequences[0]
            tokens.append(torch.from_numpy(sequence.tokens_between(piece.start, stop)).to(device))
            if piece.job.group.request.pictures:
                positions.append(torch.from_numpy(sequence.rotated_between(piece.start, stop)).to(device))
            else:
                positions.append(torch.arange(piece.start, stop, device=device))
            self.metrics.steps.prefilled_tokens.inc(piece.length)
        runs = self._kept_runs(one)
        if runs is None:
            running = batch.running
            segments = [(running[row].adapter, 1) for row in one.rows]
            runs = runs_of([*segments, *((piece.job.sequences[0].adapter, piece.length) for piece in one.pieces)])
        layouts = list(self._layouts(batch, one))
        layout = layouts[0] if len(layouts) == 1 else CachedTogether(layouts)
        if seen:  # three positions for each token
            positions = [one if one.ndim == 2 else one.expand(3, -1) for one in positions]
        return self.base.hidden_states(
            _joined(tokens), torch.cat(positions, -1), layout, runs, self._picture_features(one) if seen else None
        )

    def _picture_features(self, one: Pass) -> PictureFeatures | None:
        """The features of the pictures in a pass's pieces; None if none of them has any."""
        assert self.base.tower is not None  # convert.py refuses pictures otherwise
        found: list[PictureFeatures] = []
        first = len(one.rows)
        for piece in one.pieces:
            stop = piece.start + piece.length
            here = [
                placed
                for placed in piece.job.group.request.pictures
                if placed.start < stop and placed.start + placed.picture.num_tokens > piece.start
            ]
            try:
                if here and (picture_features := self._look(here, piece).within(piece.start, stop)) is not None:
                    found.append(picture_features.moved(first))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the request ends with this error after the step
                piece.job.group.fail(error)
            first += piece.length
        return PictureFeatures.joined(found) if found else None

    def _look(self, placed: list[PlacedPicture], piece: Piece) -> PictureFeatures:
        """The features of pictures in a piece's prompt, encoded with the version of the piece."""
        assert self.base.tower is not None
        sequence = piece.job.sequences[0]
        runs = [] if sequence.adapter is None else [Run(sequence.adapter, slice(0, piece.job.length))]
        return self.base.tower.features_of(placed, runs, version=sequence.namespace)

    def _layouts(self, batch: Batch, one: Pass) -> Iterator[Cached]:
        """The layout of each cache that the pass uses."""
        running, decoding = batch.running, self._decoding
        of_running = Counter(sequence.size for sequence in running)
        rows_of: dict[int, list[int]] = {}
        for row in one.rows:
            rows_of.setdefault(running[row].size, []).append(row)
        for size in sorted({*rows_of, *(piece.job.size for piece in one.pieces)}):
            rows, lanes_B, shared = rows_of.get(size, []), None, None
            positions_B = torch.empty(0, dtype=torch.int64, device=self.base.device)
            if decoding is not None and rows:
                # Rows are in the order of size, then lane, so all rows of one size are consecutive.
                is_whole = len(rows) == of_running[size]
                positions_B = decoding.positions_B[slice(rows[0], rows[-1] + 1) if is_whole else rows]
                if is_whole:
                    shared = decoding.shared[size]
                else:
                    lanes_B = torch.tensor([running[row].lane for row in rows], device=self.base.device)
            prefills = [part for piece in one.pieces if piece.job.size == size for part in prefills_of(piece)]
            yield Cached(self.caches[size], positions_B, prefills, lanes_B=lanes_B, shared=shared)

    def _score(self, one: Pass, hidden_T_H: Tensor) -> None:
        first = len(one.rows)
        for piece in one.pieces:
            rows = slice(first, first + piece.length)
            first = rows.stop
            group = piece.job.group
            if group.scorer is not None and piece.job.scored:
                adapter = piece.job.sequences[0].adapter
                try:
                    group.scorer.add(self.base.head, hidden_T_H[rows], start=piece.start, adapter=adapter)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    group.fail(error)

    def _logits(self, batch: Batch, one: Pass, hidden_T_H: Tensor) -> Tensor:
        running, runs = batch.running, self._kept_runs(one)
        if runs is not None:
            return logits(self.base.head, hidden_T_H, runs)
        wanted = list(range(len(one.rows)))
        adapters = [running[row].adapter for row in one.rows]
        last = len(one.rows) - 1
        for piece in one.pieces:
            last += piece.length
            if piece.ends:
                wanted.append(last)
                adapters.append(piece.job.sequences[0].adapter)
        rows = torch.tensor(wanted, dtype=torch.int64, device=self.base.device)
        return logits(self.base.head, hidden_T_H[rows], runs_of((adapter, 1) for adapter in adapters))

    def _kept_runs(self, one: Pass) -> list[Run] | None:
        """The adapters' runs in steps that only decode, all sequences in one pass."""
        decoding = self._decoding
        if decoding is None or one.pieces or len(decoding.passes) > 1:
            return None
        return decoding.runs


def prefills_of(piece: Piece) -> Iterator[Prefill]:
    """The parts of a piece, which ends where a copy of the states is wanted."""
    job = piece.job
    wanted = [border for border in job.states if piece.start < border <= piece.stop]
    for start, stop in pairwise(sorted({piece.start, *wanted, piece.stop})):
        yield Prefill(job.lane, start, stop - start, job.states.get(stop))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def draw(batch: Batch, decoding: Decoding | None, logits_R_V: Tensor) -> Drawn:
    """A token for each running sequence, and for each sequence of the prompts that end here."""
    running, device = batch.running, logits_R_V.device
    if not batch.ending:
        assert decoding is not None
        rows = decoding.rows
    else:
        sequences = batch.sampling
        rows = Rows.of(sequences, vocab_size=logits_R_V.shape[1], device=device)
        # num_samples draws from one row.
        counts = [1] * len(running) + [len(piece.job.sequences) for piece in batch.ending]
        if len(sequences) > len(counts):
            # The number of rows is given, because otherwise the host would have to ask the device for it.
            logits_R_V = logits_R_V.repeat_interleave(
                torch.tensor(counts, device=device), 0, output_size=len(sequences)
            )
    masks = _masks(rows, logits_R_V) if rows.with_grammar else None  # first: a GPU computes the logits meanwhile
    logprobs_R_V = scaled_logprobs(logits_R_V, rows.rules.temperature_R_1)
    numbers_R = on_device(torch.from_numpy(uniforms(rows.keys, rows.counters)), device)
    drawn_from_R_V = logprobs_R_V
    if rows.penalized is not None:
        drawn_from_R_V = rows.penalized.logprobs(logits_R_V, logprobs_R_V, rows.rules.temperature_R_1)
    if masks is None:
        tokens_R = sampling.draw(drawn_from_R_V, rows.rules, numbers_R)
    else:
        tokens_R = sampling.draw_masked(drawn_from_R_V, rows.rules, numbers_R, *masks)
    logprobs_R = logprobs_R_V.gather(-1, tokens_R[:, None])[:, 0]
    if rows.topk:
        _take_tables(rows, logprobs_R_V)
    if decoding is not None:
        decoding.advance(tokens_R[: len(running)])
    return Drawn(tokens_R.tolist(), logprobs_R.tolist())


def _masks(rows: Rows, logits_R_V: Tensor) -> tuple[Tensor, Tensor] | None:
    """Indices of the rows with a grammar, int64 [M], and the tokens that may come next there, bool [M, V]; None without
    such rows. A request whose grammar fails draws without it in this step, which is its last."""
    masks: dict[int, Bools] = {}
    for row in rows.with_grammar:
        sequence = rows.sequences[row]
        try:
            masks[row] = sequence.matcher().allowed(logits_R_V.shape[1])
        except ServiceError as error:
            sequence.group.failure = sequence.group.failure or error
    if not masks:
        return None
    device = logits_R_V.device
    return torch.tensor(list(masks), device=device), on_device(torch.from_numpy(np.stack([*masks.values()])), device)


def _take_tables(rows: Rows, logprobs_R_V: Tensor) -> None:
    most = min(max(k for _, k in rows.topk), logprobs_R_V.shape[1])
    wanted = torch.tensor([row for row, _ in rows.topk], device=logprobs_R_V.device)
    values, ids = (x.cpu().numpy() for x in logprobs_R_V[wanted].topk(most))
    for n, (row, k) in enumerate(rows.topk):
        rows.sequences[row].take_row(ids[n, :k], values[n, :k])
