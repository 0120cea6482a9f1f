"""Environments of Prime Intellect's `verifiers` with one turn, for example `verifiers:word_sums(split="train")`.

An environment is an installed package that exports a `Taskset` (verifiers 0.4). Its tasks have the prompts, and their
`score` makes the rewards: each completion becomes the trace of one exchange. Environments with several turns, tools, a
sandbox or a judge model are episodes (verifiers_episodes.py).
"""

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from threepo.config import DataConfig
from threepo.config.sources import split_settings
from threepo.data.finite import collect
from threepo.data.rows import BrokenRow, Row, chat_messages
from threepo.data.source import InstalledSource, ProblemSet
from threepo.data.task import Split
from threepo.errors import UserError
from threepo.types import THINK, THINK_END, Completion, OwnReward, Problem


@dataclass(frozen=True, eq=False)
class Environment:
    """The tasks of an environment, which score completions."""

    source: str
    tasks: Mapping[str, Any]
    """A `verifiers.v1.Task` for each problem, by the problem's id."""

    def rewards(self, completions: Sequence[Completion]) -> list[float]:
        """The weighted sum of the task's rewards for each completion; an error in a reward becomes a `UserError`."""
        # In another thread than the main one, verifiers' grading of mathematics cannot set its alarm, and pays 0.
        if threading.current_thread() is not threading.main_thread():
            fix = "set overlap.lag = 0, and train in no thread of your own"
            raise UserError(f"data: {self.source}: is scored in the main thread only; {fix}")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self._rewards(completions))
        raise UserError(f"data: {self.source}: cannot be scored in a notebook; train from a script or the command line")

    async def _rewards(self, completions: Sequence[Completion]) -> list[float]:
        return await asyncio.gather(*map(self._reward, completions))

    async def _reward(self, completion: Completion) -> float:
        from verifiers.v1 import AgentConfig
        from verifiers.v1.utils.decorators import invoke

        task, where = self.tasks[completion.problem.id], f"{completion.problem.label}: its reward"
        try:
            trace = empty_trace(task, AgentConfig(harness={"id": "null"}, max_turns=1))
            await invoke(task.setup, {"trace": trace, "runtime": None})  # `_refusal`: none of its own needs a runtime
            _record(trace, task, completion)
            await invoke(task.finalize, {"trace": trace, "runtime": None})
            await task.score(trace)
        except Exception as error:  # it is the environment's code, and may raise anything
            raise UserError(f"{where} raised {_described(error.__cause__ or error)}") from error
        if not math.isfinite(trace.reward):
            raise UserError(f"{where} is {trace.reward}, which must be a finite number")
        return float(trace.reward)


def load_tasks(source: str) -> tuple[str, Any, list[Any]]:
    """The name, the `Taskset` and the tasks of `KIND:NAME(setting=value, ...)`; `UserError` if there are none.

    The settings are fields of the environment's `TasksetConfig`; `select` chooses some of the tasks, with the fields of
    verifiers' `SelectConfig`.
    """
    name, arguments = split_settings(source)
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise UserError(f"data: {source}: needs verifiers 0.4; in a clone, pip install '.[verifiers]'") from error
    try:
        select = vf.SelectConfig.model_validate(arguments.pop("select", {}))
        config = vf.taskset_config_type(name).model_validate({**arguments, "id": name})
        taskset = vf.load_taskset(config).select(select)
        tasks = list(taskset) if taskset.bounded else []
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"data: {source}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except (Exception, SystemExit) as error:  # importing and loading run the environment's code
        raise UserError(f"data: {source}: is no taskset of verifiers 0.4: {_described(error)}") from error
    if not taskset.bounded:
        fix = "take some of its tasks, for example with select={'limit': 1000}"
        raise UserError(f"data: {source}: has no end; {fix}")
    if not tasks:
        raise UserError(f"data: {source}: has no tasks")
    return name, taskset, tasks


