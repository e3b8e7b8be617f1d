"""Sources of prompts: every format reads the same, several are one stream, rows become prompts."""

import csv
import datetime
import gzip
import json
import shutil
from decimal import Decimal
from pathlib import Path

import datasets
import hypothesis.strategies as st
import numpy as np
import pyarrow
import pyarrow.json
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given

from actors.prompts import open_held_out, open_prompts, open_stream
from actors.prompts.order import Epochs, FirstPrompts, Mixture
from streamrl.api import dataset_setting
from streamrl.config.data import CurriculumSettings, DataSettings
from streamrl.config.loading.load import load_config
from streamrl.config.loading.rendering import to_yaml
from streamrl.data_files import count_rows, fingerprint, open_rows
from streamrl.errors import ConfigError
from streamrl.interfaces import Prompt

ROWS = [{"prompt": f'q{i}, say "it"\n', "answer": str(i), "level": i % 3} for i in range(7)]


def write(path: Path, rows: list[dict[str, object]] = ROWS) -> str:
    """The rows in the format of the suffix; without one, as a folder of the datasets library."""
    lines = "".join(json.dumps(row, default=str) + "\n" for row in rows).encode()
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_bytes(lines)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case ".jsonl.zst":
            path.write_bytes(zstandard.compress(lines))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        case _:
            datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


def rows_of(name: str, *, count: int = 3) -> list[dict[str, object]]:
    return [{"prompt": f"{name}{i}", "answer": name} for i in range(count)]


def settings(**values: object) -> DataSettings:
    return DataSettings.model_validate(values)


def contents(prompts: object, count: int) -> list[str]:
    return [str(prompts[i].content) for i in range(count)]


@pytest.mark.parametrize("kind", ["one file", "weights", "environments"])
def test_other_rows_are_read_from_a_fresh_epoch_on(tmp_path, kind):
    """Each once in every epoch, whatever prompts of a task and of other entries lie between."""
    source = write(tmp_path / "rows.jsonl", rows_of("q", count=5))
    mixed = [{"path": source, "weight": 2}, {"path": "addition", "weight": 1}]
    data = settings(source=mixed if kind == "weights" else source)

    def stream(first: int) -> object:
        if kind != "environments":
            return open_prompts(data, 3, first=first)
        names = [{"name": n, "environment": "single_turn", "weight": ord(n)} for n in "ab"]
        given = [f"environments={json.dumps(names)}", f"data.first_prompt_index={first}"]
        settings = [*given, f"data.source={source}"]
        return open_stream(load_config("configs/quickstart.yaml", settings).config, None)

    before, after = stream(0), stream(17)
    rows = [prompt for i in range(17, 80) if (prompt := after[i]).content.startswith("q")]
    for name in {prompt.environment for prompt in rows}:
        own = [str(prompt.content) for prompt in rows if prompt.environment == name]
        assert all(len({*own[i : i + 5]}) == 5 for i in range(0, len(own) - 4, 5))
    made_up = [i for i in range(80) if not before[i].content.startswith("q")]
    assert [before[i] for i in made_up] == [after[i] for i in made_up]
    assert after[3].content.startswith("q") == before[3].content.startswith("q"), "a lost lease"


@pytest.mark.parametrize("suffix", ["*.jsonl", ".jsonl", ".csv", ".parquet", ""])
def test_rows_have_one_fingerprint_until_they_change(tmp_path, suffix):
    source = str(tmp_path / suffix) if "*" in suffix else str(tmp_path / f"rows{suffix}")
    file = tmp_path / ("a.jsonl" if "*" in suffix else f"rows{suffix}")
    found = []
    for rows in (ROWS, ROWS, ROWS[:-1], [*ROWS[:-1], ROWS[0]]):
        write(file, rows)
        found.append(fingerprint("data.source", source, subset=None, split=None))
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert found[0] == found[1]
    assert len({*found}) == 3
    assert [num_rows for num_rows, _ in found] == [7, 7, 6, 7]


TYPED = {
    "prompt": "when?",
    "answer": datetime.date(2024, 5, 1),
    "at": datetime.datetime(2024, 5, 1, 3, 4),
    "price": Decimal("18.90"),
    "name": "n\u00e9".encode(),
    "image": [{"bytes": b"GIF89a", "path": None}],
    "nested": [{"day": datetime.date(2024, 5, 2)}],
}
OF_PANDAS = """
import numpy as np

def rows():
    message = {"role": "user", "content": "1 + 1?"}
    info = {"index": np.int64(3), "tests": np.array(["assert f(1) == 2"], dtype=object)}
    return [{"prompt": np.array([message]), "answer": np.array(["2", "two"]), "extra_info": info}]
"""


