"""Episodes of `verifiers` 0.4: environments with several turns, tools, judges or a sandbox.

    [data]
    train = "verifiers-episodes:wordle(split='train')"

    [environment]
    factory = "threepo.plugins.verifiers_episodes:VerifiersEnvironment"
    settings = { taskset = { id = "wordle" } }

The settings are verifiers' own `[env]` block. In verifiers, a program writes messages and an HTTP server hands them to
the model. Here the environment's `run` is a coroutine in the episode's process. It waits wherever it asks its agent for
a reply, and goes on when the policy has written one, so nothing is tokenised again. Toolsets live in the same process;
their schemas and calls are made by the same MCP server class, without its HTTP.

NOT covered: several agents, harnesses other than the `null` loop, hooks that change or stop requests and responses, and
counts of tokens, which are 0 in a trace here.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from threepo.config import DataConfig
from threepo.data.finite import collect
from threepo.data.rows import Row
from threepo.data.source import InstalledSource, ProblemSet
from threepo.data.task import Split
from threepo.environment import Observation, Turn
from threepo.errors import UserError
from threepo.models.turns import TOOL_FORMATS
from threepo.plugins.verifiers import empty_trace, hooks_in_sandbox, load_tasks, message_of, prompt_of
from threepo.types import THINK, THINK_END, Problem

Call = Callable[[str, Any], Awaitable[str]]
"""Calls a tool by its name and arguments; returns its result."""


class VerifiersEnvironment:
    """An environment of verifiers, in the process of an episode."""

    def __init__(self, **env: Any) -> None:
        """`env`: verifiers' `[env]` block, with `taskset.id`."""
        import verifiers.v1 as vf
        from mcp.server.mcpserver import MCPServer
        from verifiers.v1.configs.agent import agent_config_fields

        self._env = vf.load_environment(vf.resolve_env_config(env))
        seats = agent_config_fields(self._env.config)
        for seat, agent in seats.items():
            for limit in ("max_input_tokens", "max_output_tokens", "max_total_tokens"):
                if (most := getattr(agent, limit)) is not None:
                    fix = "is not counted here; use environment.max_tokens, which counts all after the prompt"
                    raise UserError(f"environment.settings: {seat}.{limit} = {most}: {fix}")
        if len(seats) > 1:
            raise UserError(
                f"environment.settings: {self._env.config.env_id} has the agents {', '.join(seats)}, not one"
            )
        config = self._env.taskset.config
        self._task = type(self._env.taskset).task_type()
        self._shared, self._own = self._env.taskset.toolsets(config), self._task.toolsets(config.task)
        self._servers: dict[str, tuple[Any, str]] = {}
        """The MCP server of each tool, and the tool's name there."""
        self.tools: list[dict[str, Any]] = []
        for toolset in (*self._shared, *self._own):
            server, prefix = MCPServer(toolset.server_name), toolset.server_name
            toolset.register(server)
            for tool in asyncio.run(server.list_tools()):
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                schema = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                self.tools.append({"type": "function", "function": schema})
                self._servers[name] = server, tool.name
        self.traces: list[Any] = []
        """The trace of the episode's only agent, once it has begun."""

    def reset(self, problem: Problem) -> Observation:
        """Begin the task of a problem; returns what the agent reads first."""
        from verifiers.v1 import Agents

        data = self._task.data_type().model_validate(problem.columns["task"])
        task = self._task(data, self._env.taskset.config.task)
        self._loop = asyncio.new_event_loop()
        self._asks: asyncio.Queue[Any] = asyncio.Queue()
        self._replies: asyncio.Queue[Any] = asyncio.Queue()

        def agents(_: Any, traces: list[Any], *__: Any) -> Any:
            self.traces = traces  # the episode's own list
            return Agents(self._env.config, lambda _, config: _Seat(self, config))

        self._env._episode_agents = agents

        async def run() -> Any:
            await self._env.start()
            return await self._env.run_episode(task, None)

        self._run: asyncio.Task[Any] = self._loop.create_task(run())
        first = self._go_on()
        if first.done:
            raise RuntimeError("verifiers: the environment ended before the first reply")
        return first.observation

    def step(self, reply: str) -> Turn:
        """Give the agent's program a reply that calls no tool."""
        return self._go_on(message_of(reply), "stop")

    def call_tools(self, calls: Sequence[tuple[str, Any]], reply: str) -> Turn:
        """Give the agent's program a reply with tool calls."""
        return self._go_on(_with_calls(reply, calls, len(self.traces[0].nodes)), "tool_calls")

    def end(self, reply: str) -> Turn:
        """The reward and the metrics, after the rest of the environment's `run`, which gets no more replies."""
        if reply:
            self._go_on(message_of(reply), "length")
        while not self._run.done():
            self._go_on(None, "")
        trace = self.traces[0]
        rewards = {name: reward.score for name, reward in trace.rewards.items() if reward}
        return Turn(reward=trace.reward, metrics={**trace.metrics, **rewards})

    def _go_on(self, *reply: Any) -> Turn:
        """Let the environment run with the agent's reply until it asks for another one, or ends."""
        if reply:
            self._replies.put_nowait(reply)
        asked = self._loop.create_task(self._asks.get())
        self._loop.run_until_complete(asyncio.wait([self._run, asked], return_when=asyncio.FIRST_COMPLETED))
        if asked.done():
            return Turn(asked.result())
        asked.cancel()
        episode = self._run.result()
        if errors := episode.errors:
            raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}")
        if not episode.ok:
            raise RuntimeError("verifiers: the environment's agent has failed")
        return Turn(done=True)

    async def ask(self, messages: Sequence[Any]) -> tuple[Any, str]:
        """Wait for the agent's reply to new messages, and why it ended; None at the end of the episode."""
        from verifiers.v1.types import content_text

        told = [{"role": message.role, "content": content_text(message.content)} for message in messages]
        one_text = len(told) == 1 and told[0]["role"] == "user"
        self._asks.put_nowait(told[0]["content"] if one_text else told)
        reply: tuple[Any, str] = await self._replies.get()
        return reply

    async def prepare(self, trace: Any) -> Call:
        """Set up the toolsets, which share the trace's state. Returns the function that calls a tool."""
        from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content

        async def pull() -> Any:
            return trace.state

        async def push(before: bytes) -> None: ...

        for toolset in (*self._shared, *self._own):
            toolset._pull_state, toolset._push_state = pull, push  # there is no HTTP between the state and its users
            await toolset.setup()
        for toolset in self._own:
            await toolset.setup_task(trace.task.data)

        async def call(name: str, arguments: Any) -> str:
            if name not in self._servers:
                return f"error: unknown tool {name!r}"
            if not isinstance(arguments, dict):
                return "error: tool arguments must be a JSON object; resend as an object"
            server, tool = self._servers[name]
            try:
                result = await server.call_tool(tool, arguments)
            except Exception as error:  # as the MCP server answers over HTTP
                return str(error)
            return str(mcp_content_to_chat_content(result.content))

        return call


