"""Write the generated pages: configuration.md, command_line.md, and the presets in method.md.

    make docs

A test fails when a page differs from what this writes.
"""

import argparse
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from threepo import config
from threepo.cli import build_parser
from threepo.config.presets import PRESETS
from threepo.config.recipes import load
from threepo.config.records import BASES, RECORDS, Named, OneOf, shown
from threepo.lab.probe_config import ProbeConfig
from threepo.lab.study_config import StudyTables

PAGE = Path(__file__).parent / "configuration.md"
COMMAND_LINE = Path(__file__).parent / "command_line.md"
WITH_PRESETS = Path(__file__).parent / "method.md"
BEGIN, END = "<!-- presets: written by docs/generate.py -->", "<!-- end of presets -->"
INTRODUCTION = """# Configuration

<!-- written by docs/generate.py -->

A recipe is a TOML file with the tables below. The default of a key comes first, and then the other names that it can
take; some keys also take `module:name`, your own code ([CONTRIBUTING.md](../CONTRIBUTING.md#your-own-code)). A recipe
may begin with `extends = "other.toml"` and then holds only the keys that differ. On the command line, `table.key=value`
overrides a key: the value is TOML (`1e9`, `[1, 2]`, `true`), and anything else is text. A run writes its resolved
configuration to `config.json`.

"""
COMMANDS_INTRODUCTION = """# Command line

<!-- written by docs/generate.py -->

`section.key=value` overrides a setting of the recipe ([configuration.md](configuration.md)). The exit status is 0 for
success, 1 if `certify` finds wrong weights, 2 for an error in the input, and 128 + n after signal n, with the state
saved. A command also runs as `python -m threepo`, which torchrun needs.

"""
COMMANDS = {"train": config.TrainConfig, "sft": config.SFTConfig, "eval": config.EvaluationConfig}
NAMED = ("variants", "methods")
"""Tables that a study can have several times."""
BAR = "\\|"
TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def table_of(hint: Any) -> Mapping[str, Any]:
    """The names that a field can take; empty if it takes other values."""
    tables = [each.table for each in getattr(hint, "__metadata__", ()) if isinstance(each, OneOf)]
    return tables[0] if tables else {}


def type_name(hint: Any) -> str:
    """A field's type in words."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        named = [f'`"{name}"`' for name in table_of(hint)]
        return " or ".join(named) or type_name(arguments[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value!r}`" for value in arguments).replace("'", '"')
    if origin is tuple:
        kind, _, rest = type_name(arguments[0]).partition(" of ")
        return f"list of {kind}" + ("" if kind.endswith("`") else "s") + (rest and f" of {rest}")
    if origin is types.UnionType:
        return " or ".join(map(type_name, arguments))
    return "table" if Any in arguments else TYPES.get(hint, "table of numbers")


def with_values(hint: Any, default: str) -> str:
    """A default with the other names that a field can take, or with its type where the default does not show it."""
    kind = type_name(hint)
    if kind.startswith("`"):
        others = ", ".join(name for name in kind.split(" or ") if name not in default)
        return f"{default}; {others}" if others else default
    return f"{default} ({kind})" if default in ("*required*", "`[]`", "`{}`") else default


def default_of(f: Field[Any]) -> Any:
    """A field's default; MISSING where it is required."""
    return f.default_factory() if f.default_factory is not MISSING else f.default


def default_text(value: Any) -> str:
    """A default as TOML."""
    return "*required*" if value is MISSING else f"`{shown(value)}`".replace("'", '"')


def defaults(table: str, key: str) -> str:
    """The default of a key, with the commands in which it differs."""
    head, *rest = table.split(".")
    found: dict[str, list[str]] = {}
    for command, record in COMMANDS.items():
        value: Any = next((default_of(f) for f in fields(record) if f.name == head), None)
        for name in (*rest, key):
            value = getattr(value, name, MISSING)
        if value is not MISSING:
            found.setdefault(default_text(value), []).append(command)
    if len(found) <= 1:
        return ""
    return "; ".join(f"{text} in `threepo {'`, `threepo '.join(commands)}`" for text, commands in found.items())


def default_of_union(table: str) -> str:
    """The kind of a table that does not name its own."""
    (kind,) = {getattr(default_of(f), BASES[table]._by) for f in fields(config.TrainConfig) if f.name == table}
    return str(kind)