@pytest.mark.parametrize("suffix", [".parquet", "", ".py", "python"])
def test_dates_decimals_and_bytes_are_what_a_json_file_has(tmp_path, suffix):
    source = str(tmp_path / f"rows{suffix}")
    if suffix == ".py":
        values = TYPED | {"answer": [TYPED["answer"], np.float64(0.00001)]}
        code = "import datetime\nfrom decimal import Decimal\nimport numpy as np\n"
        Path(source).write_text(f"{code}def rows():\n    return [{values!r}]\n")
        source += ":rows"
    elif suffix == "python":
        rows = [{**TYPED, "image": [{"bytes": "GIF89a"}]}]
        source = dataset_setting("dataset", rows, tmp_path)
    else:
        write(Path(source), [TYPED])
    template = "{{ at }} {{ price }} {{ name }} {{ nested[0].day }} {{ 0.00001 }}"
    data = settings(source=source, prompt_template=template)
    prompt = open_prompts(data, seed=0)[0]
    assert prompt.content == "2024-05-01 03:04:00 18.90 n\u00e9 2024-05-02 0.00001"
    assert prompt.answer == ('["2024-05-01", 1e-05]' if suffix == ".py" else "2024-05-01")
    assert prompt.row["image"][0]["bytes"] == ("GIF89a" if suffix == "python" else b"GIF89a")


def test_arrays_are_lists(tmp_path):
    """Pandas makes them of lists of parquet, also of messages."""
    (tmp_path / "own.py").write_text(OF_PANDAS)
    prompt = open_prompts(settings(source=str(tmp_path / "own.py:rows")), seed=0)[0]
    assert prompt.content == ({"role": "user", "content": "1 + 1?"},)
    assert prompt.answer == '["2", "two"]'
    assert prompt.row["extra_info"] == {"index": 3, "tests": ["assert f(1) == 2"]}


@pytest.mark.parametrize("is_numpy", [True, False])
def test_a_float_of_32_bits_is_the_decimal_that_was_written(tmp_path, is_numpy):
    narrow = pyarrow.float32()
    kinds = [pyarrow.large_list(narrow), pyarrow.list_(pyarrow.struct([("x", narrow)]), 1)]
    columns = [
        pyarrow.array([[0.1, None]], kinds[0]),
        pyarrow.array([[{"x": 0.7}]], kinds[1]),
        pyarrow.array([1 / 3]),
    ]
    table = pyarrow.table([pyarrow.array(["q"]), *columns], names=["prompt", "a", "b", "wide"])
    source = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(table, source)
    if is_numpy:
        row = "{'prompt': 'q', 'a': [np.float32(0.1), None], 'b': np.array([0.7], np.float32)}"
        source = str(tmp_path / "own.py")
        Path(source).write_text(f"import numpy as np\ndef rows():\n    return [{row}]\n")
        source += ":rows"
    prompt = open_prompts(settings(source=source, answer_key="a.0"), seed=0)[0]
    assert prompt.answer == "0.1"
    assert prompt.row["b"] == ([0.7] if is_numpy else [{"x": 0.7}])
    assert is_numpy or (prompt.row["a"], prompt.row["wide"]) == ([0.1, None], 1 / 3)


