"""Settings of `threepo eval --benchmarks`."""

from dataclasses import dataclass, fields

from threepo.config.checks import not_negative, require


@dataclass(frozen=True, kw_only=True)
class BenchmarksConfig:
    """[benchmarks]: published problem sets to evaluate on, in place of those of [data] (docs/evaluation.md)."""

    names: tuple[str, ...] = ()
    """Such as `aime24`; `aime24=COPY` reads a file, a folder or another data set on the hub, and
    `livecodebench:2025-02..2025-04` takes the problems of these months."""
    folder: str = ""
    """Folder with a file or a folder for each benchmark, such as aime24.jsonl; empty: the hub."""
    problems: int = 0
    """The first so many problems of each; 0: all."""
    math_prompt: str = ""
    """How problems of mathematics are put; `{prompt}` marks the problem's place. Empty: the paper's meaning."""
    code_prompt: str = ""
    """The same for programming."""

    def __post_init__(self) -> None:
        not_negative(self, "benchmarks", "problems")
        for name in ("math_prompt", "code_prompt"):
            template = getattr(self, name)
            require(
                not template or "{prompt}" in template,
                f"benchmarks.{name}",
                template,
                "must contain {prompt}, where the problem's text goes",
            )
        require(
            bool(self.names) or not any(getattr(self, f.name) for f in fields(self)),
            "benchmarks.names",
            self.names,
            "the rest of [benchmarks] is read with benchmarks only; name some, such as --benchmarks aime24,math500",
        )
