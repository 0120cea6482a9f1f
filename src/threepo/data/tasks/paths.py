from itertools import pairwise
from random import Random
from string import ascii_lowercase

from threepo.data.task import Task, read_question
from threepo.types import Problem, Verdict, final_answer, judge


class Paths(Task):
    """Find a way through a directed graph: `ab bc ad cf de; a to e` -> `a d e`, or any other along the given edges.

    Level: edges on the way; as many dead ends branch off. Worked out as a depth-first search that writes down every
    stop, also when it goes back.
    """

    name = "paths"
    default_levels = (2, 3, 4)
    min_level = 1

    def generate(self, rng: Random, level: int) -> tuple[str, str]:
        letters = rng.sample(ascii_lowercase, 2 * level + 1)
        way, others = letters[: level + 1], letters[level + 1 :]
        edges = [a + b for a, b in pairwise(way)]
        reached = way[:-1]  # dead ends branch off anything but the goal, and never lead back
        for letter in others:
            edges.append(rng.choice(reached) + letter)
            reached.append(letter)
        rng.shuffle(edges)
        return f"{' '.join(edges)}; {way[0]} to {way[-1]}\n", " ".join(way)

    def verify(self, problem: Problem, completion: str) -> Verdict:
        given = final_answer(completion)
        edges, start, goal = read_question(str(problem.prompt))
        stops = given.split()
        right = len(stops) > 1 and stops[0] == start and stops[-1] == goal
        return judge(given, right and all(a + b in edges for a, b in pairwise(stops)))

    def work(self, prompt: str) -> str:
        edges, start, goal = read_question(prompt)
        visits: list[str] = []

        def search(at: str) -> bool:
            visits.append(at)
            for edge in edges:
                if at != goal and edge[0] == at:
                    if search(edge[1]):
                        return True
                    visits.append(at)
            return at == goal

        search(start)
        return "".join(visits)