def test_dates_that_a_library_made_times_of_are_dates(tmp_path):
    """It does so of what it reads from JSON."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "when?", "answer": "2024-05-01"}\n')
    pyarrow.parquet.write_table(pyarrow.json.read_json(file), tmp_path / "rows.parquet")
    datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet")).save_to_disk(tmp_path / "saved")
    for name in ("rows.jsonl", "rows.parquet", "saved"):
        prompt = open_prompts(settings(source=str(tmp_path / name)), seed=0)[0]
        assert prompt.answer == prompt.row["answer"] == "2024-05-01"


def test_an_answer_that_no_text_can_hold_is_named(tmp_path):
    write(tmp_path / "rows.parquet", [{"prompt": "a", "answer": b"\xff"}])
    with pytest.raises(ConfigError, match=r"row 1 of rows.parquet: answer was .* must be text"):
        open_prompts(settings(source=str(tmp_path / "rows.parquet")), seed=0)


def test_a_cell_of_a_csv_file_has_any_length(tmp_path):
    long = "x" * 200_000
    source = write(tmp_path / "rows.csv", [{"prompt": long, "answer": "1"}])
    assert open_prompts(settings(source=source), seed=0)[0].content == long


FORMATS = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".csv", ".parquet", ""]


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_has_the_same_prompts(tmp_path, suffix):
    source = write(tmp_path / f"rows{suffix}")
    prompts = open_prompts(settings(source=source, shuffle=False), seed=0)
    assert contents(prompts, 8) == [*(row["prompt"] for row in ROWS), ROWS[0]["prompt"]]
    assert [prompts[i].answer for i in range(3)] == ["0", "1", "2"]
    assert [int(prompts[i].row["level"]) for i in range(4)] == [0, 1, 2, 0]
    assert count_rows("data.source", source) == 7
    shuffled = open_prompts(settings(source=source), seed=3)
    in_memory = open_prompts(settings(source=write(tmp_path / "other.jsonl")), seed=3)
    assert contents(shuffled, 20) == contents(in_memory, 20)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_a_compressed_file_that_ends_early_is_refused(tmp_path, suffix):
    path = Path(write(tmp_path / f"rows{suffix}"))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=rf"data.source: .*rows{suffix} cannot be decompressed"):
        open_prompts(settings(source=str(path)), seed=0)
    whole = Path(write(tmp_path / f"two{suffix}"))
    whole.write_bytes(2 * whole.read_bytes())
    assert count_rows("data.source", str(whole)) == 2 * len(ROWS)


def test_a_damaged_compressed_file_is_refused(tmp_path):
    path = Path(write(tmp_path / "rows.jsonl.gz"))
    data = bytearray(path.read_bytes())
    data[12:20] = bytes(255 - byte for byte in data[12:20])
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"data.source: .*rows.jsonl.gz cannot be decompressed"):
        count_rows("data.source", str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv"])
def test_a_file_of_windows_has_the_same_rows(tmp_path, suffix):
    """Its first bytes say that it is UTF-8, and lines end with two."""
    path = tmp_path / f"rows{suffix}"
    plain = Path(write(tmp_path / f"plain{path.suffixes[0]}", rows_of("q"))).read_bytes()
    windows = b"\xef\xbb\xbf" + plain.replace(b"\r", b"").replace(b"\n", b"\r\n")
    path.write_bytes(gzip.compress(windows) if suffix.endswith(".gz") else windows)
    prompts = open_prompts(settings(source=str(path), shuffle=False), seed=0)
    assert contents(prompts, 3) == ["q0", "q1", "q2"]
    assert count_rows("data.source", str(path)) == 3


def test_images_of_a_saved_data_set_stay_encoded(tmp_path):
    """One that is damaged costs its group, and no run."""
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("prompt", "answer")}
        | {"images": datasets.List(datasets.Image())}
    )
    rows = [{**row, "images": [{"bytes": b"no image", "path": "a.jpg"}]} for row in rows_of("q")]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    prompts = open_prompts(settings(source=str(tmp_path / "saved"), image_key="images"), seed=0)
    assert prompts[0].row["images"] == [{"bytes": b"no image", "path": "a.jpg"}]


def test_a_parquet_file_that_cannot_be_read_at_once_is_read_in_parts(tmp_path, monkeypatch):
    def refuse(_: object) -> None:
        raise pyarrow.lib.ArrowNotImplementedError("Nested data conversions not implemented")

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read", refuse)
    source = write(tmp_path / "rows.parquet", rows_of("q", count=600))
    prompts = open_prompts(settings(source=source, shuffle=False), seed=0)
    assert contents(prompts, 600) == [f"q{i}" for i in range(600)]


def test_what_the_library_datasets_refuses_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    for name, columns in (("a", "prompt,answer"), ("b", "question,answer,level")):
        (folder / f"{name}.csv").write_text(f"{columns}\n{columns}\n")
    refusals = {
        # Older ones say the first.
        f"datasets:{folder}": "the same columns|Schema at index 1 was different",
        str(folder): f"directory; other files there are datasets:{folder}",
    }
    for source, reason in refusals.items():
        with pytest.raises(
            ConfigError, match=f"(?s)^data.source: cannot read {source}: .*({reason})"
        ):
            count_rows("data.source", source, split="train")


def test_json_with_an_object_a_line_is_told_its_name(tmp_path):
    path = Path(write(tmp_path / "rows.jsonl")).rename(tmp_path / "rows.json")
    with pytest.raises(ConfigError, match=r"is not JSON: .*; with an object a line it is \.jsonl"):
        count_rows("data.source", str(path))


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path, suffix):
    path = tmp_path / f"rows{suffix}"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not JSON: maximum recursion depth"):
        list(open_rows("data.source", str(path), subset=None, split=None))


def test_a_row_is_found_by_its_place_in_its_file(tmp_path):
    for suffix, place in ((".csv", "line 4"), (".parquet", "row 2"), (".jsonl.gz", "line 2")):
        source = write(tmp_path / f"rows{suffix}")
        prompts = open_prompts(settings(source=source, shuffle=False), seed=0)
        assert prompts[1].origin == f"{place} of rows{suffix}"


def test_a_pattern_is_its_files_one_after_the_other(tmp_path):
    (tmp_path / "deep").mkdir()
    for name, place in (("b", "b.jsonl"), ("a", "a.parquet"), ("c", "deep/c.jsonl")):
        write(tmp_path / place, rows_of(name))
    one = open_prompts(settings(source=f"{tmp_path}/*.jsonl", shuffle=False), seed=0)
    assert contents(one, 4) == ["b0", "b1", "b2", "b0"]
    deep = open_prompts(settings(source=f"{tmp_path}/**/*.jsonl", shuffle=False), seed=0)
    assert contents(deep, 6) == ["b0", "b1", "b2", "c0", "c1", "c2"]
    assert count_rows("data.source", f"{tmp_path}/**/*.jsonl") == 6
    with pytest.raises(ConfigError, match=r"data.source: no file matches .*\*.csv"):
        open_prompts(settings(source=f"{tmp_path}/*.csv"), seed=0)


def test_a_list_without_weights_is_one_file(tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", rows_of(name)) for name in "ab"]
    prompts = open_prompts(settings(source=files), seed=1)
    epoch = contents(prompts, 6)
    assert sorted(epoch) == ["a0", "a1", "a2", "b0", "b1", "b2"]
    assert sorted(contents(prompts, 12)[6:]) == sorted(epoch)
    assert {prompts[i].row["data_source"] for i in range(6)} == {"a", "b"}
    with pytest.raises(ConfigError, match=r"addition has no end, .*give the sources weights"):
        open_prompts(settings(source=[files[0], "addition"]), seed=1)


def test_weights_mix_files_and_tasks_and_each_has_its_own_epochs(tmp_path):
    file = write(tmp_path / "few.jsonl", rows_of("f"))
    task = {"path": "addition", "kwargs": {"num_digits": 1}}
    data = settings(source=[{"path": file, "weight": 3, "name": "mine"}, task])
    prompts = open_prompts(data, seed=5)
    drawn = [prompts[i] for i in range(640)]
    mine = [prompt for prompt in drawn if prompt.row["data_source"] == "mine"]
    assert len(mine) == 480
    epochs = [{str(p.content) for p in mine[i : i + 3]} for i in range(0, 480, 3)]
    assert all(epoch == {"f0", "f1", "f2"} for epoch in epochs)
    others = [p for p in drawn if p.row["data_source"] == "addition"]
    alone = open_prompts(settings(source="addition", source_kwargs={"num_digits": 1}), seed=5)
    assert [p.content for p in others] == contents(alone, 160)
    again = open_prompts(data, seed=5)
    assert [again[i].content for i in (600, 3, 77)] == [drawn[i].content for i in (600, 3, 77)]


weights = st.lists(st.floats(0.5, 20), min_size=1, max_size=5)


@given(weights=weights, seed=st.integers(0, 2**31), data=st.data())
def test_a_mixture_is_a_pure_function_without_gaps(weights, seed, data):
    mixture = Mixture.of_sources(weights, seed)
    size = 3 * mixture.block_size
    places = [mixture.place(i) for i in range(size)]
    for stream in range(len(weights)):
        own = sorted(index for which, index in places if which == stream)
        assert own == list(range(len(own)))
    for num_blocks in (1, 2, 3):
        so_far = places[: num_blocks * mixture.block_size]
        for stream, weight in enumerate(weights):
            share = weight / sum(weights) * len(so_far)
            assert abs(sum(which == stream for which, _ in so_far) - share) <= 1 + 1e-6
    chosen = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    fresh = Mixture.of_sources(weights, seed)
    assert [fresh.place(i) for i in chosen] == [places[i] for i in chosen]


class Difficulties:
    """Prompts whose row has their number as difficulty."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> Prompt:
        return Prompt(str(number), "", {"of": {"difficulty": -number}})

    def __iter__(self):
        return map(self.__getitem__, range(self._size))


