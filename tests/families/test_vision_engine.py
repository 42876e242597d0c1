"""Tiny random models that see, in the whole engine: transformers' token ids, logprobs and greedy tokens, whatever the company, the
chunks, the pages, the backend, and where a request is moved in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from installed_backends import exact
from trivium import LLM, SamplingParams, errors
from trivium.engine import media
from trivium.ops import Span, Tile
from vision_cases import make_vision_model, oracle_inputs, oracle_processor, photo

pytestmark = pytest.mark.oracles
pytest.importorskip("PIL")

MADE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=MADE, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=MADE, ignore_eos=True, prompt_logprobs=2, logprobs=4)


def say(*parts: Any) -> list[dict[str, Any]]:
    """A chat of one message: strings are texts, everything else is an image."""
    return [{"role": "user", "content": [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts
    ]}]  # fmt: skip


CHATS = [
    say("see ", photo(64, 60), "what is it?"), say(photo(20, 30, 1)), say("no picture here, only a text"),
    say("one ", photo(31, 9, 2), " and another ", photo(90, 30, 3), " differ?"), say(photo(64, 60, 4), "what is it?"),
]  # fmt: skip


class Case(NamedTuple):
    """A checkpoint; of each chat its ids, transformers' greedy continuation, and log-probabilities[rows, vocab] of both."""

    folder: Path
    ids: list[list[int]]
    made: list[list[int]]
    scores: list[np.ndarray]


@pytest.fixture(scope="module", params=["SmolVLM"])
def other(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("vision") / request.param)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(tmp_path_factory.mktemp("vision") / "Idefics3")


def make_case(folder: Path) -> Case:
    import torch

    model, processor = make_vision_model(folder, folder.name), oracle_processor()
    ids, made, scores = [], [], []
    for chat in CHATS:
        given = oracle_inputs(processor, chat)
        ids.append(given["input_ids"][0].tolist())
        with torch.inference_mode():
            whole = model.generate(**given, max_new_tokens=MADE, do_sample=False, pad_token_id=0)
            given["input_ids"], given["attention_mask"] = whole, torch.ones_like(whole)
            scores.append(model(**given).logits[0].log_softmax(-1).numpy())
        made.append(whole[0, len(ids[-1]) :].tolist())
    return Case(folder, ids, made, scores)


def opened(case: Case, backend: str = "reference", **settings: Any) -> LLM:
    return LLM(case.folder, backend, progress=False, **{"num_kv_blocks": 300, **exact(backend), **settings})


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_token_ids_are_the_oracle_s(case: Case) -> None:
    with opened(case) as llm:
        assert [llm.encode_chat(chat, add_generation_prompt=True) for chat in CHATS] == case.ids
        assert llm.takes_images


def test_smolvlm_is_the_same_family(other: Case) -> None:
    with opened(other, "cpu") as llm:
        outputs = llm.chat(CHATS, GREEDY)
        assert [list(output.prompt_token_ids) for output in outputs] == other.ids and tokens(outputs) == other.made


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_every_logprob_of_prompt_and_answer_is_the_oracle_s(case: Case, backend: str) -> None:
    with opened(case, backend) as llm:
        outputs = llm.chat(CHATS, SCORED)
        for output, ids, made, scores in zip(outputs, case.ids, case.made, case.scores):
            assert list(output.prompt_token_ids) == ids and list(output.outputs[0].token_ids) == made
            rows = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
            assert len(rows) == len(ids) + len(made) and rows[0] is None
            for at, row in enumerate(rows[1:]):
                for token, found in row.items():
                    assert abs(found.logprob - scores[at, token]) < 1e-4, (at, token)
        assert tokens(llm.chat(CHATS[3:], GREEDY)) == case.made[3:]  # with what was kept of the first time


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_few_pages_and_chunks_that_cut_images_change_no_token(case: Case, budget: int) -> None:
    settings = {"num_kv_blocks": 24, "max_num_batched_tokens": budget, "block_size": 8, "enable_prefix_caching": False}
    with opened(case, max_model_len=190, **settings) as llm:
        assert tokens(llm.chat(CHATS, GREEDY)) == case.made
        patient = llm.stream(CHATS[0], GREEDY, priority=5)
        begun = [*next(patient).outputs[0].token_ids]
        assert tokens(llm.chat(CHATS[3:], GREEDY)) == case.made[3:]
        assert llm.engine.stats.preemptions > 0
        assert begun + [token for news in patient for token in news.outputs[0].token_ids] == case.made[0]
        llm.engine.check()


