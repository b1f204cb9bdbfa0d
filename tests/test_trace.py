"""The denoising trace: what a forward did to each slot, and the two players that show it."""

from __future__ import annotations

import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.trace import Player, main
from pipeline.trace_page import page
from pipeline.traces import END, HOW, Trace, find_trace, find_traces, kind_of, read_trace
from tests.commands import Here

RUNS = {
    "threshold": ("model=tiny", "sampler=threshold", "sampler.block_size=8", "sampler.cache=dual"),
    "remasking": ("model=tiny", "sampler=confidence", "sampler.remask_ratio=0.4"),
    "dmax": ("model=tiny_sdar", "sampler=dmax"),
    "toy": ("model=toy", "sampler=threshold", "dataset.gen_length=16"),
}

DRAFTED = ("model=tiny_ar_dflash", "sampler=dflash")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of small traced runs."""
    here = Here(tmp_path_factory.mktemp("runs"))
    every = {**RUNS, "drafted": DRAFTED}
    for name, options in every.items():
        here(*options, "logger=none", "dataset.limit=2", "engine.trace=true", f"run={name}")
    return {name: here.run(name).path for name in every}


class Page(HTMLParser):
    """What a browser would make of a page: its scripts, and what its elements point to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.title, self.links, self._in = "", [], ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.scripts += [""] if tag == "script" else []
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "script":
            self.scripts[-1] += data
        if self._in == "title":
            self.title += data


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RUNS)
def test_the_trace_replayed_is_the_answer_at_the_counted_forwards(runs: dict[str, Path], name: str) -> None:
    rows = rows_of(runs[name])
    for row, path in zip(rows, find_traces(runs[name]), strict=True):
        trace = read_trace(path)
        assert (trace.id, trace.header["index"], len(trace.forwards)) == (row["id"], row["index"], row["nfe"])
        *_, last = trace.frames()
        assert [slot.text for slot in last][: len(row["output_ids"])] == [trace.text(i) for i in row["output_ids"]]
        assert all(slot.decided_at and 0 <= slot.confidence <= 1 for slot in last)
        if name != "remasking":  # a slot taken back and decided anew is a remask here, a revision in the row
            assert trace.counts()["revised"] == row["revised_tokens"]


@pytest.mark.parametrize("name", RUNS)
def test_each_slot_is_committed_once_more_than_it_is_remasked(runs: dict[str, Path], name: str) -> None:
    for trace in map(read_trace, find_traces(runs[name])):
        for slot in trace.canvas:
            committed, remasked = (sum(slot in record[how] for record in trace.forwards) for how in HOW[::2])
            assert committed == remasked + 1


def test_revisions_and_remasks_are_told_apart(runs: dict[str, Path]) -> None:
    counts = {name: Counter[str]() for name in runs}
    for name, folder in runs.items():
        for path in find_traces(folder):
            counts[name] += read_trace(path).counts()
    assert counts["dmax"]["revised"] > 0 == counts["dmax"]["remasked"]
    assert counts["remasking"]["remasked"] > 0
    assert counts["threshold"]["revised"] == counts["threshold"]["remasked"] == 0


def test_the_header_needs_no_tokenizer(runs: dict[str, Path]) -> None:
    header = find_trace(runs["threshold"], "0").header
    assert header["model"] == "tiny" and header["sampler"] == "threshold" and header["dataset"] == "arithmetic"
    assert header["prompt_text"].startswith("<|user|>") and len(header["prompt"]) == header["canvas"][0]
    first = header["canvas"][0]
    assert header["blocks"] == [[first + 8 * n, first + 8 * n + 8] for n in range(4)]
    assert "".join(header["texts"][str(token)] for token in header["prompt"]) == header["prompt_text"]


