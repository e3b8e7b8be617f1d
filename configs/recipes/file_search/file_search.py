"""Questions that take two look-ups in files: one file says which parcel a person waits for,
another one in which locker the parcel lies.

Question, answer and files are a pure function of the seed that `data.source: environment` gives.
"""

from dataclasses import replace

import numpy as np

from actors.rewards.answers import answered_number
from actors.tools import ToolError
from actors.tools.toolset import ToolEnvironment, Toolset
from streamrl.config.generator import CallLimits
from streamrl.interfaces import Prompt

FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jon", "Kara", "Leo")
LAST = ("Abel", "Berg", "Cole", "Dorn", "Eck", "Frey", "Graf", "Holm", "Ihle", "Jahn", "Kern")
NAMES = [f"{first} {last}" for first in FIRST for last in LAST]
LINES_OF_A_FILE = 8
MAX_HITS = 20


class FileSearch:
    """The environment `tools` with separate files for each episode.

    The reward of the last turn is 1 if its last number is the answer, otherwise 0.
    """

    def __init__(self, num_people=24):
        if not 2 <= num_people <= len(NAMES):
            raise ValueError(f"num_people was {num_people}; 2 to {len(NAMES)}")
        self.num_people = num_people

    async def start(self, context):
        seed = int(context.prompt.row.get("seed", context.seed))
        question, self.answer, files = ask(seed, self.num_people)
        self.context, self.tools = context, ToolEnvironment(Toolset((FileTools(files),)))
        prompt = Prompt(question, str(self.answer), context.prompt.row)
        return await self.tools.start(replace(context, prompt=prompt))

    async def step(self, completion):
        transition = await self.tools.step(completion)
        if not transition.done:
            return transition
        message = self.context.renderer.parse(completion.token_ids.tolist())
        is_right = float(answered_number(str(message.get("content") or "")) == self.answer)
        metrics = {**transition.metrics, "success": is_right}
        return replace(transition, reward=is_right, metrics=metrics)

    async def close(self):
        if hasattr(self, "tools"):
            await self.tools.close()


def schema(name, description, argument, meaning):
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


class FileTools:
    """`search` and `read` over `files`, which maps a name to lines of text."""

    schemas = (
        schema("search", "Finds lines in all files.", "text", "What a line has to contain."),
        schema("read", "Shows a whole file.", "file", "Its name, as search shows it."),
    )
    limits = CallLimits()

    def __init__(self, files):
        self.files = files

    async def open(self):
        return self

    async def call(self, name, arguments):
        (argument,) = self.schemas[name == "read"]["function"]["parameters"]["required"]
        value = arguments.get(argument)
        if not isinstance(value, str) or len(arguments) > 1:
            raise ToolError(f'the one argument is "{argument}", a text')
        return self.read(value) if name == "read" else self.search(value)

    async def close(self):
        """There is nothing to close."""

    def search(self, text):
        hits = [
            f"{file}: {line}"
            for file, lines in self.files.items()
            for line in lines
            if text.lower() in line.lower()
        ]
        rest = f"\n({len(hits) - MAX_HITS} more)" if len(hits) > MAX_HITS else ""
        return "\n".join(hits[:MAX_HITS]) + rest if hits else "no line contains it"

    def read(self, file):
        if file not in self.files:
            raise ToolError(f"there is no file {file!r}")
        return "\n".join(self.files[file])


def ask(seed, num_people):
    """Return the question, its answer, and the files."""
    rng = np.random.default_rng(seed)
    people = [NAMES[i] for i in rng.permutation(len(NAMES))[:num_people]]
    parcels = [int(n) for n in rng.permutation(9000)[:num_people] + 1000]
    lockers = [int(n) for n in rng.permutation(900)[:num_people] + 100]
    waits = [f"{who} waits for parcel {n}." for who, n in zip(people, parcels, strict=True)]
    lies = [f"Parcel {n} lies in locker {m}." for n, m in zip(parcels, lockers, strict=True)]
    shuffled = [lies[i] for i in rng.permutation(num_people)]
    asked = int(rng.integers(num_people))
    question = (
        f"In which locker lies the parcel that {people[asked]} waits for? Search the files, then "
        "answer with the number of the locker."
    )
    files = {**in_files("people", waits), **in_files("parcels", shuffled)}
    return question, lockers[asked], files


def in_files(name, lines):
    starts = range(0, len(lines), LINES_OF_A_FILE)
    parts = (tuple(lines[i : i + LINES_OF_A_FILE]) for i in starts)
    return {f"{name}-{number}.txt": part for number, part in enumerate(parts, 1)}
