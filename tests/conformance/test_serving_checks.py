"""The serving rows of the kit: numpy backends that break one promise each, and the row that says so."""

from __future__ import annotations

import dataclasses

import graph_chip
import numpy as np
from judged_backends import Backend, Session, failed, judge

from trivium.conformance import collect_checks, open_lab, run_conformance
from trivium.conformance.lab import Lab
from trivium.plugin import EagerExecutable, Memory, Pages, Step


class Executable(EagerExecutable):
    """Made by a session of its own kind, below."""


def running(executable):
    """A session that compiles to `executable`."""

    class Running(Session):
        def compile(self, program, weights):
            return executable(self, program, weights, self._kernels, self._spec, backend="test")

    return Running


def rows(session, only=""):
    return judge(Backend(session=session), "serving", only=only)


def test_a_right_backend_passes_every_row():
    assert failed(rows(running(Executable))) == set()


class RowBound(Session):
    """Takes for granted that a row of the batch goes on with the sequence that it had before."""

    first = None

    def step_state(self, state, batch):
        made = super().step_state(state, batch)
        table = made.block_table.copy()
        new = np.diff(batch.query_starts) == batch.context_lens
        self.first = {} if self.first is None else self.first
        for row in range(batch.seqs):
            if new[row]:
                self.first[row] = table[row, 0]
            table[row, 0] = self.first.get(row, table[row, 0])
        return dataclasses.replace(made, block_table=table)


def test_rows_taken_for_sequences_are_found_when_a_neighbour_is_cancelled():
    assert failed(rows(RowBound, only="cancelled")) == {"cancelled while prefilling", "cancelled while decoding"}


def test_a_request_that_fails_behind_several_steps_ends_with_large_pages_too():
    row = judge(Backend(page_sizes=(128,)), "serving", only="always fails")["serving", "a request that always fails"]
    assert row.status == "passed" and "the request ends with its fault" in row.detail


class Once(Executable):
    """Can't take a step that it has run before."""

    last: frozenset = frozenset()

    def run(self, batch):
        step, slots = super().run(batch), frozenset(batch.slot_mapping[0].tolist())
        if slots & self.last:
            step._sampled = step._sampled._replace(ids=(step._sampled.ids + 1) % 100)
        self.last = slots
        return step


def test_a_backend_that_cannot_run_a_step_again_is_found():
    assert failed(rows(running(Once), only="fails")) == {"a step that fails once", "a request that always fails"}


class Lazy(Executable):
    """Reads the arrays when the result is asked for."""

    def run(self, batch):
        outer, start = self, super().run

        class Late(Step):
            def tokens(self):
                outer.step = start(batch)
                return outer.step.tokens()

            def output(self, name):
                return outer.step.output(name)

        return Late()


def test_arrays_read_after_run_are_found():
    assert failed(rows(running(Lazy), only="arrays")) == {"arrays overwritten after run()"}


def swapped(pages):
    return Pages(*pages[:3], tuple((v, k) for k, v in pages.tensors))


class WrongExport(Session):
    def export_pages(self, group, ids):
        return swapped(super().export_pages(group, ids))


class WrongImport(Session):
    def import_pages(self, group, ids, pages):
        super().import_pages(group, ids, swapped(pages))


def test_pages_that_do_not_survive_a_move_are_found():
    assert failed(rows(WrongExport, only="moved")) == {"moved to another session", "moved to reference"}
    assert failed(rows(WrongImport, only="moved")) == {"moved to another session", "moved from reference"}


class Hoarding(Executable):
    """Keeps an array of every step."""

    def run(self, batch):
        self.__dict__.setdefault("kept", []).append(batch.token_ids.copy())
        return super().run(batch)


class Swelling(Session):
    """Says that its pages take more with each step."""

    def step_state(self, state, batch):
        self.steps = getattr(self, "steps", 0) + 1
        return super().step_state(state, batch)

    def memory(self):
        total, free, weights, kv = super().memory()
        return Memory(total, free, weights, kv + getattr(self, "steps", 0))


def test_what_grows_with_requests_is_found():
    assert failed(rows(running(Hoarding), only="leave nothing")) == {"1000 requests leave nothing"}
    assert failed(rows(Swelling, only="leave nothing")) == {"1000 requests leave nothing"}


class Keeping(Session):
    """Forgets to give its pages back."""

    kept: list = []

    def close(self):
        self.kept.append(dict(self._pool))
        super().close()


def test_memory_that_stays_after_close_is_found():
    assert failed(rows(Keeping, only="close")) == {"close() gives memory back"}
    Keeping.kept.clear()