class _Seat:
    """The policy, in place of the `Agent` that an environment's `run` expects."""

    def __init__(self, episode: VerifiersEnvironment, config: Any) -> None:
        self.config, self.trainable = config, True
        self._episode = episode

    async def run(self, task: Any, **_: Any) -> Any:
        """One segment of the task, as `Agent.run`."""
        async with self.interaction(task) as interaction:
            await interaction.turn()
            interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["_Interaction"]:
        """The task, turn by turn, as `Agent.interaction`: set up before, scored after."""
        from verifiers.v1.runtimes import provision_runtime
        from verifiers.v1.utils.compile import resolve_runtime_config
        from verifiers.v1.utils.decorators import discover_decorated, invoke

        if self._episode.traces:
            raise NotImplementedError("it runs its agent twice in an episode")
        if discover_decorated(task, "intercept"):
            raise NotImplementedError("its task changes requests or responses")
        trace = empty_trace(task, self.config)
        self._episode.traces.append(trace)
        async with AsyncExitStack() as stack:
            runtime = None
            if hooks_in_sandbox(task):
                box = provision_runtime(resolve_runtime_config(self.config.runtime, task), env=task.runtime_env())
                runtime = await stack.enter_async_context(box)
            given = {"trace": trace, "runtime": runtime}
            await invoke(task.setup, given)
            yield _Interaction(self._episode, task, trace, await self._episode.prepare(trace))
            trace.stop("user_closed")
            await invoke(task.finalize, given)
            await task.score(trace, runtime)
            trace.ok = True


