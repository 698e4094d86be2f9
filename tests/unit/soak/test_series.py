"""A run's verdict names the process and the series that grows."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

from tests.soak.plots import page
from tests.soak.series import Key, Samples, growing, write_verdict

LEAKING = Key("tabletserver-2", 1, "memory")
LEVEL = Key("master", 1, "memory")


def a_run() -> Samples:
    samples = Samples()
    for number in range(60):
        samples.add(LEAKING, float(number), 80.0 + number / 4)
        samples.add(LEVEL, float(number), 60.0 + number % 2)
    return samples


def test_what_grows_is_named_with_figures() -> None:
    (told,) = growing(a_run().judged())
    assert told.startswith("tabletserver-2: memory grows: 87.4 in the middle third, 92.4 in the")


def test_the_longest_life_of_a_process_is_judged() -> None:
    samples = a_run()
    for number in range(40):
        samples.add(Key("tabletserver-3", 2, "memory"), 100.0 + number, 80.0 + number)
    for number in range(10):
        samples.add(Key("tabletserver-3", 1, "memory"), float(number), 80.0)
    found = {str(one.key): one.judgement for one in samples.judged()}
    assert set(found) == {"tabletserver-2: memory", "master: memory", "tabletserver-3 #2: memory"}
    assert found["tabletserver-3 #2: memory"].grows


def test_the_verdict_and_the_samples_are_written(tmp_path: Path) -> None:
    samples = a_run()
    judged = samples.judged()
    write_verdict(tmp_path / "verdict.json", judged, list(growing(judged)))
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert [one["series"] for one in verdict["series"] if one["grows"]] == [str(LEAKING)]
    assert len(verdict["problems"]) == 1
    samples.write_csv(tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(samples) == 120
    assert rows[0] == {
        "source": "tabletserver-2",
        "life": "1",
        "quantity": "memory",
        "seconds": "0.00",
        "value": "80.0000",
    }


def test_the_page_has_a_chart_for_each_series_and_shows_in_red_what_grows() -> None:
    samples = a_run()
    samples.add(Key("<gateway>", 1, "tasks"), 0.0, 0.0)
    text = page("a run", samples.judged())
    root = ElementTree.fromstring(text)
    charts = root.findall("{http://www.w3.org/2000/svg}g")
    assert len(charts) == 3
    assert text.count("#c62828") == 2  # its title and its line