def test_trace_samples_traces_the_first_ones_only(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here(*RUNS["toy"], "logger=none", "dataset.limit=3", "engine.trace_samples=2", "run=a")
    assert [path.name for path in find_traces(here.run("a").path)] == ["0.jsonl", "1.jsonl"]


@pytest.mark.parametrize("name", RUNS)
def test_the_page_holds_the_trace_and_asks_for_nothing(runs: dict[str, Path], name: str) -> None:
    trace = find_trace(runs[name], "1")
    text = page(trace)
    read = Page(text)
    data, program = read.scripts
    assert json.loads(data) == {"header": trace.header, "forwards": trace.forwards}
    assert read.links == [] and trace.id in read.title and "default-src 'none'" in text
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(", program)
    assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_no_token_or_id_ends_the_script_or_becomes_markup(runs: dict[str, Path]) -> None:
    evil = "</script><script>alert(1)</script><!--title-->/*trace*/&\u2028"
    trace = find_trace(runs["toy"], "0")
    texts = dict.fromkeys(trace.header["texts"], evil)
    trace = Trace(trace.path, {**trace.header, "id": evil, "prompt_text": evil, "texts": texts}, trace.forwards)
    read = Page(page(trace))
    assert len(read.scripts) == 2 and json.loads(read.scripts[0])["header"] == trace.header
    assert evil in read.title


def test_the_player_shows_a_step_when_there_is_no_terminal(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs["threshold"]
    (row, _), trace = rows_of(folder), find_trace(folder, "0")
    assert main([str(folder), "--sample", row["id"]]) == 0
    out = capsys.readouterr().out
    assert f"forward {row['nfe']}/{row['nfe']}" in out and "32 of 32 decided" in out and "\x1b" not in out
    shown = [word for word in out.split("\n\n")[1].split() if word != END]
    assert shown == row["text"].split() or "".join(shown) == row["text"].replace(" ", "")
    assert Path(out.split("page: ")[1].strip()).read_text() == page(trace)
    assert main([str(folder), "--sample", row["id"], "--step", "0"]) == 0
    out = capsys.readouterr().out
    assert "forward 0/" in out and out.count("·") >= 32


def test_a_verifying_forward_tells_of_its_drafts_and_a_drafters_forward_is_marked(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs["drafted"]
    row, trace = rows_of(folder)[0], find_trace(folder, "0")
    kinds = Counter(map(kind_of, trace.forwards))
    assert kinds == {"prefill": 1, "draft": row["nfe_draft"], "verify": row["nfe_verify"]} and row["nfe_draft"] > 1
    verifies = [record for record in trace.forwards if record["kind"] == "verify"]
    sums = [sum(record[name] for record in verifies) for name in ("proposed", "accepted", "emitted")]
    assert sums == [row[f"{name}_tokens"] for name in ("proposed_draft", "accepted_draft", "verified")]
    assert all(record["emitted"] == len(record["committed"]) for record in verifies)
    assert all("proposed" not in record for record in trace.forwards if record["kind"] != "verify")
    told = f"  accepted {verifies[0]['accepted']} of {verifies[0]['proposed']} drafts, "
    for step, said in ((2, "  draft  "), (3, told)):
        assert main([str(folder), "--sample", "0", "--step", str(step)]) == 0
        assert said in capsys.readouterr().out
    other = dict(trace.forwards[1], kind="denoise")  # a diffusion model may draft in several steps
    assert kind_of(other) == "draft" and kind_of(dict(other, role="target")) == "denoise"


def test_a_slot_keeps_its_place_from_step_to_step_and_the_window_is_underlined(runs: dict[str, Path]) -> None:
    player = Player(find_trace(runs["dmax"], "0"))
    canvases = [player.canvas(step) for step in range(player.steps + 1)]
    assert len({len(canvas.plain) for canvas in canvases}) == 1
    for step, record in enumerate(player.trace.forwards, start=1):
        underlined = sum("underline" in str(span.style) for span in canvases[step].spans)
        assert underlined == len(set(range(*record["window"])) & set(player.trace.canvas))
    assert any("magenta" in str(span.style) for canvas in canvases for span in canvas.spans)


def test_without_a_sample_the_traced_ones_are_listed(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(runs["remasking"])]) == 0
    out = capsys.readouterr().out
    assert all(row["id"] in out for row in rows_of(runs["remasking"])) and "remasked" in out


@pytest.mark.parametrize(
    ("damage", "arguments", "said"),
    [
        ("", ["--sample", "nobody"], "--sample nobody has no trace in"),
        ("", ["--sample", "0", "--step", "99"], "has the steps 0 to"),
        ("", ["--sample", "0", "--speed", "0"], "--speed 0.0 is out of range"),
        ("torn", ["--sample", "0"], "is torn or damaged"),
        ("torn", [], "is torn or damaged"),
        ("short", ["--sample", "0"], "holds 0 of"),
        ("headless", ["--sample", "0"], "line 1 is no header of a trace"),
        ("none", [], "holds no trace: decode with engine.trace=true"),
        ("gone", [], "is no folder"),
    ],
)
def test_bad_input_is_one_sentence(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: str,
    arguments: list[str],
    said: str,
) -> None:
    whole = (runs["toy"] / "trace" / "0.jsonl").read_text()
    header, *forwards = whole.splitlines(keepends=True)
    damaged = {"torn": whole[:-9], "short": header, "headless": "".join(forwards)}.get(damage, whole)
    folder = tmp_path / "run"
    if damage != "gone":
        (folder / "trace").mkdir(parents=True)
    if damage not in ("gone", "none"):
        (folder / "trace" / "0.jsonl").write_text(damaged)
    assert main([str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error and error.count("\n") == 1