def render_table(table: str) -> list[str]:
    """One table of a recipe: its keys; for a table with kinds, the shared keys and then the keys of each kind."""
    name = f"{table}.NAME" if table in NAMED else table
    if table not in BASES:
        return render_keys(table, RECORDS[table][""], f"[{name}]")
    base, kinds = BASES[table], RECORDS[table]
    lines = render_keys(table, base, f"[{name}]")
    for kind, record in kinds.items():
        lines += render_keys(table, record, f'[{name}] with {base._by} = "{kind}"', base)
    return lines


def help_of(record: Any, key: str) -> str:
    """The text under a field, in the record or in its base."""
    texts = (
        each.__pydantic_fields__[key].description for each in record.__mro__ if hasattr(each, "__pydantic_fields__")
    )
    return " ".join(next((text for text in texts if text), "").split())


def render_keys(table: str, record: Any, title: str, base: Any = None) -> list[str]:
    """A section with the keys of a record; with a `base`, only the keys in which the record differs from it."""
    lines = [f"## {title}", "", "| key | default | meaning |", "| --- | --- | --- |"]
    hints, shared = typing.get_type_hints(record, include_extras=True), fields(base) if base else ()
    same = {f.name for f in shared if default_of(f) == getattr(record, f.name)} | {base._by if base else ""}
    listed = [f for f in fields(record) if not is_dataclass(hints[f.name]) and f.name not in same]
    for f in listed:
        items = typing.get_args(hints[f.name]) if typing.get_origin(hints[f.name]) is tuple else ()
        table_of_names = table_of(items[0] if items else hints[f.name])
        named = [f"`{name}`: {row.says}." for name, row in table_of_names.items() if isinstance(row, Named)]
        text = " ".join([help_of(record, f.name), *named])
        default = "" if base else defaults(table, f.name)
        if f.name == record._by and not base:
            hints[f.name] = typing.Annotated[str, OneOf(RECORDS[table])]
            told = {name: " ".join(each.__doc__.split()) for name, each in RECORDS[table].items()}
            text = " ".join(f"`{name}`: {words[0].lower()}{words[1:]}" for name, words in told.items())
            default = default or default_text(default_of_union(table))
        default = with_values(hints[f.name], default or default_text(default_of(f)))
        lines.append(f"| `{f.name}` | {default} | {text.replace('|', BAR)} |")
    if table == "method":
        lines += ["", "`preset` is one of the names in [method.md](method.md#3-the-lattice)."]
    return [*lines, ""] if listed else []


HEADER = "| preset | noise | draws | credit | gradient at | correction | optimizer | also sets |"
PLAIN = (
    "The others have no noise: the mean weights write all rollouts and have the gradient, with AdamW. "
    "They differ from `grpo` by:"
)
CREDIT = {"prompt": "", "draw": ", each draw on its own"}
GRADIENT = {
    "mean": "the mean",
    "generator": "each generating draw",
    "fresh": "a fresh draw",
    "evolution": "nowhere: evolution strategy",
}


def render_presets() -> list[str]:
    """Rows of the lattice: a table of the methods with noise, and a list of GRPO and its relatives."""
    noisy, plain = [HEADER, "| --- " * (HEADER.count("|") - 1) + "|"], []
    usual = cells_of("grpo")
    for name, preset in PRESETS.items():
        linked = f"[`{name}`](https://arxiv.org/abs/{preset.source})" if preset.source[0].isdigit() else f"`{name}`"
        cells = cells_of(name)
        if cells[:2] == usual[:2] and cells[3:6] == usual[3:6]:
            credit = f"credit {cells[2]}" if cells[2] != usual[2] else ""
            plain.append(f"- {linked}: {'; '.join(filter(None, [credit, cells[6]])) or 'nothing'}")
        else:
            noisy.append(f"| {' | '.join([linked, *cells])} |")
    return [*noisy, "", PLAIN, "", *plain]


def shown_plainly(value: Any) -> str:
    """A value without quotes and trailing digits."""
    return f"{value:g}" if isinstance(value, float) else shown(value).strip("'")


