"""The text a pair is trained on: named documents, in a fixed order, split by whole documents, and hashed.

The default is what every machine has, the Python standard library's own source. Whole modules are kept apart: some to
choose the best checkpoint (validation), others to report (held out); neither is ever trained on. A user's own text is
cut into parts at line starts and split by position.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.errors import ExperimentError

STDLIB = "python-stdlib"
SPLITS = ("training", "validation", "held out")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Chosen for being self-contained, varied (classes, algorithms, prose docstrings) and about 4 % of the text.
HELD_OUT = _words(
    "argparse bisect calendar contextlib csv dataclasses fractions graphlib heapq json queue shlex statistics textwrap"
)
VALIDATION = _words("colorsys configparser fileinput netrc pprint sched smtplib tempfile timeit")

# Not written by hand, or not part of the library proper: tests, installed packages, bundled wheels.
_SKIPPED_FOLDERS = _words(
    "__pycache__ site-packages dist-packages lib-dynload test tests idle_test _bundled turtledemo"
)
# Generated tables: one pattern repeated for megabytes would teach the model, and the 5-gram, little else.
_TABLES = _words("pydoc_data/topics html/entities re/_casefix stringprep msilib/schema msilib/sequence")
MIN_CHARACTERS = 100_000
_PART_CHARACTERS = 4_000
_TEXT_SUFFIXES = _words("txt md rst py c h js ts java go rs tex html csv json")


@dataclass(frozen=True)
class Document:
    """One file, or one part of it: its name with forward slashes, and its text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents in training order.

    Attributes:
        source: `python-stdlib`, or the name of the file or folder it came from.
        python: version of the interpreter whose library it is; empty for a user's own text.
        documents: in order of their names.
    """

    source: str
    python: str
    documents: tuple[Document, ...]

    @property
    def sha256(self) -> str:
        """Hash of every name and text in order, each closed by a zero byte."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(f"{document.name}\0{document.text}\0".encode())
        return digest.hexdigest()

    def split(self, name: str) -> tuple[Document, ...]:
        """The documents of one of `SPLITS`, in order."""
        return tuple(document for i, document in enumerate(self.documents) if self._split_of(i, document) == name)

    def _split_of(self, index: int, document: Document) -> str:
        if self.source == STDLIB:
            module = document.name.split("/")[0].removesuffix(".py")
            return "held out" if module in HELD_OUT else "validation" if module in VALIDATION else "training"
        return {7: "held out", 17: "validation"}.get(index % 25, "training")


def read_stdlib(root: Path | None = None) -> Corpus:
    """The running interpreter's standard library, without tests, installed packages and generated tables.

    Args:
        root: its folder; None asks `sysconfig`.
    """
    folder = root or Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix())
    documents = []
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if not _is_skipped(name):
            with tokenize.open(path) as file:  # honours a module's declared encoding
                documents.append(Document(name, file.read()))
    return _checked(Corpus(STDLIB, platform.python_version(), tuple(documents)), folder)


def _is_skipped(name: str) -> bool:
    *folders, file = name.split("/")
    if _SKIPPED_FOLDERS.intersection(folders) or name.removesuffix(".py") in _TABLES:
        return True
    if folders and folders[0] == "encodings":
        return True  # nearly all code pages: 256-row tables
    return file.startswith("_sysconfigdata") or any(folder.startswith("config-") for folder in folders)


def read_corpus(path: str | Path) -> Corpus:
    """A user's text: a file written by `write_corpus`, any other text file, or a folder of text files.

    Raises:
        ExperimentError: nothing is there, it is no UTF-8 text, or it is too little to train on.
    """
    place = Path(path)
    if place.is_file():
        text = _read_text(place)
        if text.startswith('{"corpus":'):
            return _checked(_parse(text, place), place)
        return _checked(Corpus(place.name, "", tuple(_parts(Document(place.name, text)))), place)
    if place.is_dir():
        files = sorted(
            file for file in place.rglob("*") if file.is_file() and file.suffix.lower().lstrip(".") in _TEXT_SUFFIXES
        )
        whole = [Document(file.relative_to(place).as_posix(), _read_text(file)) for file in files]
        parts = tuple(part for document in whole for part in _parts(document))
        return _checked(Corpus(place.name, "", parts), place)
    raise ExperimentError(
        f"corpus {place} does not exist",
        "a UTF-8 text file, a folder of text files, or a file made by --write-corpus",
        "correct --corpus, or leave it out to train on the Python standard library",
    )


def write_corpus(corpus: Corpus, path: str | Path) -> None:
    """One JSON object a line: a header, then the documents; `read_corpus` gives the same corpus on any machine."""
    header = {"corpus": 1, "source": corpus.source, "python": corpus.python, "sha256": corpus.sha256}
    lines = [header, *({"name": document.name, "text": document.text} for document in corpus.documents)]
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    os.replace(partial, target)


def _parse(text: str, path: Path) -> Corpus:
    try:
        header, *rows = (json.loads(line) for line in text.splitlines())
        documents = tuple(Document(row["name"], row["text"]) for row in rows)
        corpus, sha256 = Corpus(header["source"], header["python"], documents), header["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ExperimentError(
            f"corpus file {path} cannot be read: {type(error).__name__}: {error}",
            "a whole file exactly as --write-corpus left it",
            "copy it again, or write it again",
        ) from error
    if corpus.sha256 != sha256:
        raise ExperimentError(
            f"corpus file {path} does not match its own hash: {corpus.sha256} instead of {sha256}",
            "a file exactly as --write-corpus left it",
            "copy it again, or write it again",
        )
    return corpus


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as reason:
        raise ExperimentError(
            f"{path} is no UTF-8 text: {reason}", "UTF-8 text files", "convert the file, or leave it out"
        ) from reason


def _parts(document: Document) -> Iterator[Document]:
    """Pieces of at least `_PART_CHARACTERS`, cut at line starts (the last may be shorter), so that any text splits."""
    lines, size, n = [], 0, 0
    for line in document.text.splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size >= _PART_CHARACTERS:
            yield Document(f"{document.name}#{n}", "".join(lines))
            lines, size, n = [], 0, n + 1
    if lines:
        yield Document(f"{document.name}#{n}", "".join(lines))


def _checked(corpus: Corpus, place: Path) -> Corpus:
    n_characters = sum(len(document.text) for document in corpus.documents)
    if n_characters < MIN_CHARACTERS or not all(corpus.split(name) for name in SPLITS):
        raise ExperimentError(
            f"the corpus at {place} has {n_characters} characters in {len(corpus.documents)} parts",
            f"at least {MIN_CHARACTERS} characters, in lines, so that training, validation and held-out parts exist",
            "give more text to --corpus, or leave it out to train on the Python standard library",
        )
    return corpus
