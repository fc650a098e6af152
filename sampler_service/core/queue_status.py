"""Progress of a request, in numbers and in words. The event loop reads it while the compute thread goes on, so a
request may be finished before the event loop hears of its admission."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sampler_service.core.request import QueueStatus
from sampler_service.core.sequence import Sequence as RunningSequence
from sampler_service.core.speed import Speed
from sampler_service.core.task import Task


def status_of(
    request_id: str, tasks: Sequence[Task], running: Iterable[RunningSequence[Task]], speed: Speed
) -> QueueStatus | None:
    """Progress of the youngest request with this id; None when there is none. `tasks` are in the order of arrival."""
    place = max((n for n, task in enumerate(tasks) if task.request_id == request_id), default=None)
    if place is None:
        return None
    task, ahead, running = tasks[place], tasks[:place], list(running)
    beside = sum(sequence.owner is not task for sequence in running)
    if task.admitted:
        expected = speed.seconds(prompt_tokens=_prompt_left(task), steps=_outputs_left(task)[1])
        return QueueStatus(True, 0, 0, expected, f"{_progress(task)}, {beside} sequences run beside it")
    prompts = sum(_prompt_left(one) for one in ahead)
    outputs = sum(_outputs_left(one)[0] for one in ahead)
    expected = speed.seconds(
        prompt_tokens=prompts + _prompt_left(task),
        # A step gives a token to each running sequence; when it waits, as many run as can.
        steps=outputs / max(1, len(running)) + _outputs_left(task)[1],
    )
    waiting = sum(not one.admitted for one in ahead)
    reason = (
        f"waits for a place: {len(ahead)} requests are before it, {waiting} of them wait too; {beside} sequences run"
    )
    return QueueStatus(False, len(ahead), prompts + outputs, expected, reason)


def _prompt_left(task: Task) -> int:
    return len(task.request.prompt) - task.prompt_done


def _outputs_left(task: Task) -> tuple[int, int]:
    """Tokens that the request's sequences may still draw: all of them together, and the longest."""
    if not (task.begun or task.finished):  # all alike, and there may be a thousand in each of thousands of requests
        left = task.sequences[0].expected_left
        return left * len(task.sequences), left
    each = [sequence.expected_left for sequence in task.sequences if sequence.index not in task.finished]
    return sum(each), max(each, default=0)


def _progress(task: Task) -> str:
    length = len(task.request.prompt)
    if not task.begun:
        return f"reading the prompt: {task.prompt_done} of {length} tokens"
    done = sum(len(sequence.tokens) for sequence in task.sequences)
    most = task.request.params.max_tokens
    of_all = "" if most is None else f" of {most * len(task.sequences)}"
    sequences = f" in {len(task.sequences)} sequences" if len(task.sequences) > 1 else ""
    return f"generating: {done}{of_all} tokens{sequences}"