def cells_of(name: str) -> list[str]:
    """The cells of a row after its name, read from the recipe that the name stands for."""
    run = load(config.TrainConfig, "", ["model.path=tiny-qwen2", "data.train=sorting", f"method.preset={name}"])
    method, optimizer, noise = run.method, run.optimizer, run.noise
    sigma = "posterior" if noise.unit == "posterior" else f"{noise.size:g}" + (" RMS" if noise.unit == "rms" else "")
    if getattr(optimizer, "noise_shape", "") == "isotropic":
        sigma = "one sigma"
    low, high = method.correction.low, method.correction.high
    bounds = f" [{low:g}, {high:g}]" if method.correction.kind.endswith("mis") else f" {high:g}"
    credit = method.advantage.rule + (", unlikely first" if method.advantage.unlikeliness else "")
    besides = [
        f"{table if key == 'kind' else key} {shown_plainly(value)}"
        for table, keys in PRESETS[name].tables.items()
        for key, value in keys.items()
        if table != "noise" and key != "noise_shape"  # they have a column
    ]
    cells = [
        f"{sigma}, {' and '.join(noise.where)}" if method.draws else "none",
        f"{method.draws or 'the mean'}" + (", greedy" if method.greedy else ""),
        credit + (", over draws" if method.gradient_at == "evolution" else CREDIT[method.advantages]),
        GRADIENT[method.gradient_at],
        "none" if method.correction.kind == "none" else method.correction.kind + bounds,
        optimizer.kind,
        "; ".join(besides),
    ]
    return [cell.replace("_", " ") for cell in cells]


def with_presets() -> str:
    """The page of the methods with the current rows between its two marks."""
    before, rest = WITH_PRESETS.read_text(encoding="utf-8").split(BEGIN)
    return "\n".join([before + BEGIN, "", *render_presets(), "", END]) + rest.split(END)[1]


def render() -> str:
    """The whole page."""
    rows = ["| command | tables | unless set |", "| --- | --- | --- |"]
    order: dict[str, None] = {}
    for command, record in COMMANDS.items():
        names = [f.name for f in fields(record)]
        kind = next((default_of(f).kind for f in fields(record) if f.name == "optimizer"), "")
        unless_set = f"optimizer.kind = {kind}" if kind else ""
        rows.append(f"| `threepo {command}` | {', '.join(f'[{name}]' for name in names)} | {unless_set} |")
        for name in names:
            order |= dict.fromkeys(table for table in sorted(RECORDS) if table.partition(".")[0] == name)
    rows.append("| `threepo probe` | all of `threepo train`, [probe] | as in `threepo train` |")
    order[ProbeConfig._table] = None
    study = {f.name: f"{f.name}.NAME" if f.name in NAMED else f.name for f in fields(StudyTables)}
    rows.append(f"| `threepo study` | {', '.join(f'[{name}]' for name in study.values())} | |")
    order |= dict.fromkeys(table for table in study if table in RECORDS)
    lines = [line for table in order for line in render_table(table)]
    return INTRODUCTION + "\n".join([*rows, "", *lines]).rstrip() + "\n"


def render_command(parser: argparse.ArgumentParser, says: str, known: dict[str, str]) -> list[str]:
    """A command, with its subcommands; `known` has the commands whose arguments the page has told, by these."""
    lines = [f"## {parser.prog}", "", f"{says[:1].upper()}{says[1:]}.", ""]
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    options = [action for action in parser._actions if action not in below and action.dest != "help"]
    told = "\n".join(f"{action.option_strings} {action.dest} {action.help}" for action in options)
    if first := known.get(told):
        return [*lines, f"It has the arguments of `{first}`."]
    if options:
        known[told] = parser.prog
        lines += ["| argument | meaning |", "| --- | --- |"]
    for action in options:
        value = action.metavar or ("N" if action.type is int else "" if action.nargs == 0 else action.dest.upper())
        value = " ".join(value) if isinstance(value, tuple) else value
        name = " ".join((*action.option_strings, value)).strip()
        lines.append(f"| `{name}` | {action.help} |")
    for action in below:
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            lines += ["", *render_command(command, helps[name], known)]
    return lines


def render_command_line() -> str:
    """The page of all commands."""
    _, *lines = render_command(build_parser(), "all commands", {})
    return COMMANDS_INTRODUCTION + "\n".join(lines[lines.index("| argument | meaning |") :]).rstrip() + "\n"


def pages() -> dict[Path, str]:
    """The text of every page that has a generated part."""
    return {PAGE: render(), COMMAND_LINE: render_command_line(), WITH_PRESETS: with_presets()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
        print(path)
