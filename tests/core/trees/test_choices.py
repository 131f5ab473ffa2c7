"""Choices by name, as paths, and from files in both formats; what cannot be told apart or is no tree is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from places import ROOT
from random_trees import static_trees

from eagle3core.errors import ConfigError
from eagle3core.stored_json import MOST_DEPTH
from eagle3core.stored_yaml import MOST_BYTES, parse_yaml
from eagle3core.trees import StaticTree, read_choices
from eagle3core.trees.choices import tree_from_choices, tree_from_table

pytestmark = pytest.mark.reference


def refusal(choices: Any) -> ConfigError:
    """The error of reading them, which has its three parts."""
    with pytest.raises(ConfigError) as caught:
        read_choices(choices)
    assert caught.value.what
    assert caught.value.allowed
    assert caught.value.remedy
    return caught.value


def written(folder: Path, text: str, name: str = "tree.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def table_of(tree: StaticTree) -> list[list[int]]:
    """The adjacency table of a tree without gaps, children by the numbers of their nodes."""
    nodes = [(), *tree.paths]
    return [[i for i, child in enumerate(nodes) if child and child[:-1] == node] for node in nodes]


def without_gaps(tree: StaticTree) -> StaticTree:
    """The tree with the same parents and the smallest ranks."""
    paths: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents[1:], start=1):
        paths.append((*paths[parent], tree.parents[1:node].count(parent)))
    return StaticTree(tuple(paths[1:]))


def told_or_none(choices: list[list[int]]) -> StaticTree | None:
    """Their tree; None where the two formats give two, and it is said that it cannot be told which is meant."""
    try:
        return tree_from_choices(choices)
    except ConfigError as error:
        if "one tree as paths and another as an adjacency table" not in error.what:
            raise
    assert StaticTree(choices) != tree_from_table(choices)
    return None


@pytest.mark.parametrize("name", ["tree.yaml", "tree.yml", "tree.json"])
@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_of_paths_gives_their_tree(tmp_path: Path, name: str, as_text: bool) -> None:
    path = written(tmp_path, '{"choices": [[0], [1], [0, 2]]}', name)  # JSON is YAML
    assert read_choices(str(path) if as_text else path) == StaticTree(((0,), (1,), (0, 2)))


def test_both_formats_are_read_in_the_way_people_write_yaml(tmp_path: Path) -> None:
    paths = written(tmp_path, "# root first\nchoices:\n  - [0]\n  - [1]\n  - [0, 0]\n  - [0, 0, 3]\n", "paths.yaml")
    assert read_choices(paths) == StaticTree(((0,), (1,), (0, 0), (0, 0, 3)))
    table = written(tmp_path, "choices:\n- [1, 2]\n- [3]\n- []\n- - 4\n  - 5\n", "table.yaml")
    assert read_choices(table) == StaticTree(((0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1)))


def test_both_files_that_the_manual_shows_are_the_same_tree(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")
    shown = re.findall(r"```yaml\n(choices.+?)```", page, flags=re.DOTALL)
    first, second = (read_choices(written(tmp_path, text)) for text in shown)
    assert first == second == StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))


@given(static_trees())
def test_the_table_of_a_tree_gives_it_back_with_or_without_the_entries_of_its_last_leaves(tree: StaticTree) -> None:
    tree = without_gaps(tree)
    table = table_of(tree)
    assert tree_from_table(table) == tree
    while not table[-1]:
        table.pop()
    assert tree_from_table(table) == tree
    assert tree_from_choices(table, "adjacency") == tree


@given(static_trees())
def test_paths_are_told_from_a_table_or_refused_but_never_taken_for_one(tree: StaticTree) -> None:
    paths = [list(path) for path in tree.paths]
    assert tree_from_choices(paths, "paths") == tree
    assert told_or_none(paths) in (tree, None)


@given(static_trees())
def test_a_table_is_told_from_paths_or_refused_but_never_taken_for_them(tree: StaticTree) -> None:
    tree = without_gaps(tree)
    numbers = table_of(tree)
    ranks = [list(range(len(entry))) for entry in numbers]
    for table in (numbers, ranks):
        assert told_or_none(table) in (tree, None)


@pytest.mark.parametrize(
    "choices", [[[1]], [[1], [2]], [[0], [0, 1]], [[0, 1], [0]], [[0], [0, 1], [0, 1, 2]], [[1], [2], [3]]]
)
def test_what_both_formats_could_mean_is_refused_until_the_file_says_which(tmp_path: Path, choices: Any) -> None:
    error = refusal(written(tmp_path, json.dumps({"choices": choices})))
    assert "one tree as paths and another as an adjacency table" in error.what
    assert "format: adjacency" in error.remedy
    for form, tree in (("paths", StaticTree(choices)), ("adjacency", tree_from_table(choices))):
        assert read_choices(written(tmp_path, yaml.safe_dump({"choices": choices, "format": form}))) == tree


@pytest.mark.parametrize("choices", [[[0]], [[0], [0, 0]], [[0], [1], [2]], [[0], [1], [1, 0]], [[0], [3]]])
def test_lists_that_are_paths_as_they_are_usually_written_are_paths(choices: Any) -> None:
    assert tree_from_choices(choices) == StaticTree(choices)


def test_symbols_of_a_table_mean_nothing_but_odd_ones_need_the_word_that_it_is_one() -> None:
    tree = StaticTree(((0,), (1,), (0, 0)))
    assert tree_from_choices([[1, 2], [3]]) == tree
    assert tree_from_choices([[0, 1], [0], []]) == tree
    for odd in ([["a", "b"], ["c"]], [[5, 3], [3]], [[2, 1], [3], [], []]):
        assert tree_from_choices(odd, "adjacency") == tree, "a symbol 3 is no rank 3"
        with pytest.raises(ConfigError, match="its symbols are"):
            tree_from_choices(odd)


@pytest.mark.parametrize("paths", [[[0], [0, 2, 1]], [[0], [1], [2, 0]], [[0], [1], [1]], [["0"], ["0", "1"]]])
def test_a_mistake_in_a_list_of_paths_does_not_turn_it_into_a_table(paths: Any) -> None:
    with pytest.raises(ConfigError, match="the choices make no tree: as paths, "):
        tree_from_choices(paths)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ([], "choices are []"),
        ([[]], "choices are ()"),
        ([[1], 2], "entry 1 is 2"),
        ([[1], None], "entry 1 is None"),
        ([[[1]]], "entry 0 is [[1]]"),
        ([[1], [], [2]], "entry 2 is for a node that is not there: the entries before it make 2 nodes"),
        ([["a"]] * 9, "entry 8 has children at level 9"),
        ([list(range(17))], "has the rank 16"),
    ],
)
def test_what_is_no_table_is_refused_with_the_entry(table: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tree_from_table(table)
    assert named in caught.value.what


def test_a_file_that_is_not_there_is_warned_about_and_gives_no_tree(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_choices(tmp_path / "gone.yaml") is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "gone.yaml is not there: a chain is drafted" in caplog.text


@pytest.mark.parametrize("name", ["mc_sim_7b_25", "tree", "tree.toml", "", "a\0.yaml"])
def test_a_text_that_is_no_name_and_no_file_of_choices_is_refused(name: str) -> None:
    assert "'mc_sim_7b_63', a file that ends in .yaml, .yml, .json, or a list of paths" in refusal(name).allowed


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "a NoneType"),
        ("- [0]", "a list"),
        ("tree: [[0]]", "the keys ['tree']"),
        ("choices: [[0]]\nname: mine", "the keys ['choices', 'name']"),
        ("choices:", "make no tree: as paths, choices are None"),
        ("choices: []", "make no tree: as paths, choices are []"),
        ("choices: {0: [1]}", "make no tree"),
        ("choices: [[0], [1, 0]]\nformat: paths", "path [1, 0] of the choices has no parent [1]"),
        ("choices: [[0]]\nformat: rows", "format is 'rows'"),
        ("choices: [[0]]\nformat: [paths]", "format is ['paths']"),
        ("choices: [[0]]\nchoices: [[1]]", "gives 'choices' twice"),
        ("choices: [[0]", "cannot be read as YAML"),
        ("choices: [[0]]\n---\nchoices: [[0]]", "cannot be read as YAML"),
        ("choices: [[2001-99-99]]", "cannot be read as YAML"),
        ("choices: [[" + "9" * 5000 + "]]", "cannot be read as YAML"),
        ("choices: [[0], &a [1], *a]", "has an anchor, an alias or a tag in line 1"),
        ("choices:\n- !!bool x", "has an anchor, an alias or a tag in line 2"),
        ("choices: !!python/tuple [[0]]", "has an anchor, an alias or a tag in line 1"),
        ("choices: " + "[" * 5000 + "]" * 5000, "nested more than 64 deep"),
        ("choices: [[0]]" + " " * (64 << 10), "longer than 64 KiB"),
    ],
)  # fmt: skip
def test_a_malformed_yaml_file_is_refused_with_its_name(tmp_path: Path, text: str, named: str) -> None:
    error = refusal(written(tmp_path, text))
    assert "tree.yaml" in error.what
    assert named in error.what


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "cannot be read as JSON"),
        ("[[0]]", "holds a list"),
        ('{"choices": [[0]], "choices": [[1]]}', "'choices' stands twice"),
        ('{"choices": ' + "[" * 100 + "]" * 100 + "}", "nested more than 64 deep"),
        ('{"choices": [[' + "9" * 50 + "]]}", "an integer of 50 digits"),
        ('{"choices": [[0, "\\ud800"]]}', "make no tree"),
    ],
)
def test_a_malformed_json_file_is_refused_within_the_limits_of_stored_json(
    tmp_path: Path, text: str, named: str
) -> None:
    error = refusal(written(tmp_path, text, "tree.json"))
    assert "tree.json" in error.what
    assert named in error.what
    assert "download" not in error.remedy


def test_a_text_at_the_limits_of_depth_and_size_is_read() -> None:
    assert parse_yaml(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH, "x") is not None
    assert parse_yaml(b"[0]" + b" " * (MOST_BYTES - 3), "x") == [0]


def test_aliases_that_would_stand_for_gigabytes_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    lines = ["a0: &a0 [0]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    assert "an anchor" in refusal(written(tmp_path, "\n".join([*lines, "choices: *a29"]))).what


def test_a_long_chain_in_a_table_is_refused_at_its_ninth_level(tmp_path: Path) -> None:
    text = json.dumps({"choices": [[1]] * 10_000, "format": "adjacency"}, separators=(",", ":"))
    assert "entry 8 has children at level 9" in refusal(written(tmp_path, text, "long.json")).what


def test_a_folder_and_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in refusal(tmp_path / "folder.yaml").what
    (tmp_path / "bytes.yaml").write_bytes(b"choices: [[0]] # \xff")
    assert "cannot be read as YAML" in refusal(tmp_path / "bytes.yaml").what
