"""The procedural tasks, by name. To add one: a file next to this one with a `Task`, and a line here."""

from threepo.data.task import Task
from threepo.data.tasks.paths import Paths
from threepo.data.tasks.pointers import Pointers
from threepo.data.tasks.sorting import Sorting
from threepo.data.tasks.stack import Stack

TASKS: dict[str, Task] = {task.name: task for task in (Paths(), Pointers(), Sorting(), Stack())}
