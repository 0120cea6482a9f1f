"""The log of completions, which the first rank writes in a thread while the next step runs."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from threepo.ranks.world import World
from threepo.run_folder import RunFolder
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
        """Begin to write a step's completions, once the last step's are written. An error is every rank's.

        `completions`: the ones that the step learned from come first.
        """

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
    """Write a step's completions to the run folder, with the numbers of the update that learned from them."""
    folder.write_completions(step, record.completion_rows(step, completions))
