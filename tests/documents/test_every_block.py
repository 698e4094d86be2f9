"""Every block of the documents is checked, or says why it is not."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests.documents.blocks import DATA, PROGRAMS, ROOT, SHOWN, Block, all_blocks, documents
from tests.documents.commands import problems

NOT_RUN_MAX = 29
"""Raise this only for blocks that really cannot be run here."""

BLOCKS = all_blocks()
NOT_RUN = [block for block in BLOCKS if block.told("not run:")]


def test_every_block_says_what_it_is() -> None:
    known = PROGRAMS | DATA | SHOWN
    assert [block.place for block in BLOCKS if block.language not in known] == []


def test_what_a_comment_asks_for_is_something_that_is_done() -> None:
    done = ("file:", "in another terminal", "run by", "not run:")
    unknown = [
        f"{block.place}: {block.directive}"
        for block in BLOCKS
        if block.directive and not any(block.told(one) for one in done)
    ]
    assert unknown == []


def test_blocks_that_another_test_runs_are_named_in_it() -> None:
    missing = [
        block.place
        for block in BLOCKS
        if (test := block.told("run by"))
        and not (
            (ROOT / test).is_file() and block.document.split("/")[-1] in (ROOT / test).read_text()
        )
    ]
    assert missing == []


def test_blocks_that_are_not_run_are_few_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for block in NOT_RUN:
            print(f"\nnot run: {block.place}: {block.told('not run:')}", end="")
    assert [block.place for block in NOT_RUN if len(block.told("not run:").split()) < 3] == []
    assert len(NOT_RUN) <= NOT_RUN_MAX


@pytest.mark.parametrize(
    "block", [block for block in NOT_RUN if block.language == "sh"], ids=lambda block: block.place
)
def test_commands_that_are_not_run_exist_with_their_options(block: Block) -> None:
    assert problems(block.text) == []


def test_commands_that_are_named_in_the_text_exist_with_their_options() -> None:
    wrong = []
    for document in documents():
        for code in re.findall(r"`((?:make|percolator|python -m) [^`]+)`", document.read_text()):
            command = re.sub(r"[…\[].*|, `.*", "", " ".join(code.split()))
            wrong += [f"{document.name}: {problem}" for problem in problems(command)]
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("make no-such-target", "no such target: no-such-target"),
        ("make test-spark SEEDS=1", ""),
        ("percolator tablets slpit 7", "No such command"),
        ("percolator tablets split 7 --rows g", "No such option"),
        ("percolator serve worker --master host:7100", "no such option: --master"),
        ("percolator serve worker --masters host:7100", ""),
        ("percolator serve clerk", "no such service: clerk"),
        ("percolator serve tabletserver dump PATH --jsno", "no such option: --jsno"),
        ("python -m examples.missing", "no such module"),
        ("percolate", "not a command"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, wrong: str) -> None:
    found = problems(command)
    assert len(found) == (1 if wrong else 0)
    assert all(wrong in one for one in found)


def test_data_is_well_formed() -> None:
    for block in BLOCKS:
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
