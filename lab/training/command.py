"""`eagle3lab train`: a (target, draft) pair from text, top to bottom.

corpus -> tokenizer -> target -> 5-gram yardstick -> lessons the target writes -> draft -> prompts -> card

The result is a folder with `target/`, `draft/`, `prompts.jsonl`, `losses.jsonl`, `card.json` and `README.md`. While it
is being made, `work/` holds what a resumed run needs; finished stages are not repeated.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.errors import EXIT_PASSED, ExperimentError
from lab.options.training import TrainOptions
from lab.training import card, corpus, draft, evaluation, generation, ngram, prompts, target, teaching, tokenizer
from lab.training.fit import Course, Fit, Plan
from lab.training.folder import RunFolder
from lab.training.progress import Reporter
from lab.training.sizes import PairSize, StageSize, resolved_size

# What of a time limit each stage may take; the rest is tokenizing, lessons and measuring.
_TARGET_SHARE, _DRAFT_SHARE = 0.40, 0.42
_VALIDATION_PROMPTS, _VALIDATION_OPENING = 128, 64


@dataclass(frozen=True)
class TrainedPair:
    """A finished pair: where its parts lie, and its card."""

    target: Path
    draft: Path
    prompts: Path
    card: dict[str, Any] = field(repr=False)


def train(options: TrainOptions) -> TrainedPair:
    """Train a pair, or finish one that was interrupted.

    Raises:
        ExperimentError: an option or the corpus cannot be used, or `out` holds another run.
        RunFailed: interrupted (resumable), or the loss is no longer finite.
    """
    check_device(options.device)
    size = resolved_size(options)
    if options.device.startswith("cuda"):
        torch.set_float32_matmul_precision("high")  # TF32 where bf16 would blur an argmax
    text = corpus.read_corpus(options.corpus) if options.corpus else corpus.read_stdlib()
    with Reporter(options.bar) as reporter:
        run = _Run(options, size, text, reporter)
        if not run.folder.is_finished("card"):
            run.make_tokenizer()
            run.train_target()
            run.write_lessons()
            run.train_draft()
            run.measure()
        reporter.say(f"pair in {options.out}")
    return TrainedPair(options.out / "target", options.out / "draft", options.out / "prompts.jsonl", run.card())


class _Run:
    """One run in its folder: what is finished, and the stages."""

    def __init__(self, options: TrainOptions, size: PairSize, text: corpus.Corpus, reporter: Reporter) -> None:
        self.options, self.size, self.text, self.reporter = options, size, text, reporter
        self.out, self.device = options.out, torch.device(options.device)
        settings = {"size": asdict(size), "seed": options.seed, "minutes": options.minutes}
        settings.update(corpus_sha256=text.sha256, device=self.device.type)
        self.folder = RunFolder(options.out, settings, options.resume)

    def make_tokenizer(self) -> None:
        """The tokenizer of the training split, and the three token streams."""
        self.reporter.say(f"corpus {self.text.source}: {len(self.text.documents)} documents, {self.text.sha256[:16]}")
        trained = tokenizer.train_tokenizer(self.text.split("training"), self.size.vocab)
        tokenizer.save_tokenizer(trained, self.out / "target", self.size.max_position)
        self.tokenizer = trained
        self.streams = {name: tokenizer.encode(trained, self.text.split(name)) for name in corpus.SPLITS}
        counts = ", ".join(f"{len(stream):,} {name}" for name, stream in self.streams.items())
        self.reporter.say(f"tokens: {counts}")

    def train_target(self) -> None:
        """The target, its best weights saved in bf16."""
        if self.folder.is_finished("target"):
            return
        model = target.build_target(self.size, self.options.seed, self.device)
        hooks = target.add_dropout(model, self.size.dropout)
        stage = self.size.target
        loss = target.target_loss(model, self._on_device("training"), self.size)
        evaluate = target.target_evaluation(model, self._validation_text(), stage.window)
        course = self._fit("target", model, loss, evaluate, stage, _TARGET_SHARE)
        for hook in hooks:
            hook.remove()
        target.save_target(model, self.out / "target")
        self.folder.finish("target", _outcome(model, course))

    def write_lessons(self) -> None:
        """Greedy text of the target: for training the draft, and of unseen openings for validating it."""
        self.target = target.load_target(self.out / "target", self.device)
        path = self.folder.work / "lessons.safetensors"
        if not path.exists():
            self.reporter.start("lessons")
            stream = self._on_device("training")
            lessons, greedy_from = generation.write_lessons(
                self.target, stream, self.size, self.options.seed, self.reporter.advance
            )
            self.folder.work.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            save_file({"lessons": lessons.to(torch.int32), "greedy_from": greedy_from}, partial)
            os.replace(partial, path)
        stored = load_file(path)
        self.lessons, self.greedy_from = stored["lessons"].numpy(), stored["greedy_from"].numpy()

    def train_draft(self) -> None:
        """The EAGLE-3 head, its best weights saved in bf16."""
        if self.folder.is_finished("draft"):
            return
        vocabulary = teaching.choose_vocabulary(self.lessons, self.greedy_from, self.size)
        model = draft.build_draft(self.size, self.target, vocabulary, self.options.seed)
        lessons = torch.from_numpy(self.lessons).to(self.device)
        loss = teaching.draft_loss(model, self.target, self._on_device("training"), lessons, self.size)
        evaluate = teaching.draft_evaluation(model, self.target, *self._validation_lessons(), self.size.ttt_steps)
        course = self._fit("draft", model, loss, evaluate, self.size.draft, _DRAFT_SHARE)
        draft.save_draft(model, self.size, self.out / "draft")
        self.folder.finish("draft", _outcome(model, course))

    def measure(self) -> None:
        """Prompts, held-out loss against a 5-gram, acceptance; then the card, and the work folder goes."""
        chosen = prompts.held_out_prompts(self.text.split("held out"), self.tokenizer)
        prompts.write_prompts(chosen, self.out / "prompts.jsonl")
        yardstick = ngram.NGram(self.streams["training"], self.size.vocab).loss(self.streams["held out"])
        own = target.stream_loss(self.target, self._on_device("held out"), self.size.target.window)
        losses = card.Losses(target=own, five_gram=yardstick)
        self.reporter.say(f"held-out loss {own:.3f} nats a token; interpolated 5-gram {yardstick:.3f}")
        ids = [self.tokenizer.encode(prompt.text).ids for prompt in chosen]
        trained = draft.load_draft(self.out / "draft", self.size, self.target)
        chain = evaluation.measure_acceptance(self.target, trained, ids)
        self.reporter.say(
            f"acceptance length at spec-{chain.n_drafts}: {card.shown(chain.length_outside_loops)} outside loops, "
            f"{card.shown(chain.length)} over all; looped {100 * chain.looped_share:.0f} %, "
            f"draft vocabulary covers {100 * chain.coverage:.1f} %"
        )
        data = card.Data(
            self.text.source,
            self.text.python,
            self.text.sha256,
            {name: len(stream) for name, stream in self.streams.items()},
        )
        stages = {name: self.folder.finished[name] for name in ("target", "draft")}
        made = card.make_card(self.size, self.options.seed, data, losses, stages, chain, _device_name(self.device))
        card.write_card(made, self.out)
        self.folder.finish("card", {})
        self.folder.clear_work()

    def card(self) -> dict[str, Any]:
        """The card as written."""
        return dict(json.loads((self.out / "card.json").read_text(encoding="utf-8")))

    def _fit(self, name: str, model: Any, loss: Any, evaluate: Any, stage: StageSize, share: float) -> Course:
        seconds = None if self.options.minutes is None else 60.0 * self.options.minutes * share
        plan = Plan(
            stage=name,
            size=stage,
            seed=self.options.seed,
            evaluate_every=max(1, stage.steps // 20),
            save_every=self.options.save_every,
            seconds=seconds,
            tokens_per_step=stage.batch * stage.window,
        )
        stop = self.options.stop_after
        stop_at = stop[1] if stop is not None and stop[0] == name else None
        course = Fit(model, loss, evaluate, plan, self.folder.work / f"{name}.pt", self.reporter, stop_at).run()
        self._keep_curve(name, course)
        return course

    def _keep_curve(self, stage: str, course: Course) -> None:
        path = self.out / "losses.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        others = [line for line in lines if json.loads(line)["stage"] != stage]
        mine = [json.dumps(record) for record in course.curve]
        path.write_text("".join(line + "\n" for line in [*others, *mine]), encoding="utf-8")

    def _on_device(self, split: str) -> Tensor:
        return torch.from_numpy(self.streams[split].astype(np.int32)).to(self.device)

    def _validation_text(self) -> Tensor:
        return self._on_device("validation")[: self.size.validation_tokens]

    def _validation_lessons(self) -> tuple[Tensor, int]:
        opening = min(_VALIDATION_OPENING, self.size.draft.window // 2)
        stream = self._on_device("validation").cpu()
        random = torch.Generator().manual_seed(self.options.seed)
        rows = min(_VALIDATION_PROMPTS, self.size.sequences)
        start = target.windows(stream, rows, opening, random)
        n_new = self.size.draft.window + 1 - opening
        written = generation.continue_greedily(self.target, start.tolist(), n_new)
        return torch.cat([start, written], dim=1).to(self.device), opening


def run(options: TrainOptions) -> int:
    """`eagle3lab train`: trains, or writes the corpus that would be trained on."""
    if options.write_corpus is not None:
        write_corpus(options.write_corpus, options.corpus)
    else:
        train(options)
    return EXIT_PASSED


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use.

    Raises:
        ExperimentError: with torch's reason.
    """
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as reason:  # a CPU build of torch asserts
        raise ExperimentError(
            f"--device {device!r} cannot be used: {str(reason).splitlines()[0]}",
            "cpu, or cuda on a machine whose torch sees a GPU",
            "leave --device out, or install a CUDA build of torch",
        ) from reason


def write_corpus(path: Path, source: Path | None = None) -> None:
    """Write the corpus that would be trained on to one file, so that another machine trains on the same text."""
    text = corpus.read_corpus(source) if source else corpus.read_stdlib()
    corpus.write_corpus(text, path)
    print(f"{path}: {len(text.documents)} documents, sha256 {text.sha256}")


def _outcome(model: torch.nn.Module, course: Course) -> dict[str, Any]:
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": course.step,
        "seconds": round(course.seconds, 1),
        "final_loss": next((record["loss"] for record in reversed(course.curve) if "loss" in record), None),
        "best": course.best,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
