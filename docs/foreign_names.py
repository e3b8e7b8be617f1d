"""Makes the files of a new release of another system, from its own configuration files:

    pip download --no-deps verl==0.9.1 && python -m docs.foreign_names verl 0.9.1 verl-0.9.1-*.whl

Lines whose names the release still has keep their meaning and get its defaults; the others go to
the file without a release in its name. New names have no meaning yet, which a test refuses: `git
diff` shows what to write. TRL is read in the same way, with the installed transformers; ROLL, which
has no package, is read from a zip archive of its repository.
"""

import ast
import csv
import dataclasses
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers
import yaml

from streamrl.config.loading.foreign_names import ForeignName, foreign_names
from streamrl.config.loading.sources import dump

FOLDER = Path(__file__).parents[1] / "streamrl/config/loading/foreign_names"
COLUMNS = [field for field in ForeignName._fields if field != "system"]
_NAME = re.compile(r"[\w.*-]*\w[.*]*")

Names = Mapping[str, str]
"""The default of each name as YAML; "" without one."""
Classes = Mapping[str, ast.ClassDef]


def verl(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield all keys of the trainers' generated files, which include all parts of a configuration;
    those of ppo_trainer come first, so its defaults count."""
    for pattern in ("ppo_trainer", "*"):
        for text in _texts(archive, f"verl/trainer/config/_generated_{pattern}.yaml"):
            yield from _leaves(yaml.safe_load(text))
    for text in _texts(archive, "verl/experimental/*/config/*.yaml"):
        tree = yaml.safe_load(text)
        yield from _leaves({k: v for k, v in tree.items() if k not in ("defaults", "hydra")})


def trl(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield the arguments of TRL's command line for GRPO, and those of its trainer."""
    classes = _classes(archive, "trl/trainer/*_config.py", "trl/scripts/utils.py")
    for name in ("GRPOConfig", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig"):
        yield from _fields(name, classes)
    for field in dataclasses.fields(transformers.TrainingArguments):
        yield field.name, "" if field.default is dataclasses.MISSING else _yaml(field.default)
    trainer = _classes(archive, "trl/trainer/grpo_trainer.py")["GRPOTrainer"]
    made = next(n for n in trainer.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    yield from ((argument.arg, "") for argument in made.args.args[1:])


def roll(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Yield the fields of the configurations of ROLL's pipelines, and of the classes in them."""
    classes = _classes(archive, "*roll/configs/*.py", "*roll/pipeline/*_config.py")
    for name in ("RLVRConfig", "AgenticConfig"):
        yield from _fields(name, classes)


READERS: Mapping[str, Callable[[zipfile.ZipFile], Iterator[tuple[str, str]]]] = {
    "verl": verl,
    "TRL": trl,
    "ROLL": roll,
}


def update(system: str, names: Names) -> tuple[list[ForeignName], list[ForeignName]]:
    """Return the lines of a release with these names, and the lines that it no longer has."""
    ours: list[ForeignName] = []
    others: list[ForeignName] = []
    for line in foreign_names(system).values():
        is_own = not _NAME.fullmatch(line.name) or any(_covers(line.name, name) for name in names)
        (ours if is_own else others).append(line._replace(default=names.get(line.name, "")))
    covered = [line.name for line in ours if _NAME.fullmatch(line.name)]
    new = [
        ForeignName(system, "New", name, "missing", "", default=default)
        for name, default in names.items()
        if not any(_covers(line, name) for line in covered)
    ]
    return [*ours, *new], others


def main(arguments: list[str]) -> None:
    system, release, path = arguments
    names: dict[str, str] = {}
    with zipfile.ZipFile(path) as archive:
        for name, default in READERS[system](archive):
            names.setdefault(name, default)
    ours, others = update(system, names)
    for file in FOLDER.glob(f"{system}-*.csv"):
        file.unlink()
    for stem, lines in ((f"{system}-{release}", ours), (system, others)):
        _write(FOLDER / f"{stem}.csv", lines)
    print(f"{system} {release}: {len(names)} names; {sum(not line.here for line in ours)} are new")


def _write(file: Path, lines: Iterable[ForeignName]) -> None:
    with file.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, COLUMNS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(line._asdict() for line in lines)


def _covers(line: str, name: str) -> bool:
    """Whether `find_foreign_name` would find this line for this name of a release."""
    pattern = line.removeprefix("*.")
    ends = [pattern, pattern.removesuffix(".*")]
    places = [*ends, *(f"*.{end}" for end in ends if "." in line)]
    return any(fnmatch(name, place) for place in places)


def _texts(archive: zipfile.ZipFile, pattern: str) -> Iterator[str]:
    for file in sorted(archive.namelist()):
        if fnmatch(file, pattern):
            yield archive.read(file).decode()


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _yaml(value)


def _yaml(value: Any) -> str:
    text = dump(value, default_flow_style=True, width=10**9).strip().removesuffix("\n...")
    return value if isinstance(value, str) else text


def _classes(archive: zipfile.ZipFile, *patterns: str) -> Classes:
    texts = (text for pattern in patterns for text in _texts(archive, pattern))
    bodies = (node for text in texts for node in ast.parse(text).body)
    return {node.name: node for node in bodies if isinstance(node, ast.ClassDef)}


def _fields(name: str, classes: Classes, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass and its bases; if a field is a dataclass, its fields come
    below its name."""
    node = classes[name]
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            kind = re.sub(r"Optional\[(.*)\]| \| None", r"\1", ast.unparse(field.annotation))
            here = f"{prefix}{field.target.id}"
            if kind in classes:
                yield from _fields(kind, classes, f"{here}.")
            else:
                yield here, _default(field.value)
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields(base.id, classes, prefix)


def _default(value: ast.expr | None) -> str:
    """Return the default in `= 3` and `= field(default=3)`, as YAML; "" if there is none."""
    if isinstance(value, ast.Call):
        value = next((word.value for word in value.keywords if word.arg == "default"), None)
    try:
        return "" if value is None else _yaml(ast.literal_eval(value))
    except ValueError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1:])