@given(
    size=st.integers(1, 60),
    seed=st.none() | st.integers(0, 99),
    window=st.floats(0, 1),
    keeps=st.booleans(),
    data=st.data(),
)
def test_every_epoch_of_a_curriculum_has_each_row_once(size, seed, window, keeps, data):
    curriculum = CurriculumSettings(column="of.difficulty", window=window, num_epochs=2)
    kept = np.arange(0, size, 2) if keeps else None
    chosen = list(range(size)) if kept is None else kept.tolist()
    prompts = Difficulties(size)
    parts = None if seed is None else (seed,)
    stream = Epochs(prompts, parts, curriculum, kept)
    numbers = [int(str(stream[i].content)) for i in range(3 * len(chosen))]
    epochs = [numbers[i * len(chosen) : (i + 1) * len(chosen)] for i in range(3)]
    assert all(sorted(epoch) == chosen for epoch in epochs)
    for epoch in epochs[:2]:
        # From the hardest number to the easiest, each moved by the window at most.
        moves = [abs(epoch.index(n) - (len(chosen) - 1 - chosen.index(n))) for n in chosen]
        assert max(moves) <= window * len(chosen) + 1
    if window == 0:
        assert epochs[0] == chosen[::-1]
    if seed is None:
        assert epochs[2] == chosen
    again = Epochs(prompts, parts, curriculum, kept)
    for index in data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=5)):
        assert again[index].content == str(numbers[index])


