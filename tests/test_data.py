"""Datasets: stable samples in a fixed order, references, verdicts, and errors that name key, value and line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from shared import shared

from pipeline.data.arithmetic import LEVELS, ArithmeticDataset, make_problems
from pipeline.data.base import Dataset, Sample, Verdict
from pipeline.data.gsm8k import Gsm8k
from pipeline.data.jsonl import Jsonl
from pipeline.errors import UserError

GOOD = b'{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "2 + 2?", "answer": "#### 4"}\n'
SHUFFLED = ["8", "10", "2", "9", "6", "17"]  # seed 1: must never change


def write(folder: Path, data: bytes | str) -> str:
    path = folder / "set.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


def rows(folder: Path, *objects: object) -> str:
    return write(folder, "".join(json.dumps(row) + "\n" for row in objects))


@dataclass
class Listed(Dataset):
    name: str = "listed"
    ids: list[str] = field(default_factory=lambda: [str(i) for i in range(20)])

    def load(self) -> list[Sample]:
        return [Sample(i, ({"role": "user", "content": i},), i) for i in self.ids]


# every dataset


def test_a_limit_takes_the_first_and_may_exceed_the_set() -> None:
    assert [sample.id for sample in Listed(limit=3).samples()] == ["0", "1", "2"]
    assert len(Listed(limit=10**9).samples()) == 20


def test_a_shuffle_seed_fixes_the_order() -> None:
    order = [sample.id for sample in Listed(shuffle_seed=1).samples()]
    assert order == [sample.id for sample in Listed(shuffle_seed=1).samples()]
    assert order[:6] == SHUFFLED and sorted(order, key=int) == [sample.id for sample in Listed().samples()]
    assert order != [sample.id for sample in Listed(shuffle_seed=2).samples()]
    assert [sample.id for sample in Listed(shuffle_seed=1, limit=4).samples()] == order[:4]


@pytest.mark.parametrize(("option", "value"), [("limit", 0), ("limit", -1), ("gen_length", 0), ("block_size", 0)])
def test_options_out_of_range_are_refused(option: str, value: int) -> None:
    with pytest.raises(UserError, match=rf"dataset\.{option}={value} .* at least 1"):
        Listed(**{option: value}).samples()


def test_an_empty_set_a_repeated_id_and_an_empty_stop_are_refused() -> None:
    with pytest.raises(UserError, match="dataset=listed has no samples"):
        Listed(ids=[]).samples()
    with pytest.raises(UserError, match="the id 'a' 2 times"):
        Listed(ids=["a", "b", "a"]).samples()
    with pytest.raises(UserError, match=r"dataset\.stop"):
        Listed(stop=[""]).samples()


def test_verdicts() -> None:
    known, unknown = Sample("a", (), " 1,234"), Sample("b", (), None)
    score = Listed().score
    assert score(known, "so $1,234.00.") == Verdict("1234", True, None)
    assert score(known, "#### -1234") == Verdict("-1234", False, "wrong")
    assert score(known, "no idea") == Verdict(None, False, "no_answer")
    assert score(unknown, "#### 5") == Verdict("5", None, None)
    assert score(unknown, "") == Verdict(None, None, "no_answer")
    assert score(Sample("c", (), "0"), "-0") == Verdict("0", True, None)


def test_a_protocol_is_plain_json_without_paths(tmp_path: Path) -> None:
    path = rows(tmp_path, {"question": "1?", "answer": 1})
    for dataset in (ArithmeticDataset(), Gsm8k(path=path), Jsonl(path=path, stop=["\n\n"])):
        text = json.dumps(dataset.protocol)
        assert str(tmp_path) not in text
        assert {"template", "shots", "gen_length", "stop", "extraction"} <= json.loads(text).keys()
        assert "block_size" not in text


# arithmetic


@pytest.mark.parametrize("level", LEVELS)
def test_train_and_test_share_no_problem(level: int) -> None:
    train, test = (make_problems(split, level, 2000, seed=3) for split in ("train", "test"))
    assert not {p.operations for p in train} & {p.operations for p in test}
    assert not {p.question for p in train} & {p.question for p in test}


def test_arithmetic_samples_have_stable_ids_and_a_bare_question() -> None:
    dataset = ArithmeticDataset()
    samples = dataset.samples()
    assert len(samples) == 500 and samples[17].id == "arithmetic-test-4-17"
    assert samples == ArithmeticDataset(size=600).samples()[:500]
    problem = make_problems("test", 4, 500)[17]
    assert samples[17].messages == ({"role": "user", "content": problem.question},)
    assert samples[17].gold == str(problem.gold)
    assert dataset.score(samples[17], problem.answer) == Verdict(str(problem.gold), True, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"level": 5}, r"dataset\.level=5 .* 1, 2, 3, 4"),
        ({"split": "dev"}, r"dataset\.split=dev .* train, test"),
        ({"size": 0}, r"dataset\.size=0"),
        ({"size": 10**9}, r"dataset\.size=1000000000"),
        ({"path": "x.jsonl"}, r"dataset\.path=x\.jsonl is not used"),
    ],
)
def test_arithmetic_refuses_what_does_not_exist(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ArithmeticDataset(**options).samples()


def test_importing_arithmetic_is_light() -> None:
    code = "import sys, pipeline.data.arithmetic; print({'torch', 'datasets', 'hydra', 'pandas'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# files


@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        b"\xef\xbb\xbf" + GOOD,
        GOOD.replace(b"\n", b"\r\n"),
        GOOD.removesuffix(b"\n"),
        b"\n" + GOOD.replace(b"}\n", b"}\n \n") + b"\n\n",
    ],
    ids=["plain", "byte order mark", "CRLF", "no last newline", "blank lines"],
)
@pytest.mark.parametrize("kind", [Gsm8k, Jsonl])
def test_ordinary_files_are_read(kind: type[Dataset], data: bytes, tmp_path: Path) -> None:
    samples = kind(path=write(tmp_path, data)).samples()
    assert [sample.gold for sample in samples] == ["2", "4"]
    assert [sample.id[-2:] for sample in samples] == ["-0", "-1"]
    assert samples[1].messages[0]["content"].startswith("2 + 2?")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"\n \r\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (GOOD + b'{"question": "3', "line 3 is not valid JSON"),
        (b"\n" + GOOD[:20] + b"\n" + GOOD, "line 2 is not valid JSON"),
        (GOOD + b'{"question": "3", "answer": NaN}', "line 3 is not valid JSON .*NaN"),
        (GOOD + b"[" * 100_000, "line 3 is not valid JSON"),
        (GOOD + b"[1, 2]", r"line 3 holds \[1, 2\]: it must be a JSON object"),
        (GOOD + b'{"question": "\xff", "answer": "1"}', "line 3 is not UTF-8"),
        (GOOD + b'{"question": "\\ud83d", "answer": "1"}', "line 3 holds half of a surrogate pair"),
        (GOOD + b'{"Question": "3?", "answer": "1"}', "line 3 has no field 'question' .* 'Question', 'answer'"),
        (GOOD + b'{"question": " ", "answer": "1"}', "line 3 has .* in field 'question'"),
        (GOOD + b'{"question": ["3?"], "answer": "1"}', "line 3 has .*3.* in field 'question'"),
        (GOOD + b'{"question": "3?", "answer": "many"}', "line 3 has"),
    ],
)
@pytest.mark.parametrize("kind", [Gsm8k, Jsonl])
def test_a_broken_file_is_refused_by_name_and_line(
    kind: type[Dataset], data: bytes, words: str, tmp_path: Path
) -> None:
    path = write(tmp_path, data)
    with pytest.raises(UserError, match=words) as caught:
        kind(path=path).samples()
    assert str(caught.value).startswith(f"dataset.path={path}") and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Gsm8k, Jsonl])
def test_an_absent_file_and_a_folder_are_refused_by_name(kind: type[Dataset], tmp_path: Path) -> None:
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read") as caught:
            kind(path=str(path)).samples()
        assert f"dataset.path={path}" in str(caught.value)


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    [sample] = Jsonl(path=write(tmp_path, '{"question": "a\u2028b", "answer": 1}')).samples()
    assert sample.messages[0]["content"] == "a\u2028b"


# gsm8k


def test_gsm8k_reads_the_published_file() -> None:
    dataset = Gsm8k(path=str(shared("data", "gsm8k", "test.jsonl")), limit=50)
    samples = dataset.samples()
    assert len(samples) == 50 and samples[17].id == "gsm8k-test-17" and samples[0].gold == "18"
    [message] = samples[0].messages
    assert (
        message["role"] == "user" and message["content"].startswith("Janet") and "#### <number>" in message["content"]
    )
    assert dataset.score(samples[0], "She makes $<<9*2=18>>18.\n#### 18").correct


def test_gsm8k_train_and_test_are_disjoint() -> None:
    train, test = (
        {
            sample.messages[0]["content"]
            for sample in Gsm8k(path=str(shared("data", "gsm8k", f"{split}.jsonl"))).samples()
        }
        for split in ("train", "test")
    )
    assert len(train) > 7000 and len(test) > 1300 and not train & test


def test_gsm8k_refuses_an_answer_without_marker_and_an_unknown_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 1 has an answer that does not end with '#### <number>'"):
        Gsm8k(path=rows(tmp_path, {"question": "1?", "answer": "1"})).samples()
    with pytest.raises(UserError, match=r"dataset\.split=dev does not exist: use one of test, train"):
        Gsm8k(split="dev").samples()


def test_gsm8k_without_hub_or_cache_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def offline(*_: object, **__: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError, match=r"dataset=gsm8k .* hub .*ConnectionError.* set dataset\.path= to a JSONL file"):
        Gsm8k().samples()


def test_gsm8k_rows_of_the_hub_become_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[object] = []

    def load(*names: str, **options: str) -> list[dict[str, str]]:
        asked.append((names, options))
        return [{"question": "1 + 1?", "answer": "1+1=2\n#### 2"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert Gsm8k().samples()[0].gold == "2"
    assert asked == [(("openai/gsm8k", "main"), {"split": "test", "revision": Gsm8k().revision})]


# jsonl


def test_jsonl_fields_ids_and_template_are_options(tmp_path: Path) -> None:
    path = rows(
        tmp_path, {"key": 7, "q": "Is {this} it?", "a": 1.25}, {"key": "b", "q": "And {question}?", "a": "= $1,000"}
    )
    options = {"question_field": "q", "answer_field": "a", "id_field": "key", "prompt_template": "Q: {question}\nA:"}
    first, second = Jsonl(path=path, **options).samples()
    assert (first.id, second.id, first.gold, second.gold) == ("7", "b", "1.25", "= $1,000")
    assert first.messages == ({"role": "user", "content": "Q: Is {this} it?\nA:"},)
    assert second.messages[0]["content"] == "Q: And {question}?\nA:"


def test_jsonl_answers_may_be_absent(tmp_path: Path) -> None:
    dataset = Jsonl(path=rows(tmp_path, {"question": "1?"}, {"question": "2?", "answer": None}))
    for sample in dataset.samples():
        assert sample.gold is None and dataset.score(sample, "#### 1").correct is None


def test_jsonl_compares_texts_exactly(tmp_path: Path) -> None:
    dataset = Jsonl(path=rows(tmp_path, {"question": "Capital of France?", "answer": " Paris"}), match="text")
    [sample] = dataset.samples()
    assert dataset.score(sample, "Paris\n") == Verdict("Paris", True, None)
    assert dataset.score(sample, "paris") == Verdict("paris", False, "wrong")
    assert dataset.score(sample, " \n") == Verdict(None, False, "no_answer")
    assert dataset.scorer == "text-1" and dataset.protocol["extraction"] == "text"
    assert Jsonl(path="x").scorer == "numbers-1"


def test_jsonl_takes_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    [sample] = Jsonl(path=rows(tmp_path, {"messages": chat, "answer": "2"}), prompt_template="> {question}").samples()
    assert sample.messages == tuple(chat) and sample.gold == "2"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "not a chat"),
        ("hello", "not a chat"),
        ([{"role": "user"}], "not a chat"),
        ([{"role": ["user"], "content": "1?"}], "not a chat"),
        ([{"role": "tool", "content": "1?"}], "not a chat.*system, user, assistant"),
        ([{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}], "end with role 'assistant'"),
    ],
)
def test_jsonl_refuses_what_is_not_a_chat(messages: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"line 1 has 'messages' .*{words}"):
        Jsonl(path=rows(tmp_path, {"messages": messages})).samples()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, r"dataset\.path= is not set"),
        ({"match": "fuzzy"}, r"dataset\.match=fuzzy .* number, text"),
        ({"prompt_template": "{quetsion}"}, r"dataset\.prompt_template='{quetsion}' .* {question}"),
        ({"answer_field": "question"}, r"line 1 has '1 or 2\?' in field 'question' .* dataset\.match=text"),
        ({"id_field": "id"}, r"line 2 repeats the id 'a' of line 1"),
        ({"id_field": "key"}, r"line 1 has no field 'key' \(dataset\.id_field\)"),
    ],
)
def test_jsonl_refuses_wrong_options(options: dict, words: str, tmp_path: Path) -> None:
    path = rows(tmp_path, {"id": "a", "question": "1 or 2?", "answer": 1}, {"id": "a", "question": "2?", "answer": 2})
    with pytest.raises(UserError, match=words):
        Jsonl(**{"path": path, **options}).samples()


# conf/dataset


@pytest.mark.parametrize("kind", ["arithmetic", "gsm8k", "jsonl"])
def test_the_yaml_of_a_dataset_lists_its_options(kind: str) -> None:
    from hydra.utils import get_class
    from omegaconf import OmegaConf

    options = OmegaConf.load(Path(__file__).parents[1] / "conf" / "dataset" / f"{kind}.yaml")
    schema = OmegaConf.structured(get_class(options.pop("_target_")))
    assert set(options) == set(schema) and options.name == kind
    if kind == "jsonl":
        assert OmegaConf.is_missing(options, "path")
        options.path = None
    changed = {name for name in schema if options[name] != schema[name]}
    assert changed <= {"arithmetic": {"limit"}, "gsm8k": {"block_size"}, "jsonl": set()}[kind]


def test_a_dataset_says_what_it_takes_from_the_hub() -> None:
    found = Gsm8k(revision="abc").source()
    assert found and (found.hub, found.revision, "main/*" in found.patterns) == ("openai/gsm8k", "abc", True)
    assert Gsm8k(path="x.jsonl").source() is None and ArithmeticDataset().source() is None
