"""The log of completions, which the first rank writes in a thread while the next step runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from threepo.ranks.world import World
from threepo.run_folder import RunFolder, completion_row
from threepo.training.update_record import UpdateRecord
from threepo.types import Completion


class CompletionLog:
    """Writes the completions of one step at a time."""

    def __init__(self, folder: RunFolder, world: World) -> None:
        self._folder, self._world = folder, world
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        """The last step's log, on the first rank."""

    def begin(self, step: int, completions: Sequence[Completion], record: UpdateRecord) -> None:
        """Begin to write a step's completions, once the last step's are written. An error is every rank's."""

        def begin() -> Future[None]:
            if self._writing:
                self._writing.result()
            return self._thread.submit(write_completions, self._folder, step, completions, record)

        self._writing = self._world.only_first(begin, None)

    def wait(self) -> None:
        """Wait on all ranks until everything is written. An error is every rank's."""
        self._world.on_first(lambda: self._writing and self._writing.result())

    def settle(self) -> None:
        """Wait on this rank alone; an error is raised by the next `begin` or `wait`, where all ranks hear of it."""
        if self._writing:
            wait([self._writing])


def write_completions(folder: RunFolder, step: int, completions: Sequence[Completion], record: UpdateRecord) -> None:
    """Write the log of completions, with the update's numbers for the completions that it learned from.

    `completions`: the ones to learn from come first.
    """
    update = {row.index: row for row in record.rows}
    rows = []
    for index, completion in enumerate(completions):
        row = update.get(index)
        rho = row.rho if row and record.correction else None
        numbers = {"gradient_logprob_sum": row and row.logprob_sum, "rho": rho, "correction_weight": row and row.weight}
        rows.append(completion_row(step, completion) | numbers | {"advantage": row and row.advantage})
    folder.write_completions(step, rows)