def test_a_curriculum_needs_a_number_in_every_row(tmp_path):
    source = write(tmp_path / "rows.jsonl", [*rows_of("a"), {**rows_of("b")[0], "level": "hard"}])
    data = settings(source=source, curriculum={"column": "level"})
    with pytest.raises(ConfigError, match=r"column: line 1 of rows.jsonl has level None"):
        open_prompts(data, seed=0)
    write(tmp_path / "rows.jsonl", [{**rows_of("a")[0], "level": 10**400}])
    with pytest.raises(ConfigError, match=r"column: line 1 of rows.jsonl has level 1000"):
        open_prompts(data, seed=0)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


def test_the_rows_of_verl_are_read_as_they_are(tmp_path):
    source = write(tmp_path / "train.parquet", [VERL])
    prompt = open_prompts(settings(source=source, answer_key="reward_model.ground_truth"), 0)[0]
    assert prompt.content == ({"role": "user", "content": "1+1?"},)
    assert prompt.answer == "2"
    assert prompt.row["data_source"] == "openai/gsm8k"
    assert prompt.row["extra_info"] == {"split": "train", "index": 0}
    with pytest.raises(ConfigError, match=r"'answer'; did you mean 'reward_model.ground_truth'"):
        open_prompts(settings(source=source), 0)


def test_the_rows_of_trl_are_read_as_they_are(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": messages, "solution": "$2$"}, {"prompt": messages[1:], "solution": "$3$"}]
    source = write(tmp_path / "conversations", rows)
    prompts = open_prompts(settings(source=source, answer_key=None, shuffle=False), 0)
    assert prompts[0].content == tuple(messages)
    assert (prompts[1].answer, prompts[1].row["solution"]) == ("", "$3$")


def test_messages_keep_what_else_a_template_knows(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "name": "f"},
    ]
    for suffix in (".jsonl", ".parquet"):
        source = write(tmp_path / f"rows{suffix}", [{"prompt": messages, "answer": "a"}])
        assert open_prompts(settings(source=source), 0)[0].content == tuple(messages)