class Stale(graph_chip.Captured):
    """Replays with the block tables of the capture."""

    def run(self, batch):
        if batch.tokens == batch.seqs:
            tables = self.__dict__.setdefault("tables", {}).setdefault(batch.block_tables.shape, batch.block_tables.copy())
            if self._sizes:
                batch = dataclasses.replace(batch, block_tables=tables)
        return super().run(batch)


def writing(batch, more):
    """Padding whose sequences are stored, in somebody else's place."""
    made = graph_chip_padded(batch, more)
    made.slot_mapping[:, batch.tokens :] = batch.slot_mapping[:, :1]
    return made


graph_chip_padded = graph_chip.padded


def graph_lab(monkeypatch, captured):
    monkeypatch.setattr(graph_chip, "Captured", captured)
    chip = graph_chip.GraphChip()
    device = chip.probe().devices[0]
    return Lab(chip, device, chip.capabilities(device), chip.kernels(device))


def judged_graphs(lab):
    return next(check for check in collect_checks(lab, ["serving"]) if check.name == "captured = eager").run()


def test_captured_steps_are_held_to_eager_ones(monkeypatch):
    right_chip = graph_chip.Captured
    right = judged_graphs(graph_lab(monkeypatch, right_chip))
    assert right.status == "passed" and "batches of 1 to 7" in right.detail
    assert judged_graphs(graph_lab(monkeypatch, Stale)).status == "failed"
    assert judged_graphs(open_lab("reference")).status == "skipped"
    monkeypatch.setattr(graph_chip, "padded", writing)
    assert judged_graphs(graph_lab(monkeypatch, right_chip)).status == "failed"


class CapturedDrafts(graph_chip.Captured):
    """Replays steps of several tokens a sequence, too, padded by tokens that belong to no sequence."""

    def run(self, batch):
        size = next((n for n in self._sizes if n >= batch.tokens), 0)
        self.log.append(("replay" if size else "eager", batch.tokens - batch.seqs))
        return self._eager.run(self.of(batch, size - batch.tokens) if size else batch)

    def of(self, batch, more):
        def pad(array, value):
            return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, more)], constant_values=value)

        made = {name: pad(getattr(batch, name), 0) for name in ("token_ids", "positions")}
        starts = np.append(batch.query_starts, batch.tokens + more).astype(np.int32)
        lens = np.append(batch.context_lens, more).astype(np.int32)
        tables = np.pad(batch.block_tables, [(0, 0), (0, 1), (0, 0)])
        return dataclasses.replace(
            batch, **made, query_starts=starts, context_lens=lens, block_tables=tables, slot_mapping=pad(batch.slot_mapping, -1)
        )  # fmt: skip


class FirstTokensOnly(CapturedDrafts):
    """A capture that stores the first token of each sequence alone."""

    def of(self, batch, more):
        made = super().of(batch, more)
        kept = np.full(made.slot_mapping.shape, -1, np.int64)
        kept[:, batch.query_starts[:-1]] = made.slot_mapping[:, batch.query_starts[:-1]]
        return dataclasses.replace(made, slot_mapping=kept)


class DraftChip(graph_chip.GraphChip):
    def capabilities(self, device):
        return dataclasses.replace(super().capabilities(device), graph_drafts=True)

    def open(self, device, options):
        own = dict(options)
        self.told = own.pop("graph_queries")
        return super().open(device, own)


def judged_drafts(monkeypatch, captured):
    monkeypatch.setattr(graph_chip, "Captured", captured)
    chip = DraftChip()
    device = chip.probe().devices[0]
    lab = Lab(chip, device, chip.capabilities(device), chip.kernels(device))
    row = next(check for check in collect_checks(lab, ["serving"]) if check.name == "captured drafts = eager").run()
    assert chip.told == 4 or row.status == "failed"
    return row


def test_captured_steps_that_verify_drafts_are_held_to_plain_ones(monkeypatch):
    replayed = []
    run = CapturedDrafts.run
    with monkeypatch.context() as patch:
        patch.setattr(CapturedDrafts, "run", lambda self, batch: (run(self, batch), replayed.append(self.log[-1]))[0])
        right = judged_drafts(monkeypatch, CapturedDrafts)
    assert right.status == "passed", right.detail
    assert any(what == "replay" and drafts > 0 for what, drafts in replayed)
    assert judged_drafts(monkeypatch, FirstTokensOnly).status == "failed"
    monkeypatch.undo()
    plain = graph_lab(monkeypatch, graph_chip.Captured)
    rows = {check.name: check for check in collect_checks(plain, ["serving"])}
    assert rows["captured drafts = eager"].run().status == "skipped"


def test_requests_move_between_the_reference_and_itself_under_its_own_name():
    report = run_conformance("reference", areas=["serving"])
    assert {r.name for r in report.rows if r.name.startswith("moved") and r.status == "passed"} == {
        "moved to another session", "moved from reference", "moved to reference",
    }  # fmt: skip