class _Interaction:
    """An exchange with the policy, as `Interaction`: `turn` returns once a reply calls no tool."""

    def __init__(self, episode: VerifiersEnvironment, task: Any, trace: Any, call: Call) -> None:
        import verifiers.v1 as vf

        self.trace = trace
        self._episode, self._task, self._call = episode, task, call
        self._tools = [vf.Tool(**tool["function"]) for tool in episode.tools]
        self._messages: list[Any] = []

    async def turn(self, message: Any = None) -> Any:
        """Send messages of the user, or let the task's prompt open; returns the `Segment` with the policy's answer."""
        import verifiers.v1 as vf
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import prepare_turn

        prompted = not self._messages and self._task.data.prompt is not None
        if prompted == (message is not None):
            raise ValueError("a task with a prompt opens with a bare turn(); every other turn takes a message")
        said = [vf.UserMessage(content=message)] if isinstance(message, str) else message or []
        new = [parse_message(one) if isinstance(one, dict) else one for one in said]
        if not self._messages:
            new = prompt_of(self._task.data) + new
        before = len(self.trace.nodes)
        while new and not await self._stopped():
            self._messages += new
            reply, reason = await self._episode.ask(new)
            if reply is None:
                self.trace.stop("max_total_tokens")
                break
            response = vf.Response(id="", created=0, model="policy", message=reply, finish_reason=reason)
            node = prepare_turn(self.trace, self._messages, self._tools).commit(response)
            self.trace.calls.append(vf.ModelCall(node=node, finish_reason=reason))
            self._messages.append(reply)
            new = [await self._answer(call) for call in reply.tool_calls or ()]
        answer = [node.message for node in self.trace.nodes[before:] if node.sampled or node.message.role == "tool"]
        return vf.Segment(messages=answer, terminated=not answer)

    async def _answer(self, call: Any) -> Any:
        """The message with a tool's result."""
        import verifiers.v1 as vf

        result = await self._call(call.name, json.loads(call.arguments))
        return vf.ToolMessage(tool_call_id=call.id, name=call.name, content=result)

    async def _stopped(self) -> bool:
        """True if a limit of the agent or a `@stop` of the task lets the policy write no more."""
        from verifiers.v1 import Trace
        from verifiers.v1.session import call_hook

        most = self.trace.agent.config.max_turns
        if most is not None and self.trace.num_turns >= most:
            self.trace.stop("max_turns")
        for stop in self._task.hooks("stop"):
            if self.trace.stop_condition is None and await call_hook(stop, {Trace: self.trace}):
                self.trace.stop(stop.__name__)
        return self.trace.stop_condition is not None


def _with_calls(reply: str, calls: Sequence[tuple[str, Any]], number: int) -> Any:
    """A reply as verifiers' message, with its tool calls apart; `number` makes their ids."""
    from verifiers.v1 import ToolCall

    thought, mark, said = reply.partition(THINK_END)
    if not mark or THINK in thought:  # else the prompt has begun the thought
        thought, mark, said = "", "", reply
    rests = [form.without_calls(said) for form in TOOL_FORMATS.values()]
    reply = thought + mark + next((rest for rest in rests if rest != said), said)
    listed = [
        ToolCall(id=f"{number}-{i}", name=name, arguments=json.dumps(arguments))
        for i, (name, arguments) in enumerate(calls)
    ]
    return message_of(reply.strip()).model_copy(update={"tool_calls": listed})


def _open(source: str, _: Split, settings: DataConfig) -> ProblemSet:
    def problem(row: Row, _: int) -> Problem:
        data = row["task"].data
        columns = {"task": data.model_dump(mode="json")}
        answer = columns["task"].get("answer")
        prompt = data.prompt_text or "task"  # where the environment writes the first message, nobody reads this one
        return Problem(f"{source}/{data.idx}", prompt, "" if answer is None else str(answer), columns)

    taskset, tasks = load_tasks(source)[1:]
    if taskset.config.task != type(taskset.config.task)():
        fix = "episodes make their tasks themselves; write environment.settings.taskset.task instead"
        raise UserError(f"data: {source}: task: {fix}")
    rows = ({"task": task} for task in tasks)
    found = collect(source, rows, problem, settings)
    return ProblemSet(found, "environment", source)


SOURCE = InstalledSource(_open, endless=False)
"""The source that the entry point `verifiers-episodes` of the group `threepo.sources` names."""
