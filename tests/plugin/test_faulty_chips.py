"""Whatever a plugin does wrong is a typed error with its name and its reason; nothing hangs, and nobody else is harmed."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from fake_plugins import install
from faulty_chips import faulty
from tiny_checkpoints import make_checkpoint

from trivium import LLM, SamplingParams
from trivium.conformance import run_conformance
from trivium.errors import BackendError, BackendUnavailableError, PluginError
from trivium.plugin import HostFallbackWarning, find_backends, registry, resolve

PROMPTS = [[5, 9, 2], [77, 3], [8, 8, 1, 4]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

UNUSED = """def kernels(self, device):
        return [Kernel(Pattern('p', lambda b, x, y: b.scale(x, factor=2.0)), print)]
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("models") / "llama", "llama"))


def answers(model, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HostFallbackWarning)
        with LLM(model, backend, num_kv_blocks=24, progress=False) as llm:
            return llm.generate(PROMPTS, GREEDY)


def ids(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("threading.Event().wait()", "probe() has not answered for 0.05 seconds"),
        ("sys.exit(3)", "probe failed: SystemExit: 3"),
        ("return None", "probe() returned None, not a Probe"),
        ("return Probe([1, 2])", "not a Probe of Devices"),
        ("return Probe(())", "does not say why"),
    ],
)
def test_a_probe_that_hangs_or_answers_nonsense_is_a_reason(site, monkeypatch, body, reason):
    install(site, "badchip", faulty(backend=f"def probe(self): {body}"))
    monkeypatch.setattr(registry, "PROBE_SECONDS", 0.05 if "wait" in body else 60.0)
    with pytest.raises(BackendUnavailableError, match="'badchip' has no device here") as refusal:
        resolve("badchip")
    assert reason in str(refusal.value)
    monkeypatch.setattr(registry, "PROBE_SECONDS", 60.0)
    assert resolve("reference")[1].name == "numpy"


def test_what_a_plugin_prints_while_it_is_looked_for_does_not_reach_standard_output(site, capsys):
    install(site, "badchip", "print('LOADING')" + faulty(backend="def probe(self): print('PROBING'); return super().probe()"))
    assert resolve("badchip")[1].name == "fake chip"
    out, err = capsys.readouterr()
    assert out == "" and "LOADING" in err and "PROBING" in err


def test_details_of_any_kind_become_json(site):
    install(site, "badchip", faulty(backend="def probe(self): return Probe((Device(0, 'x', 0, {'lock': threading.Lock()}),))"))
    listed = next(s for s in find_backends() if s.name == "badchip").to_json()
    assert "lock" in json.loads(json.dumps(listed))["devices"][0]["details"]["lock"]


@pytest.mark.parametrize("name", ["auto", "a:b", "Upper", "with space"])
def test_a_name_that_nobody_could_ask_for_is_refused(site, name):
    install(site, name, faulty(name), distribution="trivium-odd")
    listed = next(s for s in find_backends() if s.name == name)
    assert "lower case without blanks and colons, and not 'auto'" in listed.reason
    assert resolve("auto")[0].name != name


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"capabilities": "weight_formats=(WeightFormat('tiled', 8.0),)"}, "float32 must be among them"),
        ({"capabilities": "page_sizes=()"}, "page_sizes = (): it must list something"),
        ({"capabilities": "page_sizes=(0,)"}, "from 1 up"),
        ({"capabilities": "kv_dtypes=('float32', 'float32')"}, "each once"),
        ({"capabilities": "max_batched_tokens=0"}, "from 1 up"),
        ({"capabilities": "sampling=['top_k']"}, "sampling or unsupported"),
        ({"backend": "def capabilities(self, device): return None"}, "capabilities() returned a NoneType, not a Capabilities"),
        ({"backend": "def capabilities(self, device): raise KeyError('x')"}, "capabilities() failed: KeyError: 'x'"),
        ({"backend": "def kernels(self, device): raise RuntimeError('no lib')"}, "kernels() failed: RuntimeError: no lib"),
        ({"backend": "def kernels(self, device): return [print]"}, "kernels() returned a builtin"),
        ({"backend": "def kernels(self, device): return [Kernel(7, print)]"}, "op of '' returned a int"),
        ({"backend": "def kernels(self, device): return [Kernel('add', print, 'x', None)]"}, "priority of 'x' returned a NoneType"),
        ({"backend": UNUSED}, "kernels() failed: ProgramError: pattern p: nothing inside uses y"),
        ({"backend": "def open(self, device, options): raise OSError('busy')"}, "open() failed: OSError: busy"),
        ({"backend": "def open(self, device, options): return 7"}, "open() returned a int, not a Session"),
        (
            {"session": "def load(self, weight, format): raise ValueError('layout')\n    def close(self): raise OSError"},
            "load('rope.inv_freq', 'float32') failed: ValueError: layout",
        ),
        ({"session": "def memory(self): raise OSError('gone')\n    def kv_store(self, s, n): self.memory()"}, "OSError: gone"),
        ({"session": "def compile(self, program, weights): return 7"}, "compile() returned a int, not a Executable"),
    ],
)
def test_a_fault_before_the_first_step_is_a_plugin_error_with_name_and_reason(site, model, fault, reason):
    install(site, "badchip", faulty(**fault))
    with pytest.raises(PluginError, match="backend 'badchip'") as refusal:
        answers(model, "badchip")
    assert reason in str(refusal.value)


