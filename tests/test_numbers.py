"""Numbers in answers: every value of GSM-01, GSM-02 and GSM-05, and what real models write."""

from __future__ import annotations

import json
import re
import time
from decimal import Decimal

import pytest
from shared import shared

from pipeline.scoring.numbers import SCORER, extract_number, number_text, parse_number, same_number

SIGNS = {  # GSM-01
    "#### -7": "-7",
    "#### \u22127": "-7",
    "#### +7": "7",
    "It ends at \u22127 degrees.": "-7",
    "He is at -$50.": "-50",
    "He is at $-50.": "-50",
    "It takes 30-40 minutes.": "40",
}
CURRENCY = {  # GSM-02
    "She owes $18.00.": "18",
    "So the bill is $1,250.": "1250",
    "####72": "72",
    "#### $72": "72",
    "#### 72.": "72",
    "#### 72 stamps": "72",
    "#### 1,234": "1234",
    "The share is 15%.": "15",
    "007": "7",
    "1.5e3": "1500",
}
THIS_QUESTION = {  # GSM-05
    "9 + 33 = 42\n#### 42\n\nQuestion: A cart holds 9 pears. How many in 3?\nAnswer: 27\n#### 27": "42",
    "so 42.\n\nQuestion: next one has 9": "42",
    r"\boxed{84}. Check it again: \boxed{84}": "84",
    r"\boxed{3} no, \boxed{5}": "5",
}
KINDS = {  # the same faults in other clothes
    "It takes $30-$40.": "40",
    "#### 30-40": "40",
    "30\u201340 minutes": "40",
    "He lost 16 - 7": "7",
    "- 7 apples": "7",
    "x = - 7": "-7",
    "-50 €": "-50",
    r"\boxed{-\$50}": "-50",
    "$1{,}234.50$": "1234.5",
    "1\u202f234 km": "1234",
    "\uff11\uff12\uff13": "123",
    "about 2 \u00d7 10^3": "2000",
    "-.5": "-0.5",
    r"\boxed{2\frac{1}{2}}": "2.5",
    "so 3/4": "0.75",
    "The area is 42 m^2.": "42",
    r"\boxed{18 \text{ m}^2}": "18",
    "It emits 42 g of CO2": "42",
    "covid-19": "19",
    "Therefore 18.\n3. Done": "18",
    "#### 1. Count\n2 and 3\n#### 2. Add\n#### 72": "72",
    "#### 5 + 3 = 8": "8",
    "#### **72**": "72",
    "#### 42Question: 9 + 9 = 18": "42",
    "#### 42\n\nTom has 9 pears.\n#### 27": "42",
    "Let me see.\n\nQuestion: how many?\nAnswer: 27": "27",
    "#### 42\r\n\r\nQuestion: 9": "42",
    "First some words.\n\n#### 42": "42",
}
LLADA = {  # endings that LLaDA-8B-Instruct really wrote
    "<answer>\n\\boxed{18}<|eot_id|><|endoftext|><|reserved_special_token_7|>": "18",
    "<answer>\nboxed{27}\n</answer>": "27",
    "<answer>\n\\.boxed{18}\n</answer>": "18",
    "<answer>\n\\boxed{78\n</answer>": "78",
    "<answer>\n\\boxed{63\\text{ minutes>": "63",
    "total is 940.\n<answer>\n\\boxed{...}\n</answer>": "940",
    "Jerry will be \\boxed{13} years old in 3 years.": "13",
    "\\boxed{2:00 pm} \n\n</answer>": "2",
    "</answer>\n\\[\n{10}\n\\]": "10",
}
ALL = SIGNS | CURRENCY | THIS_QUESTION | KINDS | LLADA


@pytest.mark.parametrize(("text", "value"), ALL.items())
def test_an_answer_gives_its_number_and_not_the_negation(text: str, value: str) -> None:
    negation = value.removeprefix("-") if value.startswith("-") else f"-{value}"
    assert extract_number(text) == Decimal(value)
    for space in ("", " "):
        assert same_number(text, f"{space}{value}")
        assert not same_number(text, f"{space}{negation}")


@pytest.mark.parametrize(
    "text", ["", "####", "none", "NaN", "Infinity", "-inf", "#### nan", r"\boxed{}", "5/0", "seven"]
)
def test_words_and_nothing_are_no_numbers(text: str) -> None:
    assert extract_number(text) is None
    assert not same_number(text, text)


@pytest.mark.parametrize(
    "text", ["1e999999999", "#### 1e-999999999", "9" * 5000, "\\boxed{1e99999}", "1/" + "7" * 5000]
)
def test_absurd_numbers_are_no_answer(text: str) -> None:
    assert extract_number(text) is None


def test_comparison_is_exact() -> None:
    assert same_number("-0", "0") and same_number("#### -0", "0") and same_number("18.00", "18")
    assert not same_number("0.1", "0.1000000000000000055511151231257827")
    assert not same_number("10000000000000000000000000000000000000001", "10000000000000000000000000000000000000002")
    assert not same_number("12345678901234567890123456789012.5", "12345678901234567890123456789012.4")
    assert same_number("1/3", "2/6") and not same_number("1/3", "0.333")
    assert not same_number(Decimal("NaN"), Decimal("NaN")) and not same_number(Decimal("sNaN"), "1")
    assert not same_number(Decimal("Infinity"), Decimal("Infinity"))


def test_numbers_are_shown_plainly() -> None:
    shown = {"1.5e3": "1500", "18.00": "18", "-0": "0", "1,250": "1250", "-.50": "-0.5", "1e30": "1" + "0" * 30}
    assert {text: number_text(extract_number(text) or Decimal(0)) for text in shown} == shown


def test_a_reference_is_one_number() -> None:
    assert parse_number(" $1,234 ") == 1234 and parse_number("3 + 4 = 7 #### 7") == 7 and parse_number("15%") == 15
    assert parse_number("5 or 6") is None and parse_number("B") is None


@pytest.mark.parametrize(
    "text",
    [
        "1,",
        "- ",
        "9",
        "1,000",
        "\\boxed{",
        "\\boxed{=",
        "> ",
        "$",
        "1,234_",
        "\\frac{1}",
        "#### the ",
        "#### ",
        "1/",
        "\n1\nQuestion:",
        "-$",
        ".1",
        "*",
        "#### x\n",
        "1 1/1 ",
        "#",
        "\n",
    ],
)
def test_repetition_takes_no_time(text: str) -> None:
    start = time.perf_counter()
    extract_number(text * (100_000 // len(text)))
    assert time.perf_counter() - start < 5


def test_the_scorer_is_versioned() -> None:
    assert re.fullmatch(r"numbers-\d+", SCORER)


def test_every_reference_of_gsm8k_parses() -> None:
    lines = shared("data", "gsm8k", "test.jsonl").read_bytes().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    values = [parse_number(answer) for answer in answers]
    assert len(values) == 1319 and all(value is not None and value == int(value) for value in values)
    assert values == [extract_number(answer) for answer in answers]


def test_real_answers_are_graded_as_by_hand() -> None:
    """893 of 1,130, every doubtful one (wrong with the reference in sight, or right without a box) read by eye."""
    lines = shared("data", "gsm8k", "test.jsonl").read_bytes().splitlines()
    gold = {row["question"].strip(): row["answer"].rpartition("####")[2] for row in map(json.loads, lines)}
    files = sorted(shared("data", "llada_outputs").glob("gsm8k_*.json"))
    rows = [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))["generations"]]
    right = sum(same_number(row["generations"], gold[row["question"].strip()]) for row in rows)
    assert (right, len(rows)) == (893, 1130)