def test_equal_images_share_pages_and_others_of_the_same_size_do_not(case: Case) -> None:
    head, tail = "a text that fills a page and more; ", " and a question"
    ask = [say(head, photo(64, 60, seed), tail) for seed in (1, 1, 2)]
    with opened(case, block_size=8) as llm:
        first, again, other = (llm.chat(chat, GREEDY)[0] for chat in ask)
        cached = [output.metrics.num_cached_tokens for output in (first, again, other)]
        start = list(first.prompt_token_ids).index(max(first.prompt_token_ids, key=list(first.prompt_token_ids).count))
        assert cached[0] == 0 and cached[1] >= len(first.prompt_token_ids) - 8
        assert start - 8 < cached[2] <= start, "pages before the image are shared, none that shows it"
        assert list(first.prompt_token_ids) == list(other.prompt_token_ids)
        assert tokens([first]) == tokens([again]) != tokens([other])
    with opened(case, enable_prefix_caching=False) as llm:
        assert tokens(llm.chat(ask, GREEDY)) == tokens([first, again, other])


def test_pages_come_back_from_memory_and_disk_with_their_own_image(case: Case, tmp_path: Path) -> None:
    same_size = [say(photo(64, 60, seed), "what is it?") for seed in range(4, 8)]
    settings = {"num_kv_blocks": 20, "block_size": 8, "max_model_len": 150, "kv_host_bytes": 1 << 24, "kv_disk_path": tmp_path}
    with opened(case, **settings) as llm:
        fresh = [tokens(llm.chat(chat, GREEDY))[0] for chat in same_size]
        llm.engine.kv.tiers.worth = lambda keys, tokens: bool(list(keys))  # whatever is quicker: what is found must be right
        again = [llm.chat(chat, GREEDY)[0] for chat in same_size]
        assert tokens(again) == fresh and fresh[0] == case.made[4] and len({tuple(made) for made in fresh}) > 1
        assert llm.engine.stats.restored_host_tokens > 0
    with opened(case, **settings) as llm:
        llm.engine.kv.tiers.worth = lambda keys, tokens: bool(list(keys))
        assert [tokens(llm.chat(chat, GREEDY))[0] for chat in same_size] == fresh
        assert llm.engine.stats.restored_disk_tokens > 0


@pytest.mark.parametrize(("ahead", "backend"), [("cpu", "reference"), ("reference", "torch")])
def test_prompts_on_one_backend_and_answers_on_another(case: Case, ahead: str, backend: str) -> None:
    with opened(case, backend, prefill=ahead, prefill_options=exact(ahead)) as llm:
        assert tokens(llm.chat(CHATS, GREEDY)) == case.made


@pytest.mark.parametrize("pages", [True, False])
def test_a_request_that_is_carried_as_bytes_goes_on_elsewhere(case: Case, pages: bool) -> None:
    from trivium.engine import RequestState

    with opened(case) as here, opened(case, "cpu", enable_prefix_caching=False) as there:
        ids, spans = here._read_chat(CHATS[3], {})
        number = here.engine.add_request(ids, GREEDY, media=spans)
        while len(here.engine._requests[number].completions[0].token_ids) < 3:
            here.engine.step()
        state = RequestState.from_bytes(here.engine.export_request(number, pages=pages).to_bytes())
        number, outputs = there.engine.import_request(state), []
        while not outputs:
            outputs = there.engine.step()
        assert tokens(outputs) == [case.made[3]]
        state.header["media"][0][1] = 4000
        with pytest.raises(errors.TriviumError):
            there.engine.import_request(state)


