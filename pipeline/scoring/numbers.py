"""The number an answer gives, and whether it is the right one. Exact: decimals and fractions, never floats.

Three places are searched, in this order, in the part of the text that answers *this* question (run-on text is cut):

1. ``#### 42``: the first marker followed by a number (the answer ends there; what follows is run-on text);
2. ``\\boxed{42}``: the last box that holds a number;
3. the last number of the text. List ordinals (``3. Add them``), exponents (``m^2``) and digits glued to a word
   (``CO2``) count only if there is no other number.

Rules written for the public faults of such scorers: EleutherAI/lm-evaluation-harness #3214 and #2278,
sgl-project/sglang #29933, huggingface/Math-Verify #44, google-deepmind/proeval #19. Math-Verify itself is not used:
it reads a symbolic expression, joins boxes, and grades slower and more kindly than an exact number needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Context, Decimal

SCORER = "numbers-1"  # raise the version whenever any text could now give another number
MAX_DIGITS = 1000  # longer runs of digits are noise of a repeating model, not an answer
MAX_EXPONENT = 1000  # Decimal("1e999999999") exists, but nothing may expand it
LONGEST_BOX = 200  # characters; keeps the search linear when a model repeats itself
QUOTIENT = Context(prec=50)  # enough that two fractions are equal here only if they are equal

# Minus signs, hyphens and the en dash become "-"; full-width digits and signs (Chinese models) become ASCII.
_PLAIN = str.maketrans("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d\uff0b\uff0c\uff0e\uff05\uff04", "------" + "-+,.%$")
_PLAIN |= str.maketrans("".join(chr(0xFF10 + digit) for digit in range(10)), "0123456789")
_LATEX = (
    (re.compile(r"\\([$%#])"), r"\1"),
    (re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!;])(?=[0-9]{3})"), ","),  # 1{,}234 and 1\,234
    (re.compile(r"(?<=[0-9])[ ]?\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"), r" \1/\2"),  # 2\frac{1}{2}
    (re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}"), r"\1/\2"),
)
_CURRENCY = "$€£¥₹"
_GROUPED = r"[0-9]{1,3}(?:[,_\u00a0\u2009\u202f][0-9]{3})+(?![0-9])|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?![0-9])"
_NUMBER = re.compile(
    rf"""(?:(?P<sign>[-+])(?P<gap>[ \t]*))?(?:[{_CURRENCY}][ ]?)?
    (?:(?P<ones>[0-9]+)[ ](?=[0-9]+/[0-9]))?                          # the 2 of 2 1/2
    (?P<body>(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)
    (?:[eE](?P<exponent>[-+]?[0-9]+)(?!\w)|[ ]?(?:\u00d7|x|\*|\\times)[ ]?10\^\{{?(?P<power>[-+]?[0-9]+)\}}?)?
    (?:/(?P<below>[0-9]+)(?![0-9/.]))?""",
    re.VERBOSE,
)
_SEPARATORS = re.compile("[,_\u00a0\u2009\u202f]")
_MARKER = re.compile(r"#{4,}[ \t]*\n?([^\n]*)")
_BEFORE_ANSWER = re.compile(r"(?:[^\w]|_|boxed|text|final|answer|is|the|USD|Rs)*", re.IGNORECASE)
_HEADING = re.compile(r"[ \t]*[0-9]+[.)][ \t]+[A-Za-z]")  # "#### 1. Count the eggs" is a heading, not an answer
_BOX = re.compile(r"boxed[ ]*\{")  # the backslash is often lost: LLaDA really writes boxed{27} and \.boxed{18}
_END_TOKEN = re.compile(r"<\|(?:eot_id|endoftext|im_end|im_start|start_header_id|role_end)\|>|</s>")
_RUN_ON = re.compile(
    r"^[ \t>*_#]*(?:(?:next|new|another)[ ])?(?:question|problem|exercise|q|human|user)[ ]?[0-9]*[*_]*[ ]?:"
    r"|(?<![A-Za-z\n])Question[ ]?[0-9]*:",
    re.IGNORECASE | re.MULTILINE,
)


@dataclass(frozen=True)
class _Found:
    """A number in a text: its value (None: beyond the limits), where it stands, and whether it is likely an answer."""

    value: Decimal | None
    start: int
    end: int
    likely: bool
    upper: bool  # the second end of a range: the 40 of 30-40


def extract_number(text: str) -> Decimal | None:
    """The number that ``text`` answers with, exactly, or None if it gives none (or only an absurd one)."""
    text = _answer_part(_plain(text))
    found = _marked(text) or _boxed(text) or _last(text)
    return found.value if found else None


def parse_number(text: str) -> Decimal | None:
    """The number that ``text`` *is*, with currency and unit allowed; None if it holds none or several."""
    if "####" in text:
        return extract_number(text)
    found = list(_numbers(_plain(text)))
    return found[0].value if len(found) == 1 and found[0].likely else None


def same_number(a: str | Decimal, b: str | Decimal) -> bool:
    """Exact equality of two numbers; text is read by ``extract_number``, and text without a number equals nothing."""
    left, right = (extract_number(x) if isinstance(x, str) else x for x in (a, b))
    return left is not None and right is not None and left.is_finite() and right.is_finite() and left == right


def number_text(value: Decimal) -> str:
    """The shortest plain form: ``1500`` for 1.5e3, ``18`` for 18.00, ``0`` for -0."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _plain(text: str) -> str:
    """One spelling for signs, digits and the LaTeX ways to write a number."""
    text = text.replace("\r\n", "\n").translate(_PLAIN)
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text


def _answer_part(text: str) -> str:
    """``text`` before an end token or the heading of another question, provided a number comes before it."""
    digit = re.search("[0-9]", text)
    if digit is None:
        return text
    borders = [border for pattern in (_END_TOKEN, _RUN_ON) if (border := pattern.search(text, digit.end()))]
    return text[: min((border.start() for border in borders), default=None)]


def _marked(text: str) -> _Found | None:
    """The number of the first ``####`` line that has one, after its last ``=``."""
    for marker in _MARKER.finditer(text):
        line = marker[1].rpartition("=")[2] if re.search("=.*[0-9]", marker[1]) else marker[1]
        found = _first(line)
        if found and not _HEADING.match(line) and _BEFORE_ANSWER.fullmatch(line, 0, found.start):
            return found
    return None


def _boxed(text: str) -> _Found | None:
    """The number of the last box that has one, after its last ``=``."""
    for box in reversed(list(_BOX.finditer(text))):
        inside = _inside(text, box.end())
        found = _first(inside.rpartition("=")[2]) or _first(inside)
        if found:
            return found
    return None


def _inside(text: str, start: int) -> str:
    """What a brace opened just before ``start`` holds; up to the end of the line if it is never closed."""
    inside, depth = text[start : start + LONGEST_BOX].partition("\n")[0], 1
    for i, character in enumerate(inside):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return inside[:i]
    return inside


def _first(line: str) -> _Found | None:
    """The first likely number of a line; of a range, its upper end."""
    found = list(_numbers(line))
    first = next((i for i, number in enumerate(found) if number.likely), 0)
    while first + 1 < len(found) and found[first + 1].upper:
        first += 1
    return found[first] if found else None


def _last(text: str) -> _Found | None:
    """The last likely number of a text, else the last number."""
    found = list(_numbers(text))
    return next((number for number in reversed(found) if number.likely), found[-1] if found else None)


def _numbers(text: str) -> Iterator[_Found]:
    """Every number of a plain text, left to right."""
    end = -1
    for match in _NUMBER.finditer(text):
        signed, ranged = _is_sign(match), match["sign"] == "-" and not match["gap"] and end >= 0
        upper = ranged and text[end : match.start()].strip(" %" + _CURRENCY) == ""
        yield _Found(_value(match, signed), match.start(), match.end(), _likely(match), upper)
        end = match.end()


def _is_sign(match: re.Match[str]) -> bool:
    """Whether the ``-`` before a number is its sign, not a hyphen, the middle of a range, an operator or a bullet."""
    if match["sign"] != "-":
        return False
    before = match.string[max(0, match.start() - 20) : match.start()]
    before = before[:-1] if before[-1:] and before[-1] in _CURRENCY else before  # $-50
    near = before.rstrip(" \t")
    if match["gap"]:
        return near[-1:] in tuple("=#:{(")
    return not (re.search(r"[\w)\]}%]$", before) or (near != before and re.search(r"[0-9)%]$", near)))


def _likely(match: re.Match[str]) -> bool:
    """False for list ordinals, exponents and digits glued to a word."""
    text, start = match.string, match.start()
    line = text.rfind("\n", max(0, start - 10), start) + 1 or (start if not text[:start].strip(" \t*") else -1)
    ordinal = (
        line >= 0 and not text[line:start].strip(" \t*") and re.match(r"[.)][*]*[ \t]+\S", text[match.end() :][:8])
    )
    glued = re.search(r"[^\W\d_]$|\^\{?$", text[max(0, start - 2) : start]) and not match["sign"]
    return not ordinal and not glued


def _value(match: re.Match[str], negative: bool) -> Decimal | None:
    """The exact value of a match; None beyond the limits, or for a division by zero."""
    body, below = _SEPARATORS.sub("", match["body"]), match["below"]
    exponent = match["exponent"] or match["power"] or "0"
    if max(len(body), len(below or ""), len(match["ones"] or "")) > MAX_DIGITS or len(exponent) > 5:
        return None
    if abs(int(exponent)) > MAX_EXPONENT or (below and not below.strip("0")):
        return None
    value = Decimal(f"{body}e{exponent}")
    if below:
        value = QUOTIENT.divide(value, Decimal(below))
    if match["ones"]:
        value = QUOTIENT.add(Decimal(match["ones"]), value)
    return value.copy_negate() if negative and value else value