def _refusal(vf: Any, name: str, taskset: Any, tasks: Sequence[Any]) -> str:
    """The reason why the environment cannot be used; empty if it only asks for one completion of a prompt."""
    from verifiers.v1.utils.decorators import discover_decorated

    task, config, kind = tasks[0], tasks[0].config, vf.environment_class(name)
    in_sandbox = hooks_in_sandbox(task)
    unsupported = {
        f"its {kind.__name__} has turns or agents of its own": kind is not vf.SingleAgentEnv,
        "it runs the model in a harness of its own": vf.default_harness_id(name) == name,
        "it gives the model tools": taskset.toolsets(taskset.config) or task.toolsets(config),
        "it needs a container": task.NEEDS_CONTAINER or task.data.image,
        f"it needs a sandbox (runtime) for {', '.join(in_sandbox)}": in_sandbox,
        "it changes requests or responses": discover_decorated(task, "intercept"),
        "a judge model scores it": any(isinstance(value, vf.JudgeConfig) for value in dict(config).values())
        or config.judges,
        "it has no rewards": not task.hooks("reward"),
    }
    reasons = "; ".join(reason for reason, applies in unsupported.items() if applies)
    return reasons and f"{reasons}; play it as an episode (docs/episodes.md): only one turn can be scored from its text"


def hooks_in_sandbox(task: Any) -> list[str]:
    """The task's own functions that need the sandbox in which verifiers runs a rollout."""
    from verifiers.v1 import Task

    overridden = [hook for hook in ("setup", "finalize") if getattr(type(task), hook) is not getattr(Task, hook)]
    functions = [*(getattr(task, hook) for hook in overridden), *task.hooks("reward")]
    runtimes = {function.__name__: inspect.signature(function).parameters.get("runtime") for function in functions}
    return [name for name, parameter in runtimes.items() if parameter and parameter.default is parameter.empty]


def prompt_of(data: Any) -> list[Any]:
    """The messages of a task's prompt; the system prompt comes first."""
    import verifiers.v1 as vf

    prompt = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or ())
    if data.system_prompt is None:
        return prompt
    return [vf.SystemMessage(content=data.system_prompt), *prompt]


def message_of(text: str) -> Any:
    """A reply as verifiers' message, with thinking and the rest apart."""
    import verifiers.v1 as vf

    thinking, _, reply = text.rpartition(THINK_END)
    return vf.AssistantMessage(content=reply, reasoning_content=thinking.removeprefix(THINK) or None)


def empty_trace(task: Any, config: Any) -> Any:
    """The trace with which the rollout of a `Task` by an agent of this `AgentConfig` begins."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    agent = vf.AgentInfo(config=config)
    named = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    return vf.Trace(task=named, state=state_cls(type(task))(), agent=agent)


def _record(trace: Any, task: Any, completion: Completion) -> None:
    """Add the exchange to the trace: the prompt, and the completion with thinking and reply apart."""
    import verifiers.v1 as vf

    prompt, reply = prompt_of(task.data), message_of(completion.opening + completion.text)
    for number, message in enumerate([*prompt, reply]):
        parent = number - 1 if number else None
        trace.nodes.append(vf.MessageNode(parent=parent, message=message, sampled=message is reply))
    usage = vf.Usage(prompt_tokens=len(completion.prompt_tokens), completion_tokens=len(completion.tokens))
    trace.calls.append(vf.ModelCall(node=len(prompt), finish_reason=completion.finish_reason, usage=usage))
    trace.ok = True
    trace.stop("agent_completed")


def _described(error: BaseException) -> str:
    """An exception in one line, with the place in the code that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({place.filename}:{place.lineno})"


def _open(source: str, _: Split, settings: DataConfig) -> ProblemSet:
    name, taskset, tasks = load_tasks(source)
    import verifiers.v1 as vf

    if reason := _refusal(vf, name, taskset, tasks):
        raise UserError(f"data: {source}: {reason}")

    def problem(row: Row, _: int) -> Problem:
        data = row["task"].data
        if not data.prompt:
            raise BrokenRow("has no prompt")
        prompt = data.prompt
        if data.system_prompt is not None or not isinstance(prompt, str):
            prompt = chat_messages([m.model_dump(exclude_none=True) for m in prompt_of(data)], "prompt")
        columns = data.model_dump(mode="json", exclude=set(vf.TaskData.model_fields))
        answer = columns.get("answer")
        return Problem(f"{source}/{data.idx}", prompt, "" if answer is None else str(answer), columns)

    problems = collect(source, ({"task": task} for task in tasks), problem, settings)
    environment = Environment(source, {f"{source}/{task.data.idx}": task for task in tasks})
    return ProblemSet(problems, OwnReward(environment.rewards, in_main_thread=True), source)


SOURCE = InstalledSource(_open, endless=False)