def test_samples_and_drafts_see_the_same_image(case: Case) -> None:
    with opened(case, "cpu", seed=3) as llm:
        one = llm.chat(CHATS[0], SamplingParams(temperature=0.8, max_tokens=MADE, n=3, ignore_eos=True))[0]
    with opened(case, "cpu", seed=3, enable_prefix_caching=False, max_num_batched_tokens=20) as llm:
        two = llm.chat(CHATS[0], SamplingParams(temperature=0.8, max_tokens=MADE, n=3, ignore_eos=True))[0]
    assert [list(o.token_ids) for o in one.outputs] == [list(o.token_ids) for o in two.outputs]
    with opened(case, "cpu", speculative={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert tokens(llm.chat(CHATS, GREEDY)) == case.made


def test_beams_that_are_preempted_see_their_image_again(case: Case) -> None:
    import torch

    given = oracle_inputs(oracle_processor(), CHATS[1])
    model = make_vision_model(case.folder.with_name("beams"), case.folder.name)
    with torch.inference_mode():
        options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": MADE, "do_sample": False, "pad_token_id": 0}
        want = model.generate(**given, **options)[:, given["input_ids"].shape[1] :].tolist()
    beams = SamplingParams(max_tokens=MADE, beam_width=3, n=3, ignore_eos=True)
    with opened(case, block_size=8) as llm:
        assert [list(o.token_ids) for o in llm.chat(CHATS[1], beams)[0].outputs] == want
    with opened(case, num_kv_blocks=20, block_size=8, max_model_len=145, enable_prefix_caching=False) as llm:
        ids, spans = llm._read_chat(CHATS[1], {})
        number = llm.engine.add_request(ids, beams, media=spans, priority=5)
        for _ in range(4):
            llm.engine.step()
        assert all(beam.seq.media == spans for beam in llm.engine._requests[number].completions)
        later = llm.engine.add_request((case.ids[2] * 3)[:120], GREEDY)
        outputs = {}
        while llm.engine.has_unfinished():
            outputs.update({output.request_id: output for output in llm.engine.step()})
        assert later in outputs and llm.engine.stats.preemptions > 0
        assert [list(o.token_ids) for o in outputs[number].outputs] == want


def test_a_prompt_that_is_cut_shows_what_is_left_of_its_images(case: Case) -> None:
    import torch

    whole = oracle_inputs(oracle_processor(), CHATS[0])
    row = whole["input_ids"][0].tolist()
    image = max(row, key=row.count)
    keep = len(row) - (row.index(image) + 16)  # the first tile is gone
    model = make_vision_model(case.folder.with_name("cut"), case.folder.name)
    given = {"input_ids": whole["input_ids"][:, -keep:], "pixel_values": whole["pixel_values"][:, 1:]}
    with torch.inference_mode():
        want = model.generate(**given, attention_mask=torch.ones(1, keep), max_new_tokens=MADE, do_sample=False, pad_token_id=0)
    params = SamplingParams(temperature=0.0, max_tokens=MADE, ignore_eos=True, truncate_prompt_tokens=keep)
    with opened(case) as llm:
        assert tokens(llm.chat(CHATS[0], params)) == [want[0, keep:].tolist()]


def test_what_the_tower_made_is_kept_within_its_bytes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(case, enable_prefix_caching=False) as llm:
        images, runs = llm.loaded.images, []
        run = type(images)._run
        noted = lambda self, tower, tiles, pages: runs.append(len(tiles)) or run(self, tower, tiles, pages)
        monkeypatch.setattr(type(images), "_run", noted)
        assert tokens(llm.chat([CHATS[0]] * 3, GREEDY)) == [case.made[0]] * 3
        assert sum(runs) == 5  # four tiles and the whole, once
        monkeypatch.setattr(media, "KEPT_BYTES", 2 * 16 * 64 * 4)
        assert tokens(llm.chat([CHATS[3], CHATS[0]], GREEDY)) == [case.made[3], case.made[0]]
        assert len(images._kept) == 2


def test_a_tower_that_fails_ends_the_request_that_needs_it_and_no_other(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(case) as llm:
        monkeypatch.setattr(llm.loaded.images._tower.executable, "run", lambda batch: 1 / 0)
        text, picture = llm.chat([CHATS[2], CHATS[1]], GREEDY)
        assert tokens([text]) == [case.made[2]] and text.error is None
        assert picture.outputs[0].finish_reason == "error" and isinstance(picture.error, errors.BackendError)
        monkeypatch.undo()
        assert tokens(llm.chat(CHATS[1], GREEDY)) == [case.made[1]]
        llm.engine.check()


@pytest.mark.parametrize("messages", [
    say("<image> in a text ", photo(20, 20)), say("<image>", "<image>", photo(9, 9)),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "video", "video": "x"}]}], [{"role": "user", "content": [{"type": "image"}]}],
])  # fmt: skip
def test_chats_that_can_t_be_read_are_refused_before_they_take_anything(case: Case, messages: Any) -> None:
    with opened(case) as llm:
        with pytest.raises(errors.InvalidRequestError):
            llm.chat(messages, GREEDY)
        assert not llm.engine.has_unfinished()
        assert tokens(llm.chat(CHATS[1], GREEDY)) == [case.made[1]]