def test_a_template_makes_the_prompt_from_columns(tmp_path):
    rows = [{"question": "2+2?", "choices": ["3", "4"], "answer": 4}]
    source = write(tmp_path / "rows.jsonl", rows)
    text = "{{ question }} One of {{ choices | join(', ') }}.\n"
    prompt = open_prompts(settings(source=source, prompt_template=text), 0)[0]
    assert (prompt.content, prompt.answer) == ("2+2? One of 3, 4.\n", "4")
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": text}]
    prompt = open_prompts(settings(source=source, prompt_template=messages), 0)[0]
    assert prompt.content == (messages[0], {"role": "user", "content": "2+2? One of 3, 4.\n"})
    with pytest.raises(ConfigError, match=r"render line 1 of rows.jsonl: 'querstion' is undefined"):
        open_prompts(settings(source=source, prompt_template="{{ querstion }}"), 0)
    with pytest.raises(ConfigError, match=r"prompt_template: it cannot render .*IndexError"):
        open_prompts(settings(source=source, prompt_template="{{ '{} {}'.format(1) }}"), 0)
    with pytest.raises(ConfigError, match=r"prompt_template: it cannot render .*unexpected"):
        open_prompts(settings(source=source, prompt_template="{{ question "), 0)
    with pytest.raises(ConfigError, match="unsafe"):
        open_prompts(settings(source=source, prompt_template="{{ ''.__class__.__mro__ }}"), 0)


def test_an_entry_of_a_list_has_its_own_columns(tmp_path):
    other = write(tmp_path / "other.csv", [{"q": "1+1", "solution": "2"}])
    entry = {"path": other, "prompt_key": "q", "answer_key": "solution", "name": "sums"}
    data = settings(source=[write(tmp_path / "a.jsonl", rows_of("a")), entry], shuffle=False)
    prompt = open_prompts(data, 0)[3]
    assert (prompt.content, prompt.answer, prompt.row["data_source"]) == ("1+1", "2", "sums")


def test_each_held_out_source_has_its_share_and_its_name(tmp_path):
    entries = [
        write(tmp_path / "long.jsonl", rows_of("l", count=9)),
        {"path": write(tmp_path / "short.csv", rows_of("s", count=2)), "name": "brief"},
        "copy",
    ]
    data = settings(source="addition", eval_source=entries, num_eval_prompts=4)
    held_out = open_held_out(data)
    assert len(held_out) == 4 + 2 + 4
    names = [held_out[i].row["data_source"] for i in range(10)]
    assert names == ["long"] * 4 + ["brief"] * 2 + ["copy"] * 4
    assert contents(held_out, 6) == ["l0", "l1", "l2", "l3", "s0", "s1"]


class Numbered:
    def __getitem__(self, prompt_index: int) -> Prompt:
        return Prompt(str(prompt_index), "")


def test_the_first_prompts_of_a_stream_are_a_set():
    first = FirstPrompts(Numbered(), 3)
    assert [prompt.content for prompt in first] == ["0", "1", "2"]
    assert len(first) == 3


