"""The corpus: what is in it, how it is split, and how it travels."""

import json
import sysconfig
from pathlib import Path

import pytest

from lab.errors import ExperimentError
from lab.training import corpus
from lab.training.corpus import SPLITS, Corpus, Document, read_corpus, read_stdlib, write_corpus

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def stdlib() -> Corpus:
    return read_stdlib()


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("".join(f"line {i} of a text that goes on and on\n" for i in range(4000)))
    return path


def test_the_standard_library_comes_without_tests_packages_and_tables(stdlib: Corpus) -> None:
    names = {document.name for document in stdlib.documents}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    for name in names:
        assert not {"test", "tests", "site-packages", "__pycache__", "encodings"} & set(name.split("/")[:-1]), name
    assert "pydoc_data/topics.py" not in names


def test_documents_stand_in_order_of_their_names_with_their_own_text(stdlib: Corpus) -> None:
    names = [document.name for document in stdlib.documents]
    assert names == sorted(names)
    text = next(document.text for document in stdlib.documents if document.name == "heapq.py")
    assert text == (Path(sysconfig.get_path("stdlib")) / "heapq.py").read_text(encoding="utf-8")


def test_whole_modules_are_held_out_and_the_splits_share_nothing(stdlib: Corpus) -> None:
    splits = {name: {document.name for document in stdlib.split(name)} for name in SPLITS}
    assert sum(len(names) for names in splits.values()) == len(stdlib.documents)
    assert set.union(*splits.values()) == {document.name for document in stdlib.documents}
    assert {"json/__init__.py", "json/decoder.py", "argparse.py"} <= splits["held out"]
    size = {name: sum(len(document.text) for document in stdlib.split(name)) for name in SPLITS}
    assert 0.035 < size["held out"] / sum(size.values()) < 0.06


def test_the_hash_changes_with_a_name_and_with_a_text() -> None:
    hashes = {
        Corpus("a", "", (Document("x", "one"), Document("y", "two"))).sha256,
        Corpus("a", "", (Document("x", "one"), Document("z", "two"))).sha256,
        Corpus("a", "", (Document("x", "one"), Document("y", "too"))).sha256,
        Corpus("a", "", (Document("x", "on"), Document("ey", "two"))).sha256,
    }
    assert len(hashes) == 4


def test_a_written_corpus_is_the_same_corpus_elsewhere(stdlib: Corpus, tmp_path: Path) -> None:
    write_corpus(stdlib, tmp_path / "corpus.jsonl")
    again = read_corpus(tmp_path / "corpus.jsonl")
    assert again == stdlib
    assert again.sha256 == stdlib.sha256
    assert again.split("held out") == stdlib.split("held out")


def test_a_written_corpus_that_was_changed_is_refused(stdlib: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    write_corpus(stdlib, path)
    header, first, *rest = path.read_text().splitlines()
    changed = json.dumps({**json.loads(first), "text": "pass\n"})
    path.write_text("\n".join([header, changed, *rest]) + "\n")
    with pytest.raises(ExperimentError, match="does not match its own hash"):
        read_corpus(path)


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_corpus_that_was_copied_in_part_is_refused_in_three_parts(
    stdlib: Corpus, tmp_path: Path, kept: float
) -> None:
    path = tmp_path / "corpus.jsonl"
    write_corpus(stdlib, path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: int(kept * len(text))], encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"corpus\.jsonl cannot be read: JSONDecodeError"):
        read_corpus(path)


def test_a_text_file_is_cut_at_line_starts_and_every_split_gets_a_part(prose: Path) -> None:
    read = read_corpus(prose)
    assert "".join(document.text for document in read.documents) == prose.read_text()
    assert all(document.text.endswith("\n") for document in read.documents)
    assert all(read.split(name) for name in SPLITS)
    assert len(read.split("held out")) == pytest.approx(len(read.documents) / 25, abs=1)


def test_a_folder_gives_its_text_files_in_order_and_leaves_the_others(prose: Path) -> None:
    (prose.parent / "b.md").write_text(prose.read_text())
    (prose.parent / "image.png").write_bytes(b"\x89PNG")
    names = [document.name.split("#")[0] for document in read_corpus(prose.parent).documents]
    assert sorted(set(names)) == ["b.md", "prose.txt"]
    assert names == sorted(names)


def test_a_corpus_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError) as caught:
        read_corpus(tmp_path / "absent")
    assert "absent does not exist" in caught.value.what
    assert "standard library" in caught.value.remedy


def test_too_little_text_is_refused_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n" * 10)
    with pytest.raises(ExperimentError, match=r"has 120 characters in 1 parts") as caught:
        read_corpus(tmp_path / "short.txt")
    assert str(corpus.MIN_CHARACTERS) in caught.value.allowed


def test_one_endless_line_is_refused_because_it_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "line.txt").write_text("x" * 200_000)
    with pytest.raises(ExperimentError, match="200000 characters in 1 parts"):
        read_corpus(tmp_path / "line.txt")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.txt").write_bytes(bytes(range(128, 256)) * 1000)
    with pytest.raises(ExperimentError, match=r"noise\.txt is no UTF-8 text"):
        read_corpus(tmp_path / "noise.txt")