@pytest.mark.parametrize(("answer", "reason"), [("c.x", "failed: AttributeError"), ("False", "returned a bool, not a str | None")])
def test_a_supports_that_raises_or_is_a_truth_value_names_its_kernel(site, model, answer, reason):
    install(site, "badchip", faulty(backend=f"def kernels(self, d): return [Kernel('add', print, 'mine', 0, lambda c: {answer})]"))
    with pytest.raises(PluginError, match=rf"kernel 'mine' of trivium_badchip_.*: supports\(\) {re.escape(reason)}"):
        answers(model, "badchip")


def test_a_kernel_for_no_operator_and_an_unknown_parameter_fail_the_kit(site):
    install(site, "badchip", faulty(
        capabilities="sampling=frozenset({'topp'})", backend="def kernels(self, d): return [Kernel('lineer', print)]"
    ))  # fmt: skip
    row = run_conformance("badchip", areas=["rules"]).rows[0]
    assert (row.status, row.name) == ("failed", "capabilities") and "topp, lineer" in row.detail


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_step_that_fails_once_changes_no_text(site, model, step):
    install(site, "badchip", faulty(run=f"if self.steps == {step}: raise RuntimeError('parity')"))
    assert ids(answers(model, "badchip")) == ids(answers(model, "reference"))


def test_a_request_that_always_fails_ends_and_its_neighbours_keep_their_text(site, model):
    install(site, "badchip", faulty(run="if (batch.token_ids == 77).any(): raise RuntimeError('hates 77')"))
    got, want = answers(model, "badchip"), answers(model, "reference")
    assert ids([got[0], got[2]]) == ids([want[0], want[2]])
    assert got[1].outputs[0].finish_reason == "error" and isinstance(got[1].error, BackendError)
    assert "hates 77" in str(got[1].error)


@pytest.mark.parametrize(
    "ids_", ["s.ids[:-1]", "s.ids[:, None]", "s.ids * 0 - 1", "s.ids * 0 + 10**6", "s.ids * float('nan')", "None"]
)
def test_nonsense_from_tokens_is_a_backend_error(site, model, ids_):
    install(site, "badchip", faulty(tokens=f"s._replace(ids={ids_})"))
    with pytest.raises(BackendError):
        answers(model, "badchip")


def test_a_backend_that_keeps_and_spoils_the_step_s_arrays_spoils_no_text(site, model):
    spoil = "old = getattr(self, 'old', None); [getattr(old, n).fill(0) for n in ('token_ids', 'block_tables') if old]"
    install(site, "badchip", faulty(run=f"{spoil}; self.old = batch"))
    assert ids(answers(model, "badchip")) == ids(answers(model, "reference"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [("raise OSError('parity')", "OSError: parity"), ("return 1, 2", "ValueError"), ("return []._cells", "AttributeError")],
)
def test_a_kernel_that_fails_is_named_with_its_call(site, model, body, reason):
    kernels = "return [Kernel('add', self.bad, 'bad adder')]"
    members = f"def bad(self, session, args, attrs): {body}\n    def kernels(self, device): {kernels}"
    install(site, "badchip", faulty(backend=members))
    with pytest.raises(BackendError, match=r"backend 'dayone': bad adder in add\(.* failed: ") as failure:
        answers(model, "badchip")
    assert reason in str(failure.value)