OWN = """
from streamrl.interfaces import Prompt

class Rows:
    def __init__(self, size=3):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, number):
        if number >= self.size:
            raise IndexError(number)
        return {"prompt": f"own {number}", "answer": number}

class Prompts(Rows):
    def __getitem__(self, number):
        return Prompt(f"made {number}", "x")

def loaded(seed, **kwargs):
    import datasets
    return datasets.Dataset.from_list([{"prompt": str(seed), "answer": "a"}])

class Wordless(Rows):
    def __getitem__(self, number):
        return {"prompt": "q"}
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [("Rows", {"own 0", "own 1", "own 2"}), ("Prompts", {"made 0", "made 1", "made 2"})],
)
def test_a_data_set_of_the_users_own_has_epochs(tmp_path, name, content):
    (tmp_path / "own.py").write_text(OWN)
    prompts = open_prompts(settings(source=f"{tmp_path}/own.py:{name}"), seed=2)
    assert set(contents(prompts, 3)) == set(contents(prompts, 9)[6:]) == content
    assert len({tuple(contents(prompts, 9)[i : i + 3]) for i in (0, 3, 6)}) > 1


def test_a_data_set_of_the_users_own_may_be_the_librarys(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    assert open_prompts(settings(source=f"{tmp_path}/own.py:loaded"), seed=2)[1].content == "2"
    with pytest.raises(ConfigError, match="no column 'answer'"):
        open_prompts(settings(source=f"{tmp_path}/own.py:Wordless"), seed=2)
    data = settings(source=f"{tmp_path}/own.py:Rows", source_kwargs={"size": 0})
    with pytest.raises(ConfigError, match="holds no rows"):
        open_prompts(data, seed=2)


def test_a_folder_with_splits_needs_one_named(tmp_path):
    splits = {name: datasets.Dataset.from_list(rows_of(name)) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    path = str(tmp_path / "both")
    with pytest.raises(ConfigError, match="has several splits; set split to one of train, test"):
        open_prompts(settings(source=path), 0)
    with pytest.raises(ConfigError, match="has no split 'tset'"):
        open_prompts(settings(source=[{"path": path, "split": "tset"}]), 0)
    prompts = open_prompts(settings(source={"path": path, "split": "test"}, shuffle=False), 0)
    assert contents(prompts, 2) == ["test0", "test1"]
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match=r"cannot read .*plain: Directory .* neither"):
        open_prompts(settings(source=str(tmp_path / "plain")), 0)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("source=[]", "data.source: is an empty list; name at least one source"),
        ("source=[{path: a, wieght: 1}]", "data.source.0.wieght: unknown key; did you mean 'weigh"),
        ("source=[{path: a, weight: 0}]", "data.source.0.weight: was 0; input should be greater"),
        ("source={weight: 1}", "data.source.0.path: is required and was not given"),
        ("source=3", "data.source: was 3; input should be a valid string"),
        ("prompt_template=[{role: user}]", "data.prompt_template.0.content: is required"),
        ("curriculum={window: 2}", "data.curriculum.window: was 2; input should be less than"),
    ],
)
def test_a_source_that_cannot_be_is_refused_by_name(override, sentence):
    with pytest.raises(ConfigError) as caught:
        load_config("configs/quickstart.yaml", ["data.source_kwargs={}", f"data.{override}"], {})
    assert sentence in str(caught.value)


def test_a_list_of_sources_is_read_back_as_it_was_resolved(tmp_path):
    override = "data.source=[a.jsonl, {path: addition, weight: 2, kwargs: {num_digits: 1}}]"
    overrides = ["data.source_kwargs={}", override]
    config = load_config("configs/quickstart.yaml", overrides, {}).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "config.yaml", (), {}).config == config


def test_arguments_of_a_list_stand_in_its_entries():
    with pytest.raises(ValueError, match="source_kwargs: has no effect on a list"):
        settings(source=["addition"], source_kwargs={"num_digits": 1})


@pytest.mark.parametrize(
    ("answer", "written"),
    [(0.00001, "0.00001"), (2.5, "2.5"), (1e16, "10000000000000000"), (-3, "-3")],
)
def test_a_number_is_written_without_an_exponent(tmp_path: Path, answer: float, written: str):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "q", "answer": answer}))
    assert open_prompts(settings(source=str(file)), 0)[0].answer == written


def call(arguments: object, **more: object) -> dict[str, object]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", **more, "tool_calls": [{"type": "function", "function": function}]}


CONVERSATIONS = [
    [
        {"role": "user", "content": "a"},
        call({"x": 1, "at": {"y": 2}}),
        {"role": "tool", "content": "b"},
    ],
    [{"role": "user", "content": "c"}, call({"z": [1, 2]}, content="so")],
    [{"role": "user", "content": [{"type": "text", "text": "d"}]}],
]
READ = [
    (
        {"role": "user", "content": "a"},
        call({"x": 1, "at": {"y": 2}}, content=""),
        {"role": "tool", "content": "b"},
    ),
    ({"role": "user", "content": "c"}, call({"z": [1, 2]}, content="so")),
    ({"role": "user", "content": "d"},),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "folder"])
def test_the_same_conversations_are_the_same_prompts_in_every_format(tmp_path: Path, name: str):
    # Columns of Arrow have one type, so the one whose content is a list of parts stands alone.
    for number, conversations in enumerate((CONVERSATIONS[:2], CONVERSATIONS[2:])):
        rows = [{"prompt": messages, "answer": "1"} for messages in conversations]
        (tmp_path / str(number)).mkdir()
        source = write(tmp_path / str(number) / name, rows)
        prompts = open_prompts(settings(source=source, shuffle=False), 0)
        assert [prompts[i].content for i in range(len(rows))] == READ[2 * number :][: len(rows)]


def test_arguments_as_text_are_those_of_a_mapping(tmp_path: Path):
    messages = [CONVERSATIONS[0][0], call('{"x": 1, "at": null}', content=None)]
    source = write(tmp_path / "a.jsonl", [{"prompt": messages, "answer": "1"}])
    prompt = open_prompts(settings(source=source), 0)[0]
    assert prompt.content[1] == call({"x": 1, "at": None}, content="")