def test_a_backend_that_can_t_run_a_tower_says_so_where_an_image_comes_and_reads_text(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trivium.engine import loader
    from trivium.plugin import Session
    from trivium_torch.session import TorchSession

    def without(backend: Any, device: Any) -> Any:
        return [kernel for kernel in kernels_of(backend, device) if kernel.op != "media_rows"]

    kernels_of = loader.kernels_of
    with monkeypatch.context() as patched:
        patched.setattr(loader, "kernels_of", without)
        lacks_kernel = opened(case)
    with monkeypatch.context() as patched:
        patched.setattr(TorchSession, "assign", Session.assign)
        lacks_assign = opened(case, "torch")
    for llm, why in ((lacks_kernel, "media_rows"), (lacks_assign, "can't change")):
        with llm:
            assert not llm.takes_images
            with pytest.raises(errors.UnsupportedError, match=why):
                llm.chat(CHATS[1], GREEDY)
            assert tokens(llm.chat(CHATS[2], GREEDY)) == [case.made[2]]


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    from tiny_checkpoints import make_checkpoint

    folder = make_checkpoint(tmp_path / "blind", "llama")
    with LLM(folder, "reference", progress=False, num_kv_blocks=20) as llm:
        assert not llm.takes_images
        with pytest.raises(errors.UnsupportedError, match="text only"):
            llm.engine.add_request([1, 2], GREEDY, media=[Span(0, 1, Tile(b"x" * 32, np.zeros((1, 1), np.uint8)), 0)])


@pytest.mark.parametrize("spans", [[(0, 0)], [(3, 2)], [(5, 9), (2, 4)], [(2, 5), (4, 6)], [(0, 500)], [(-1, 3)]])
def test_spans_that_don_t_lie_in_order_within_the_prompt_are_refused(case: Case, spans: list[tuple[int, int]]) -> None:
    with opened(case) as llm:
        ids, media = llm._read_chat(CHATS[1], {})
        wrong = [media[0]._replace(start=start, stop=stop) for start, stop in spans]
        with pytest.raises(errors.InvalidRequestError, match="in order"):
            llm.engine.add_request(ids, GREEDY, media=wrong)
